"""Gives an executor a key: a lease that works only at the broker or, if the settings say so, the secret itself.

Every grant and every refusal is audited, without the secret.
"""

from __future__ import annotations

from hutch_daemon.keys.broker import Broker
from hutch_daemon.keys.lease_book import LeaseHolder
from hutch_daemon.keys.vault import Vault
from hutch_daemon.settings import SettingsInForce
from hutch_daemon.store import audit, keys
from hutch_daemon.store.records import Tx
from hutch_daemon.store.rows import SessionRow
from hutch_daemon.store.store import Store
from hutch_shared import messages as m
from hutch_shared.errors import HutchError, Reason
from hutch_shared.times import now_ms

__all__ = ["Grants"]


class Grants:
    """Grants leases if there is a broker; otherwise gives executors the secrets."""

    def __init__(self, store: Store, vault: Vault, settings: SettingsInForce, broker: Broker | None = None) -> None:
        """Without `broker`, executors get the secrets, so each session that needs a key is exposed."""
        self._store = store
        self._vault = vault
        self._settings = settings
        self._broker = broker

    async def grant(self, session: SessionRow, provider: str, holder: LeaseHolder | None = None) -> m.KeyGrant:
        """Return the key for the session's executor; a lease works only for the processes of `holder`.

        Raises `no_key`, `key_unreadable`; `isolation_unavailable` if the settings forbid handing out the secret;
        `agent_unavailable` if no broker can be reached.
        """
        delivery, why = self.delivery(provider)
        key = None
        try:
            if delivery == "direct" and self._settings.current.keys.refuse_exposed:
                raise HutchError(Reason.ISOLATION_UNAVAILABLE, f"Keys are not handed out to agents here. {why}")
            row, credential = await self._vault.reveal(session.owner, provider, session.credential)
            key = row.id
            if delivery == "lease":
                assert self._broker is not None
                assert holder is not None, "a lease is for the processes of an executor"
                grant = await self._broker.lease(session, holder, provider, row)
            else:
                grant = m.KeyGrant(
                    delivery="direct",
                    value=credential.secret.reveal(),
                    base_url=credential.base_url or self._settings.current.provider(provider).base_url,
                    auth="api_key" if credential.kind == "api_key" else "bearer",
                )
        except HutchError as error:
            await self._record(session, provider, error.reason.word, key, holder)
            raise
        await self._record(session, provider, delivery, key, holder)
        return grant

    def delivery(self, provider: str) -> tuple[m.Delivery, str]:
        """Return how executors get a provider's keys, and a sentence with the reason."""
        if self._settings.current.provider(provider).delivery == "direct":
            return "direct", f'The settings say so: [providers.{provider}] delivery = "direct".'
        if self._broker is None:
            return "direct", "There is no broker here."
        return "lease", "The broker puts the key in; the agent gets a lease that works only at the broker."

    async def explain(self, owner: int, provider: str, name: str | None = None) -> m.KeyExplained:
        """Return which key of `owner` a session would use, why that key, and how the executor gets it. `no_key`."""
        chosen = await self._vault.choose(owner, provider, name)
        delivery, why = self.delivery(provider)
        owned = await self._vault.list_(owner)
        key = next(key for key in owned.keys if key.id == chosen.row.id)
        return m.KeyExplained(key=key, why=chosen.why, delivery=delivery, delivery_why=why)

    async def _record(
        self, session: SessionRow, provider: str, outcome: str, key: str | None, holder: LeaseHolder | None
    ) -> None:
        def unit(tx: Tx) -> None:
            audit.record(
                tx,
                actor="executor",
                owner=session.owner,
                action="get_api_key",
                outcome=outcome,
                session=session.id,
                subject=key,
                details={"provider": provider, **({"executor": holder.executor} if holder else {})},
            )
            if outcome == "direct" and key is not None:
                keys.touch(tx, key, now_ms())

        await self._store.write(unit)
