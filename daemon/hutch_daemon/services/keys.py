"""What people ask and change about their keys. A secret goes in and never comes back."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from typing import get_args

from hutch_daemon.keys.credential import Refresh, secret_of
from hutch_daemon.services.access import Caller, SessionOf
from hutch_daemon.services.parts import Parts
from hutch_daemon.store import audit
from hutch_daemon.store.rows import AuditRow, KeyRow
from hutch_daemon.store.tx import Tx
from hutch_shared import messages as m
from hutch_shared.agents import provider_of
from hutch_shared.broker_link import DialectName
from hutch_shared.errors import HutchError, Reason
from hutch_shared.events import Notice
from hutch_shared.times import from_wire, now_ms

__all__ = ["KeySide"]


@dataclass(frozen=True, slots=True)
class _Wanting:
    """A key that is needed and cannot be had, and the sessions whose people were told."""

    owner: int
    trouble: str
    told: frozenset[str]


class KeySide:
    """The key methods of the client socket."""

    def __init__(self, parts: Parts, session_of: SessionOf) -> None:
        self._settings = parts.settings
        self._store = parts.store
        self._vault = parts.vault
        self._grants = parts.grants
        self._leases = parts.leases
        self._journal = parts.journal
        self._session_of = session_of
        self._wanting: dict[str, _Wanting] = {}
        parts.leases.on_key = self._note_key

    async def put_api_key(self, caller: Caller, params: m.PutApiKey) -> m.ApiKey:
        """Keep a credential of the caller; one for a provider that nothing is known of could never be used."""
        known = {*get_args(DialectName), *self._settings().providers}
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
        try:
            expires_at = from_wire(params.expires_at) if params.expires_at is not None else None
        except ValueError as error:
            raise HutchError(Reason.INVALID_PARAMS, f"The time cannot be read: {error}.") from error
        kept = await self._vault.put(
            caller.uid,
            params.provider,
            params.name,
            secret_of(params.secret),
            kind=params.kind,
            base_url=params.base_url,
            expires_at=expires_at,
            refresh=refresh,
        )
        await self._note(caller, "put_api_key", "stored", f"{params.provider}/{params.name}")
        await self._settle(kept.id)
        self._leases.want()
        await self._leases.refresh_credential(kept.id)
        return kept

    async def list_api_keys(self, caller: Caller, params: m.Nothing) -> m.ApiKeys:
        """List the caller's credentials."""
        return await self._vault.list_(caller.uid)

    async def delete_api_key(self, caller: Caller, params: m.DeleteApiKey) -> m.Nothing:
        """Forget a credential of the caller."""
        row = await self._vault.delete(caller.uid, params.provider, params.name)
        await self._leases.revoke_credential(row.id)
        await self._settle(row.id)
        await self._note(caller, "delete_api_key", "deleted", f"{params.provider}/{params.name}")
        return m.Nothing()

    async def use_api_key(self, caller: Caller, params: m.UseApiKey) -> m.Nothing:
        """Choose the credential of sessions that name none."""
        await self._vault.use(caller.uid, params.provider, params.name)
        await self._note(caller, "use_api_key", "chosen", f"{params.provider}/{params.name}")
        return m.Nothing()

    async def explain_key(self, caller: Caller, params: m.ExplainKey) -> m.KeyExplained:
        """Tell which credential a session, or a session that names none, would use, and how it would be delivered."""
        if params.session is None:
            if params.provider is None:
                raise HutchError(Reason.INVALID_PARAMS, "Name a session or a provider.")
            return await self._grants.explain(caller.uid, params.provider)
        session = await self._session_of(caller, params.session)
        provider = params.provider or provider_of(session.agent)
        if provider is None:
            raise HutchError(Reason.NO_KEY, f"The agent {session.agent} needs no key.")
        return await self._grants.explain(session.owner, provider, session.credential)

    async def rotate_master_key(self, caller: Caller, params: m.Nothing) -> m.MasterRotated:
        """Put a new master key in the old one's place."""
        wrapped = await self._vault.rotate_master()
        await self._note(caller, "rotate_master_key", "rotated", self._vault.master_source)
        return m.MasterRotated(self._vault.master_source, wrapped)

    def notices(self, owner: int | None) -> tuple[str, ...]:
        """Return which keys of `owner`, or of anybody, are needed and cannot be had."""
        return tuple(one.trouble for one in self._wanting.values() if owner in (None, one.owner))

    async def _note_key(self, key: KeyRow, sessions: Sequence[str], trouble: str) -> None:
        """Ask the owner of a key that cannot be had, once in each session that waits for it, until it can."""
        if not trouble:
            await self._settle(key.id)
            return
        before = self._wanting.get(key.id)
        told = before.told if before is not None else frozenset()
        self._wanting[key.id] = _Wanting(key.owner, trouble, told | set(sessions))
        details = {"provider": key.provider, "name": key.name}
        await self._say(set(sessions) - told, Notice("key_needed", trouble, details))

    async def _settle(self, key: str) -> None:
        """Ask no more for a key: there is another secret in its place, or it is gone."""
        if (before := self._wanting.pop(key, None)) is not None:
            await self._say(before.told, Notice("key_settled", "The key that was needed is there, or was deleted."))

    async def _say(self, sessions: Collection[str], notice: Notice) -> None:
        def unit(tx: Tx) -> None:
            for session in sessions:
                with suppress(HutchError):  # it was removed meanwhile
                    self._journal.append(tx, session, None, "notice", notice)

        if sessions:
            await self._store.write(unit)

    async def _note(self, caller: Caller, action: str, outcome: str, subject: str) -> None:
        row = AuditRow(
            at=now_ms(), owner=caller.uid, actor=str(caller), action=action, outcome=outcome, subject=subject
        )
        await self._store.write(lambda tx: audit.write(tx, row))
