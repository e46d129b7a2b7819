"""Brings committed events to any number of followers: history first, then live, each event once and in order.

Why a follower neither misses an event nor gets one twice: it has a cursor (a seq, or a position for `"*"`) and a
bounded queue, and is in one of two states.

- *reading*: it empties its queue, lets it fill, and reads a page of the store after its cursor. A commit that the page
  does not contain is published after the queue was opened, so it is in the queue. An event in both is dropped by its
  number. If the page was the last one and the queue did not overflow meanwhile, the follower is live.
- *live*: it takes the events beyond its cursor from the queue.

When the queue overflows, it is emptied and closed, and the follower reads again from its cursor. A slow follower costs
its bound and a page, however much it misses.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal

from hutch_daemon.signals import Signal
from hutch_daemon.store import events
from hutch_daemon.store.rows import StoredEvent
from hutch_daemon.store.store import Store
from hutch_shared.errors import HutchError, Reason
from hutch_shared.latch import Latch

__all__ = ["Fanout", "FollowOver", "Follower", "Room", "Why"]

Why = Literal["too_slow", "session_removed", "shutting_down", "store_unavailable"]

_SENTENCES: Final[dict[Why, str]] = {
    "too_slow": "Events that you have not received are no longer kept; come back with a newer cursor.",
    "session_removed": "The session was removed.",
    "shutting_down": "hutchd is stopping; come back with this cursor.",
    "store_unavailable": "The record cannot be read now; come back with this cursor.",
}


@dataclass(frozen=True, slots=True)
class Room:
    """The bounds of a follower's queue and of a page that it reads; the first one reached counts."""

    events: int = 1024
    bytes: int = 1 << 20


_ROOM: Final = Room()


class FollowOver(Exception):  # noqa: N818 an end, not an error
    """The follow ended for `why`; `after` is the cursor to come back with; `str()` is a sentence."""

    def __init__(self, why: Why, after: int) -> None:
        self.why: Why = why
        self.after = after
        super().__init__(_SENTENCES[why])


class Follower:
    """One follow. Made by `Fanout.follow`; `next` is called by one task."""

    def __init__(
        self,
        store: Store,
        room: Room,
        session: str,
        after: int,
        seqs: events.SeqRange,
        skip: Collection[str],
        owner: int | None,
    ) -> None:
        self.session = session
        self.owner = owner
        self.head = seqs.head
        """The newest number when the follow began."""
        self.oldest = seqs.oldest
        self.cursor = after
        """Every event up to here was handed over or is of a skipped kind."""
        self._store = store
        self._room = room
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
        """Return the next events, one or more, in order; wait until there is one.

        They fit into the follower's room, except that one event may exceed it. On cancel nothing is lost: the cursor
        moves when this returns. FollowOver when the follow has ended.
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
        """Queue a committed event; if there is no room, fall back to reading. Never blocks."""
        if not self._filling:
            return
        if len(self._queue) >= self._room.events or self._queue_bytes >= self._room.bytes:
            self._drop_queue()
        else:
            self._queue.append(event)
            self._queue_bytes += len(event.body)
        self._changed.notify()

    def end(self, why: Why) -> None:
        """End the follow: `next` raises, from its next call or out of its wait."""
        self._over = self._over or why
        self._drop_queue()
        self._changed.notify()

    def number(self, event: StoredEvent) -> int:
        """Return the event's number in what is followed."""
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
                    limit=self._room.events,
                    max_bytes=self._room.bytes,
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
    """All followers of a store. For its event loop only."""

    def __init__(self, store: Store, room: Room = _ROOM) -> None:
        """Publish what `store` commits from now on; each follower's queue has the bounds `room`."""
        self._store = store
        self._room = room
        self._followers: dict[str, set[Follower]] = {}
        self._answering: set[Follower] = set()
        self.presence_changed: Signal[[]] = Signal()
        """Emitted whenever a follower that can decide comes or goes; `answering` says how many there are."""
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
        """Follow a session from seq `after`, or `"*"` (all sessions of `owner`; None: of all users) from a position.

        -1 starts at the present head. `answers`: the follower can decide permission requests. Leaving ends the follow.
        HutchError: NOT_FOUND, COMPACTED (`oldest`), INVALID_PARAMS for a cursor beyond the head, SHUTTING_DOWN.
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
        follower = Follower(self._store, self._room, session, after, seqs, skip, owner)
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
        """Offer events to their followers. Never blocks; costs a step for each follower of each event."""
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
        """Return how many followers can decide for a session of `owner`, including followers of `"*"`."""
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
        """End all follows; further ones are refused."""
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
