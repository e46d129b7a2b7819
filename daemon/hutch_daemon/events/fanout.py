"""Sends committed events to any number of followers: history first, then live, each event once and in order.

A follower has a cursor (a seq, or a position for `"*"`) and a bounded queue. It is in one of two states, which ensure
that it neither misses an event nor gets one twice:

- *reading*: it empties its queue, opens it for new events, and then reads a page of the store after its cursor. A
  commit that is not in the page is published after the queue was opened, so it is in the queue. An event in both is
  dropped by its number. If the page was the last one and the queue did not overflow, the follower becomes live.
- *live*: it takes the events beyond its cursor from the queue.

When the queue overflows, it is emptied and closed, and the follower reads again from its cursor. So a slow follower
uses the memory of one queue and one page at most.

`event_frame` and `event_json` encode an event for the wire. A payload from an executor is not decoded: its bytes are
copied into the event's JSON as they arrived.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Final, Literal

import msgspec

from hutch_daemon.signals import Signal
from hutch_daemon.store import events
from hutch_daemon.store.rows import StoredEvent
from hutch_daemon.store.store import Store
from hutch_shared.errors import HutchError, Reason
from hutch_shared.latch import Latch
from hutch_shared.times import to_wire

__all__ = ["Fanout", "FollowOver", "Follower", "QueueLimits", "Why", "event_frame", "event_json"]

Why = Literal["too_slow", "session_removed", "shutting_down", "store_unavailable"]

_SENTENCES: Final[dict[Why, str]] = {
    "too_slow": "Events that you have not received are no longer kept; come back with a newer cursor.",
    "session_removed": "The session was removed.",
    "shutting_down": "hutchd is stopping; come back with this cursor.",
    "store_unavailable": "The record cannot be read now; come back with this cursor.",
}


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """The limits of a follower's queue and of a page that it reads; the first limit reached applies."""

    events: int = 1024
    bytes: int = 1 << 20


_LIMITS: Final = QueueLimits()
_ENCODER: Final = msgspec.json.Encoder()


class FollowOver(Exception):  # noqa: N818 an end, not an error
    """The follow has ended. `after` is the cursor for the next follow; `str()` is a sentence for the user."""

    def __init__(self, why: Why, after: int) -> None:
        self.why: Why = why
        self.after = after
        super().__init__(_SENTENCES[why])


class Follower:
    """One follow of a session or of all sessions. Use `Fanout.follow` to create it; only one task may call `next`."""

    def __init__(
        self,
        store: Store,
        limits: QueueLimits,
        session: str,
        after: int,
        seqs: events.SeqRange,
        skip: Collection[str],
        owner: int | None,
    ) -> None:
        self.session = session
        self.owner = owner
        self.journal = store.journal
        """The journal that the cursor belongs to."""
        self.head = seqs.head
        """The number of the newest event when the follow began."""
        self.oldest = seqs.oldest
        self.cursor = after
        """The number of the last event that `next` returned or skipped."""
        self._store = store
        self._limits = limits
        self._skip = frozenset(skip)
        self._queue: deque[StoredEvent] = deque()
        self._queue_bytes = 0
        self._filling = False
        self._live = False
        self._over: Why | None = None
        self._changed = Latch()

    def __repr__(self) -> str:
        state = self._over or ("live" if self._live else "reading")
        return f"<Follower {self.session} {state} after {self.cursor}, {len(self._queue)} queued>"

    async def next(self) -> tuple[StoredEvent, ...]:
        """Wait for events; return one or more, in order.

        They fit into the follower's limits, except that a single event may exceed them. If the caller is cancelled,
        no event is lost: the cursor moves when this returns. FollowOver if the follow has ended.
        """
        while True:
            if self._over is not None:
                raise FollowOver(self._over, self.cursor)
            batch = self._take() if self._live else await self._read()
            if batch:
                return batch
            if self._live:
                await self._changed.wait()

    def offer(self, event: StoredEvent) -> None:
        """Queue a committed event; if the queue is full, fall back to reading. Never blocks."""
        if not self._filling:
            return
        if len(self._queue) >= self._limits.events or self._queue_bytes >= self._limits.bytes:
            self._drop_queue()
        else:
            self._queue.append(event)
            self._queue_bytes += len(event.body)
        self._changed.notify()

    def end(self, why: Why) -> None:
        """End the follow: a running or later call of `next` raises FollowOver."""
        self._over = self._over or why
        self._drop_queue()
        self._changed.notify()

    def number(self, event: StoredEvent) -> int:
        """Return the event's seq or, in a follow of all sessions, its position."""
        return event.position if self.session == events.EVERY else event.seq

    def _drop_queue(self) -> None:
        self._filling = self._live = False
        self._queue.clear()
        self._queue_bytes = 0

    async def _read(self) -> tuple[StoredEvent, ...]:
        self._drop_queue()
        self._filling = True
        try:
            page = await self._store.read(
                partial(
                    events.read,
                    session=self.session,
                    after=self.cursor,
                    limit=self._limits.events,
                    max_bytes=self._limits.bytes,
                    skip=self._skip,
                    owner=self.owner,
                )
            )
        except HutchError as error:
            raise FollowOver(_WHY.get(error.reason, "store_unavailable"), self.cursor) from error
        if self._over is None:
            self._live = not page.more and self._filling
        self.cursor = page.cursor
        return page.events

    def _take(self) -> tuple[StoredEvent, ...]:
        batch = []
        for event in self._queue:
            number = self.number(event)
            if number > self.cursor:
                self.cursor = number
                if event.kind not in self._skip:
                    batch.append(event)
        self._queue.clear()
        self._queue_bytes = 0
        return tuple(batch)


