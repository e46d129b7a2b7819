"""Decides the Unix account that a user's agents run as: the user's own, one from the settings, or one that they choose.

The kernel reports a user's uid; `[accounts] map` maps the user's name to an account, and a user who is not in it has
their own account. Nothing here creates or changes an account. What is always true: the result is never root, even under
another name, and no user gets another user's account unless `map`, `run_as` or `admins` allows it.

These functions are for system mode. A hutchd in user mode has only its own account, which may be root.
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
    """Return the account that the map names for a user, or the user's own."""
    return accounts.map.get(person, person)


def may_run_as(person: str, account: str, accounts: AccountSettings, *, admin: bool) -> bool:
    """Return whether a user may run agents as an account: the mapped one, those in `run_as`, or any for administrators.

    A user who is mapped to another account may not use their own account without `run_as`. Always False for `root`.
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
    """Return the name of the account that a session of `person` runs as. `wanted` is the argument of `--account`.

    `not_allowed` if the user may not use the account (with the same words if it does not exist), or if its uid is 0;
    `invalid_params` if an administrator named an account that does not exist; `isolation_unavailable` if the user's own
    account does not exist.
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
        raise HutchError(Reason.INVALID_PARAMS, f"--account names {account}, but this host has no such account.")
    if found is None or (account == person and found != uid):  # an account with the user's name may have another uid
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
