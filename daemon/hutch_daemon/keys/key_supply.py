"""Answers the broker's `need_key` with the key of a lease.

If the key cannot be opened or refreshed, hutchd reports that to the key's owner and waits until the owner replaces the
key, at most for nine tenths of the broker's timeout.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import anyio

from hutch_daemon.keys.lease_book import LeaseBook
from hutch_daemon.settings import SettingsInForce
from hutch_daemon.store import audit, keys
from hutch_daemon.store.records import Tx
from hutch_daemon.store.rows import KeyRow
from hutch_daemon.store.store import Store
from hutch_shared import broker_link as link
from hutch_shared.errors import HutchError, Reason
from hutch_shared.times import now_ms

__all__ = ["FreshKey", "KeyReport", "KeySupply"]

_OWNER_SHARE: Final = 0.9
"""The share of the broker's timeout during which hutchd waits for the owner to replace the key."""

FreshKey = Callable[[str, bool], Awaitable[link.Key]]
"""Takes a credential's id, and True if the provider rejected the last key; returns a valid key."""

KeyReport = Callable[[KeyRow, Sequence[str], str], Awaitable[None]]
"""Takes a credential, the sessions that use it, and a sentence for its owner: why the key is unusable, or ""."""


class KeySupply:
    """Gives keys for live leases."""

    def __init__(
        self, store: Store, book: LeaseBook, settings: SettingsInForce, fresh: FreshKey, report: KeyReport
    ) -> None:
        """`report` is called after each attempt to get a key, whether it failed or succeeded."""
        self._store = store
        self._book = book
        self._settings = settings
        self._fresh = fresh
        self._report = report
        self._replaced: defaultdict[str, anyio.Event] = defaultdict(anyio.Event)

    def replaced(self, credential: str) -> None:
        """Wake the requests that wait for this credential. Call it when the credential was replaced or deleted."""
        if (replaced := self._replaced.pop(credential, None)) is not None:
            replaced.set()

    async def need_key(self, _: None, need: link.NeedKey) -> link.Key:
        """Return the key of a lease. LEASE_LOST if the lease has ended; otherwise the key's error. Audits each call."""
        granted = self._book.live.get(need.lease)
        if granted is None:
            raise HutchError(Reason.LEASE_LOST, "The lease has ended.")
        try:
            key = await self._key_of(granted.lease, rejected=need.rejected)
        except HutchError as error:
            await self._record(granted.lease, error.reason.word, used=False)
            raise
        await self._record(granted.lease, "given", used=True)
        return key

    async def _key_of(self, lease: link.Lease, *, rejected: bool) -> link.Key:
        until = anyio.current_time() + _OWNER_SHARE * self._settings.current.broker.key_timeout
        while True:
            replaced = self._replaced[lease.credential]
            try:
                key = await self._fresh(lease.credential, rejected)
            except HutchError as error:
                if error.reason is not Reason.KEY_UNREADABLE:
                    raise
                await self._tell_owner(lease.credential, error.message)
                with anyio.move_on_at(until):
                    await replaced.wait()
                if not replaced.is_set() or lease.id not in self._book.live:
                    raise
                rejected = False
            else:
                await self._tell_owner(lease.credential, "")
                return key

    async def _tell_owner(self, credential: str, trouble: str) -> None:
        row = await self._store.read(lambda conn: keys.KEYS.one(conn, "WHERE id = ?", (credential,)))
        if row is not None:
            await self._report(row, self._book.sessions_of(credential), trouble)

    async def _record(self, lease: link.Lease, outcome: str, *, used: bool) -> None:
        def unit(tx: Tx) -> None:
            audit.record(
                tx,
                actor="broker",
                owner=lease.owner,
                action="use_key",
                outcome=outcome,
                session=lease.session,
                subject=lease.credential,
                details={"lease": lease.id, "executor": lease.executor, "provider": lease.provider},
            )
            if used:
                keys.touch(tx, lease.credential, now_ms())

        await self._store.write(unit)
