"""Which Unix account a person's agents run as: by the map of the settings, or one that the person may name.

A person is known by the kernel's word, as a uid and the name that goes with it; `[accounts] map` says which account
that is, and who is not in it is his own. Nothing here makes or changes an account. What is always true: root is never
an answer, however it is called, and nobody runs as another's account whom neither `run_as` nor `admins` names.

    account_for(person, uid, wanted, accounts, *, admin) -> name of the account, or HutchError
    mapped(person, accounts) -> name of the account
    may_run_as(person, account, accounts, *, admin) -> bool

They are for system mode: a hutchd in user mode has one account, its own, which may be root's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from hutch_daemon.environments.accounts import uid_of
from hutch_daemon.settings import AccountSettings
from hutch_shared.errors import HutchError, Reason

__all__ = ["account_for", "mapped", "may_run_as"]

_ROOT: Final = "root"


def mapped(person: str, accounts: AccountSettings) -> str:
    """Return the account of a person: the one that the map names, else the person's own."""
    return accounts.map.get(person, person)


def may_run_as(person: str, account: str, accounts: AccountSettings, *, admin: bool) -> bool:
    """Tell whether a person may have agents under an account: the mapped one, those of `run_as`, for admins any.

    Of who is mapped to another account, the own one is like anybody's. Never `root`.
    """
    if account == _ROOT:
        return False
    return admin or account == mapped(person, accounts) or account in accounts.run_as.get(person, ())


def account_for(
    person: str,
    uid: int,
    wanted: str | None,
    accounts: AccountSettings,
    *,
    admin: bool,
    uid_of: Callable[[str], int | None] = uid_of,
) -> str:
    """Return the name of the account that a session of `person` runs as; `wanted` is what `--account` named.

    `not_allowed`: the account is not for this person, the same words whether there is one or not; or it is one of uid
    0. `invalid_params`: an admin named one that is not there. `isolation_unavailable`: the person's own is not there.
    """
    own = mapped(person, accounts)
    account = own if wanted is None else wanted
    if account == _ROOT:
        raise _no_root(account)
    if not may_run_as(person, account, accounts, admin=admin):
        others = accounts.run_as.get(person, ())
        raise HutchError(
            Reason.NOT_ALLOWED,
            f"You may not run agents as {account}. Yours run as {own}{_or(others)}; an administrator can add an account"
            f" for you in the settings, [accounts] run_as.",
        )
    found = uid_of(account)
    if found == 0:
        raise _no_root(account)
    if found is None and account != own:
        raise HutchError(Reason.INVALID_PARAMS, f"There is no account {account} on this host: --account names one.")
    if found is None or (account == person and found != uid):  # the second: a name that is another's
        meant = f"you ({person}, uid {uid})" if person != own else f"uid {uid}"
        raise HutchError(
            Reason.ISOLATION_UNAVAILABLE,
            f"There is no account {account} on this host for agents of {meant} to run as; an administrator can map you"
            " to one in the settings, [accounts] map.",
        )
    return account


def _no_root(account: str) -> HutchError:
    whose = "root" if account == _ROOT else f"{account}, which is root"
    return HutchError(
        Reason.NOT_ALLOWED,
        f"Agents never run as {whose}: name an account for them with --account, or map one in the settings, [accounts]"
        " map.",
    )


def _or(others: tuple[str, ...]) -> str:
    return f", or with --account as {' or '.join(others)}" if others else ""
