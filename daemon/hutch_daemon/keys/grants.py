"""What an executor may have of a key: a lease that works at the broker alone, or, by the owner's choice, the secret.

Every answer leaves a line in the audit, never the value.
"""

from __future__ import annotations

from collections.abc import Callable

from hutch_daemon.keys.broker import Broker, LeaseHolder
from hutch_daemon.keys.vault import Vault
from hutch_daemon.settings import Settings
from hutch_daemon.store import audit
from hutch_daemon.store.rows import AuditRow, SessionRow
from hutch_daemon.store.store import Store
from hutch_shared import messages as m
from hutch_shared.errors import HutchError, Reason
from hutch_shared.times import now_ms

__all__ = ["Grants"]


class Grants:
    """Gives leases where there is a broker, else the secrets themselves."""

    def __init__(
        self, store: Store, vault: Vault, settings: Callable[[], Settings], broker: Broker | None = None
    ) -> None:
        """Without `broker` every key is handed out, and sessions that need one are exposed."""
        self._store = store
        self._vault = vault
        self._settings = settings
        self._broker = broker

    async def grant(self, session: SessionRow, provider: str, holder: LeaseHolder | None = None) -> m.KeyGrant:
        """Return what the session's executor gets; a lease is for the processes of `holder`.

        `no_key`, `key_unreadable`; `agent_unavailable` when there is no broker to be had.
        """
        delivery, why = self.delivery(provider)
        key = None
        try:
            if delivery == "direct" and self._settings().keys.refuse_exposed:
                raise HutchError(Reason.ISOLATION_UNAVAILABLE, f"Keys are not handed out to agents here. {why}")
            row, credential = await self._vault.reveal(session.owner, provider, session.credential)
            key = row.id
            if delivery == "lease":
                assert self._broker is not None
                assert holder is not None, "a lease is for the processes of an executor"
                given = await self._broker.lease(session, holder, provider, row)
            else:
                given = m.KeyGrant(
                    delivery="direct",
                    value=credential.secret.reveal(),
                    base_url=credential.base_url or self._settings().provider(provider).base_url,
                    auth="api_key" if credential.kind == "api_key" else "bearer",
                )
                await self._vault.touch(row.id)
        except HutchError as error:
            await self._note(session, provider, error.reason.word, key, holder)
            raise
        await self._note(session, provider, delivery, key, holder)
        return given

    def delivery(self, provider: str) -> tuple[m.Delivery, str]:
        """Return how a provider's keys are handed out, and why, a sentence."""
        if self._settings().provider(provider).delivery == "direct":
            return "direct", f'The settings say so: [providers.{provider}] delivery = "direct".'
        if self._broker is None:
            return "direct", "There is no broker here."
        return "lease", "The broker puts the key in; the agent gets a lease that works there alone."

    async def explain(self, owner: int, provider: str, name: str | None = None) -> m.KeyExplained:
        """Tell which key of `owner` would be used, why that one, and how it is handed out. `no_key`."""
        chosen = await self._vault.choose(owner, provider, name)
        delivery, why = self.delivery(provider)
        keys = await self._vault.list_(owner)
        key = next(key for key in keys.keys if key.id == chosen.row.id)
        return m.KeyExplained(key=key, why=chosen.why, delivery=delivery, delivery_why=why)

    async def _note(
        self, session: SessionRow, provider: str, outcome: str, key: str | None, holder: LeaseHolder | None
    ) -> None:
        line = AuditRow(
            at=now_ms(),
            owner=session.owner,
            actor="executor",
            action="get_api_key",
            outcome=outcome,
            session=session.id,
            subject=key,
            details={"provider": provider, **({"executor": holder.executor} if holder else {})},
        )
        await self._store.write(lambda tx: audit.write(tx, line))