_WHY: Final[dict[Reason, Why]] = {
    Reason.COMPACTED: "too_slow",
    Reason.NOT_FOUND: "session_removed",
    Reason.SHUTTING_DOWN: "shutting_down",
}


class Fanout:
    """All followers of a store. Call it only on the store's event loop."""

    def __init__(self, store: Store, limits: QueueLimits = _LIMITS) -> None:
        """Publish the events that `store` commits from now on. `limits` apply to each follower's queue."""
        self._store = store
        self._limits = limits
        self._followers: dict[str, set[Follower]] = {}
        self._answering: set[Follower] = set()
        self.presence_changed: Signal[[]] = Signal()
        """Emitted when a follow that can decide permission requests begins or ends; see `answering`."""
        self._closed = False
        store.on_committed(self.publish)

    @asynccontextmanager
    async def follow(
        self,
        session: str,
        after: int = 0,
        *,
        skip: Collection[str] = (),
        owner: int | None = None,
        answers: bool = False,
    ) -> AsyncIterator[Follower]:
        """Follow a session from seq `after`, or `"*"` from position `after`, while the block runs.

        `"*"` means all sessions of `owner`, or of all users if `owner` is None. `after=-1` starts at the newest event.
        Events of kinds in `skip` are left out. `answers`: the follower can decide permission requests. HutchError:
        NOT_FOUND, COMPACTED (`oldest`), INVALID_PARAMS for a cursor beyond the newest event, SHUTTING_DOWN.
        """
        if self._closed:
            raise HutchError(Reason.SHUTTING_DOWN)
        seqs = await self._store.read(partial(events.seq_range, session=session, owner=owner))
        if after < 0:
            after = seqs.head
        if after > seqs.head:
            raise HutchError(Reason.INVALID_PARAMS, f"The cursor {after} is beyond the newest event, {seqs.head}.")
        if after < seqs.oldest - 1:
            raise events.compacted(seqs.oldest)
        follower = Follower(self._store, self._limits, session, after, seqs, skip, owner)
        if self._closed:
            raise HutchError(Reason.SHUTTING_DOWN)
        self._followers.setdefault(session, set()).add(follower)
        if answers:
            self._answering.add(follower)
            self.presence_changed.emit()
        try:
            yield follower
        finally:
            follower.end("shutting_down")
            self._forget(follower)

    def publish(self, committed: Sequence[StoredEvent]) -> None:
        """Queue events for their followers. Never blocks; the time grows with events × followers."""
        for event in committed:
            for follower in self._followers.get(event.session, ()):
                follower.offer(event)
            for follower in self._followers.get(events.EVERY, ()):
                if follower.owner is None or follower.owner == event.owner:
                    follower.offer(event)

    def live(self, session: str) -> int:
        """Return how many followers a session (or `"*"`) has."""
        return len(self._followers.get(session, ()))

    def answering(self, session: str, owner: int) -> int:
        """Return how many followers can decide requests of a session of `owner`, including followers of `"*"`."""
        return sum(
            follower.session == session
            or (follower.session == events.EVERY and (follower.owner is None or follower.owner == owner))
            for follower in self._answering
        )

    def remove(self, session: str) -> None:
        """End all follows of a removed session."""
        for follower in self._followers.pop(session, set()):
            follower.end("session_removed")

    def close(self) -> None:
        """End all follows, and refuse new ones."""
        self._closed = True
        for followers in self._followers.values():
            for follower in followers:
                follower.end("shutting_down")

    def _forget(self, follower: Follower) -> None:
        followers = self._followers.get(follower.session)
        if followers is not None:
            followers.discard(follower)
            if not followers:
                del self._followers[follower.session]
        if follower in self._answering:
            self._answering.discard(follower)
            self.presence_changed.emit()


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
