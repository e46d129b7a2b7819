"""The account that a session runs as, and the check whether its owner may still use it."""

from __future__ import annotations

import os
from collections.abc import Callable

from hutch_daemon.environments.port import Account
from hutch_daemon.services.access import Caller
from hutch_daemon.services.account_map import account_for, may_run_as
from hutch_daemon.settings import SettingsInForce
from hutch_daemon.store.rows import SessionRow
from hutch_shared.errors import HutchError, Reason

__all__ = ["Accounts"]


class Accounts:
    """Finds and checks the accounts of sessions."""

    def __init__(
        self,
        by_uid: Callable[[int], Account],
        by_name: Callable[[str], Account],
        settings: SettingsInForce,
        is_admin: Callable[[int], bool],
        *,
        system: bool,
    ) -> None:
        """`by_uid` and `by_name` raise `isolation_unavailable` for an account that does not exist.

        `is_admin` returns whether the current settings name a uid as administrator. In user mode (not `system`) the
        only account is hutchd's own.
        """
        self.by_uid = by_uid
        self._by_name = by_name
        self._settings = settings
        self._is_admin = is_admin
        self._system = system

    def of_session(self, session: SessionRow) -> Account:
        """Return the account that a session runs as; `isolation_unavailable` if it does not exist any more."""
        own = self.by_uid(session.owner)
        return own if own.name == session.account else self._by_name(session.account)

    def require_allowed(self, session: SessionRow) -> Account:
        """Return the session's account; `not_allowed` if the current settings no longer let its owner use it."""
        account = self.of_session(session)
        if self._system and account.uid != os.geteuid():
            user, admin = self.by_uid(session.owner).name, self._is_admin(session.owner)
            if not may_run_as(user, account.name, self._settings.current.accounts, admin=admin):
                raise HutchError(
                    Reason.NOT_ALLOWED,
                    f"{user} may not run agents as {account.name} any more ([accounts] map and run_as of the"
                    " settings); the session can be read and closed.",
                )
        return account

    def for_new_session(self, caller: Caller, wanted: str | None) -> Account:
        """Return the account that a new session of the caller runs as; `wanted` is the account that it named."""
        own = self.by_uid(caller.uid)
        if not self._system:
            if wanted not in (None, own.name):
                raise HutchError(
                    Reason.NOT_ALLOWED, f"This hutchd is {own.name}'s alone: it runs no agents as other accounts."
                )
            return own
        if caller.uid == os.geteuid() and wanted in (None, own.name):
            return own
        name = account_for(
            own.name, caller.uid, wanted, self._settings.current.accounts, admin=caller.admin, uid_of=self._uid_of
        )
        account = own if name == own.name else self._by_name(name)
        if account.uid == os.geteuid():
            raise HutchError(Reason.NOT_ALLOWED, f"{name} is the account of hutchd itself: no agent runs as it.")
        return account

    def _uid_of(self, name: str) -> int | None:
        try:
            return self._by_name(name).uid
        except HutchError:
            return None
