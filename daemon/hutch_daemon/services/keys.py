"""The methods with which users manage their keys. Secrets are stored and never returned."""

from __future__ import annotations

from difflib import get_close_matches
from functools import partial
from typing import Protocol, get_args

import msgspec

from hutch_daemon.keys.credential import Refresh, secret_of
from hutch_daemon.keys.vault import Vault, WithKey
from hutch_daemon.services.access import Access, Caller, parse_time
from hutch_daemon.services.key_troubles import KeyTroubles
from hutch_daemon.settings import SettingsInForce
from hutch_daemon.store import audit
from hutch_daemon.store.records import Tx
from hutch_daemon.store.rows import KeyRow
from hutch_shared import messages as m
from hutch_shared.agents import provider_of
from hutch_shared.broker_link import DialectName
from hutch_shared.errors import HutchError, Reason

__all__ = ["ExplainsKeys", "KeyService", "LeaseControl"]


class ExplainsKeys(Protocol):
    """Explains which key a session would use."""

    async def explain(self, owner: int, provider: str, name: str | None = None) -> m.KeyExplained: ...


class LeaseControl(Protocol):
    """The broker's methods for applying changed keys to its leases."""

    def request_start(self) -> None: ...
    async def refresh_credential(self, credential: str) -> None: ...
    async def revoke_credential(self, credential: str) -> int: ...
    async def state(self) -> m.BrokerState: ...


class KeyService:
    """The key methods of the client socket."""

    def __init__(
        self,
        access: Access,
        vault: Vault,
        grants: ExplainsKeys,
        leases: LeaseControl,
        troubles: KeyTroubles,
        settings: SettingsInForce,
    ) -> None:
        """`settings` may define providers beside the known ones."""
        self._access = access
        self._vault = vault
        self._grants = grants
        self._leases = leases
        self._troubles = troubles
        self._settings = settings

    async def put_api_key(self, caller: Caller, params: m.PutApiKey) -> m.ApiKey:
        """Store a credential of the caller. An unknown provider is refused, because its key could not be used.

        The sealed bytes of a replaced credential are removed before the reply, or the reply says that they are not.
        """
        known = {*get_args(DialectName), *self._settings.current.providers}
        if params.provider not in known:
            near = get_close_matches(params.provider, known, 1)
            raise HutchError(
                Reason.INVALID_PARAMS,
                f"There is no provider {params.provider}{f'; did you mean {near[0]}?' if near else '.'} Known here:"
                f" {', '.join(sorted(known))}. Another is defined in the settings, by"
                f" [providers.{params.provider}] with base_url and dialect.",
            )
        refresh = None
        if params.refresh_token is not None:
            if params.refresh_url is None or params.client_id is None:
                raise HutchError(Reason.INVALID_PARAMS, "A refresh token needs its URL and the client's id.")
            refresh = Refresh(secret_of(params.refresh_token), params.refresh_url, params.client_id)
        kept = await self._vault.put(
            caller.uid,
            params.provider,
            params.name,
            secret_of(params.secret),
            kind=params.kind,
            base_url=params.base_url,
            expires_at=parse_time(params.expires_at),
            refresh=refresh,
            also=self._recorded(caller, "put_api_key", "stored"),
        )
        self._leases.request_start()
        await self._leases.refresh_credential(kept.id)
        return msgspec.structs.replace(kept, remains=await self._vault.erased(kept.id))

    async def list_api_keys(self, caller: Caller, params: m.Nothing) -> m.ApiKeys:
        """List the caller's credentials."""
        return await self._vault.list_(caller.uid)

    async def delete_api_key(self, caller: Caller, params: m.DeleteApiKey) -> m.KeyDeleted:
        """Delete a credential of the caller and end its use.

        Its sealed bytes are removed before the reply, or the reply says that they are not.
        """
        row = await self._vault.delete(
            caller.uid, params.provider, params.name, also=self._recorded(caller, "delete_api_key", "deleted")
        )
        await self._leases.revoke_credential(row.id)
        return m.KeyDeleted(remains=await self._vault.erased(row.id))

    async def use_api_key(self, caller: Caller, params: m.UseApiKey) -> m.Nothing:
        """Choose the credential for sessions that do not name one."""
        also = partial(_record, caller, "use_api_key", "chosen")
        await self._vault.use(caller.uid, params.provider, params.name, also=also)
        return m.Nothing()

    async def explain_key(self, caller: Caller, params: m.ExplainKey) -> m.KeyExplained:
        """Return which credential a session, or any session of a provider, would use, and how it would be delivered."""
        if params.session is None:
            if params.provider is None:
                raise HutchError(Reason.INVALID_PARAMS, "Name a session or a provider.")
            return await self._grants.explain(caller.uid, params.provider)
        session = await self._access.session(caller, params.session)
        provider = params.provider or provider_of(session.agent)
        if provider is None:
            raise HutchError(Reason.NO_KEY, f"The agent {session.agent} needs no key.")
        return await self._grants.explain(session.owner, provider, session.credential)

    async def rotate_master_key(self, caller: Caller, params: m.Nothing) -> m.MasterRotated:
        """Replace the master key by a new one."""

        def also(tx: Tx) -> None:
            audit.record(
                tx,
                actor=str(caller),
                owner=caller.uid,
                action="rotate_master_key",
                outcome="rotated",
                subject=self._vault.master_source,
            )

        wrapped = await self._vault.rotate_master(also=also)
        return m.MasterRotated(self._vault.master_source, wrapped)

    # ------------------------------------------------------------ for the status

    def master_source(self) -> str:
        """Return the source of the master key, in words."""
        return self._vault.master_source

    async def broker(self) -> m.BrokerState:
        """Return the state of the broker."""
        return await self._leases.state()

    async def host_notices(self) -> tuple[str, ...]:
        """Return the vault's notices for operators."""
        return await self._vault.notices()

    def notices(self, owner: int | None) -> tuple[str, ...]:
        """Return a sentence for each unusable key of `owner`, or of all owners if it is None."""
        return self._troubles.sentences(owner)

    def _recorded(self, caller: Caller, action: str, outcome: str) -> WithKey:
        """Return the function that adds the audit line in the transaction that replaces or deletes a key."""

        def also(tx: Tx, row: KeyRow) -> None:
            _record(caller, action, outcome, tx, row)
            self._troubles.settle(tx, row.id)

        return also


def _record(caller: Caller, action: str, outcome: str, tx: Tx, row: KeyRow) -> None:
    subject = f"{row.provider}/{row.name}"
    audit.record(tx, actor=str(caller), owner=caller.uid, action=action, outcome=outcome, subject=subject)
