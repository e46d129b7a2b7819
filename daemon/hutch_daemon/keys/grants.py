"""What an executor may have of a key, and the line in the audit that says so."""

from __future__ import annotations

from collections.abc import Callable

from hutch_daemon.keys.vault import Vault
from hutch_daemon.settings import Settings
from hutch_daemon.store import audit
from hutch_daemon.store.rows import AuditRow, SessionRow
from hutch_daemon.store.store import Store
from hutch_shared import messages as m
from hutch_shared.errors import HutchError
from hutch_shared.times import now_ms

__all__ = ["Grants"]


class Grants:
    """Gives an executor the secret itself."""

    def __init__(self, store: Store, vault: Vault, settings: Callable[[], Settings]) -> None:
        self._store = store
        self._vault = vault
        self._settings = settings

    async def grant(self, session: SessionRow, provider: str) -> m.KeyGrant:
        """Return the session's credential. `no_key`, `key_unreadable`."""
        try:
            row, credential = await self._vault.reveal(session.owner, provider, session.credential)
        except HutchError as error:
            await self._note(session, provider, error.reason.word, None)
            raise
        await self._vault.touch(row.id)
        await self._note(session, provider, "direct", row.id)
        return m.KeyGrant(
            delivery="direct",
            value=credential.secret.reveal(),
            base_url=credential.base_url or self._settings().provider(provider).base_url,
            auth="api_key" if credential.kind == "api_key" else "bearer",
        )

    async def _note(self, session: SessionRow, provider: str, outcome: str, key: str | None) -> None:
        line = AuditRow(
            at=now_ms(),
            owner=session.owner,
            actor="executor",
            action="get_api_key",
            outcome=outcome,
            session=session.id,
            subject=key,
            details={"provider": provider},
        )
        await self._store.write(lambda tx: audit.write(tx, line))
