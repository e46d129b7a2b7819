"""Forks: new sessions that continue the conversation of another session."""

from __future__ import annotations

from dataclasses import replace

from hutch_daemon.keys.vault import Vault, session_context
from hutch_daemon.services.access import Access, Caller
from hutch_daemon.services.accounts import Accounts
from hutch_daemon.services.sessions import SessionService
from hutch_daemon.store.rows import FORK_MARK
from hutch_shared import messages as m
from hutch_shared.errors import HutchError, Reason
from hutch_shared.ids import new_id
from hutch_shared.times import now_ms

__all__ = ["ForkService"]


class ForkService:
    """The method of the client socket that forks a session."""

    def __init__(self, access: Access, accounts: Accounts, vault: Vault, sessions: SessionService) -> None:
        """`sessions` opens the forks."""
        self._access = access
        self._accounts = accounts
        self._vault = vault
        self._sessions = sessions

    async def fork_session(self, caller: Caller, params: m.ForkSession) -> m.Session:
        """Open a session that continues another session's conversation, with the same settings."""
        self._access.require_serving()
        row = await self._access.session(caller, params.session)
        if row.agent_session is None:
            raise HutchError(Reason.WRONG_STATE, "The session has no conversation yet that a fork could continue.")
        self._accounts.require_allowed(row)
        session, sealed = new_id("session"), row.sealed
        if sealed is not None:
            plain = self._vault.open(session_context(row.id), sealed)
            sealed = self._vault.seal(session_context(session), plain)
        fork = replace(
            row,
            id=session,
            name=params.name or f"{row.name}-fork-{session[2:6]}",
            created_at=now_ms(),
            state="open",
            closed_at=None,
            killed=None,
            sealed=sealed,
            agent_session=FORK_MARK + row.agent_session.removeprefix(FORK_MARK),
            forked_from=row.id,
            agent_dir=None,
            instructions=None,
            idempotency_key=None,
            head_seq=0,
            floor_seq=0,
            turns=0,
        )
        return await self._sessions.open_row(caller, fork)
