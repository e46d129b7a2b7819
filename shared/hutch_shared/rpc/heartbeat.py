"""The deadlines of one connection. Pure: callers pass the time, and get the deadline that has passed.

Deadlines that depend on received bytes stand still while this side does not read: until it reads again, it cannot see
what the peer sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from math import inf
from typing import Final

__all__ = ["Deadlines", "Expired", "Timeouts"]


@dataclass(frozen=True, slots=True)
class Timeouts:
    """The timeouts of a connection, in seconds; None disables one."""

    first_frame: float | None = None
    """From the connection to the end of its first frame."""
    frame: float | None = 30.0
    """From the first byte of a frame to its last."""
    quiet: float | None = None
    """From the last received byte to the ping that this side sends. Only hutchd pings; its peers answer."""
    pong: float = 20.0
    """From that ping to any received byte."""
    unread: float | None = 60.0
    """From the moment the outgoing queue is full until the peer reads something."""


class Expired(Enum):
    """A deadline that has passed; the value is its text for the log. All but QUIET end the connection."""

    FIRST_FRAME = "no message came after connecting"
    FRAME = "a message was begun and not ended"
    QUIET = "nothing came for a while"
    PONG = "no answer to a ping"
    UNREAD = "the other side does not read"


_ON_RECEIVED_BYTES: Final = (Expired.FIRST_FRAME, Expired.FRAME, Expired.QUIET, Expired.PONG)


class Deadlines:
    """The running deadlines of one connection. Times are monotonic seconds."""

    __slots__ = ("_due", "_paused_at", "_timeouts")

    def __init__(self, timeouts: Timeouts, now: float) -> None:
        """Start at `now`, while this side reads."""
        self._timeouts = timeouts
        self._due: dict[Expired, float] = {}
        self._paused_at: float | None = None
        self._arm(Expired.FIRST_FRAME, timeouts.first_frame, now)
        self._arm(Expired.QUIET, timeouts.quiet, now)

    def received(self, now: float, *, completed: bool, in_frame: bool) -> None:
        """Record received bytes.

        `completed`: they ended at least one frame; `in_frame`: the last frame is not complete.
        """
        self._due.pop(Expired.PONG, None)
        self._arm(Expired.QUIET, self._timeouts.quiet, now)
        if completed:
            self._due.pop(Expired.FIRST_FRAME, None)
            self._due.pop(Expired.FRAME, None)
        if in_frame and Expired.FRAME not in self._due:
            self._arm(Expired.FRAME, self._timeouts.frame, now)

    def pause(self, now: float) -> None:
        """Record that this side stops reading: the deadlines for the peer's bytes stand still until `resume`."""
        self._paused_at = now

    def resume(self, now: float) -> None:
        """Record that this side reads again; the peer keeps the time that it had left."""
        if self._paused_at is not None:
            paused = now - self._paused_at
            self._paused_at = None
            for expired in _ON_RECEIVED_BYTES:
                if expired in self._due:
                    self._due[expired] += paused

    def ping_sent(self, now: float) -> None:
        """Record that a ping was queued."""
        self._due.pop(Expired.QUIET, None)
        self._arm(Expired.PONG, self._timeouts.pong, now)

    def queue_full(self, now: float) -> None:
        """Record that the outgoing queue became full, or stayed full while the peer read some of it."""
        self._arm(Expired.UNREAD, self._timeouts.unread, now)

    def queue_has_room(self) -> None:
        """Record that the outgoing queue has room again."""
        self._due.pop(Expired.UNREAD, None)

    def expired(self, now: float) -> Expired | None:
        """Return the deadline that passed first, or None."""
        running = self._running()
        first = min(running, key=running.__getitem__, default=None)
        return first if first is not None and running[first] <= now else None

    def next_check(self, now: float) -> float:
        """Return the seconds from `now` in which no deadline can pass, whatever arrives meanwhile; `inf` for never.

        A deadline that is set later lies at least the shortest timeout ahead.
        """
        timeouts = self._timeouts
        shortest = min(
            (wait for wait in (timeouts.frame, timeouts.quiet, timeouts.unread) if wait is not None), default=inf
        )
        return max(0.0, min(min(self._running().values(), default=inf) - now, shortest))

    def _running(self) -> dict[Expired, float]:
        if self._paused_at is None:
            return self._due
        return {expired: at for expired, at in self._due.items() if expired not in _ON_RECEIVED_BYTES}

    def _arm(self, expired: Expired, wait: float | None, now: float) -> None:
        if wait is not None:
            self._due[expired] = now + wait

    def __repr__(self) -> str:
        due = ", ".join(f"{expired.name.lower()} at {at:g}" for expired, at in sorted(self._due.items(), key=_at))
        return f"<Deadlines {'not reading, ' if self._paused_at is not None else ''}{due or 'nothing due'}>"


def _at(item: tuple[Expired, float]) -> float:
    return item[1]
