"""Appends hutchd's own events, reads pages of history, and encodes events for the wire.

An event's payload from an executor is not decoded: its bytes are copied into the event's JSON as they arrived.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache, partial

import msgspec

from hutch_daemon.store import events
from hutch_daemon.store.events import Page, SeqRange
from hutch_daemon.store.records import Tx
from hutch_daemon.store.rows import StoredEvent
from hutch_daemon.store.store import Store
from hutch_shared.events import EventKind
from hutch_shared.times import to_wire

__all__ = ["Journal", "event_frame", "event_json"]

_ENCODER = msgspec.json.Encoder()


class Journal:
    """The events of a store."""

    def __init__(self, store: Store) -> None:
        """Write to and read from `store`."""
        self._store = store

    @property
    def id(self) -> str:
        """The journal's id, which is part of each client's cursor."""
        return self._store.journal

    def append(self, tx: Tx, session: str, turn: str | None, kind: EventKind, data: msgspec.Struct) -> StoredEvent:
        """Append one of hutchd's own events, in the transaction that changes what the event reports.

        The type of `data` must fit `kind`. HutchError(NOT_FOUND) if the session does not exist.
        """
        return events.append(tx, session, turn, kind, data)

    async def seq_range(self, session: str, owner: int | None = None) -> SeqRange:
        """Return the newest and the oldest number of a session, or of `"*"`. HutchError(NOT_FOUND)."""
        return await self._store.read(partial(events.seq_range, session=session, owner=owner))

    async def read(
        self, session: str, after: int, *, limit: int = 1000, skip: Collection[str] = (), owner: int | None = None
    ) -> Page:
        """Return a page of history as `store.events.read` does, but never an empty page if more events follow."""
        while True:
            page = await self._store.read(
                partial(events.read, session=session, after=after, limit=limit, skip=skip, owner=owner)
            )
            if page.events or not page.more:
                return page
            after = page.cursor

    async def prune(self, *, before: int | None = None, max_bytes: int | None = None) -> int:
        """Remove events older than `before` (ms since 1970) and, while the database exceeds `max_bytes`, the oldest.

        Return the number of removed events. Works in short transactions, so that other writes run between them.
        """
        total = 0
        while count := await self._store.write(partial(events.prune, before=before, max_bytes=max_bytes)):
            total += count
        return total


def event_json(event: StoredEvent) -> bytes:
    """Return the event as a JSON object (an `events.Event`)."""
    return b"{" + _inside(event)


def event_frame(event: StoredEvent, follow: int) -> bytes:
    """Return the line of the notification `event` for the follow `follow`."""
    return b'{"jsonrpc":"2.0","method":"event","params":{"follow":%d,%b}\n' % (follow, _inside(event))


def _inside(event: StoredEvent) -> bytes:
    """Return the object without its opening brace. Only `turn`, which an executor may choose freely, needs escaping."""
    turn = b"" if event.turn is None else b'"turn":%b,' % _ENCODER.encode(event.turn)
    return b'"session":"%b","seq":%d,"position":%d,"at":"%b","kind":"%b",%b%b}' % (
        event.session.encode(), event.seq, event.position, _time(event.at), event.kind.encode(), turn, event.body,
    )  # fmt: skip


@lru_cache(maxsize=256)
def _time(at: int) -> bytes:
    return to_wire(at).encode()
