"""What the other side must do by when. Pure: it is told the time, and answers what has run out.

Deadlines stand still while this side does not read, since then nothing that the other side did can be seen.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from math import inf
from typing import Final

__all__ = ["Overdue", "Patience", "Vigil"]


@dataclass(frozen=True, slots=True)
class Patience:
    """How long to wait, in seconds; None is for ever."""

    first_frame: float | None = None
    """From the connection to the end of its first frame."""
    frame: float | None = 30.0
    """From the first byte of a frame to its last."""
    quiet: float | None = None
    """Nothing came for so long: ask with a ping. hutchd does so, the others answer."""
    pong: float = 20.0
    """From that ping to any byte."""
    unread: float | None = 60.0
    """The outgoing queue is full and the other side takes nothing."""


class Overdue(Enum):
    """What has run out, and what the log says of it. All but QUIET end the connection."""

    FIRST_FRAME = "no message came after connecting"
    FRAME = "a message was begun and not ended"
    QUIET = "nothing came for a while"
    PONG = "no answer to a ping"
    UNREAD = "the other side does not read"


_WHILE_READING: Final = (Overdue.FIRST_FRAME, Overdue.FRAME, Overdue.QUIET, Overdue.PONG)


class Vigil:
    """The running deadlines of one connection."""

    __slots__ = ("_away_since", "_due", "_patience")

    def __init__(self, patience: Patience, now: float) -> None:
        """Begin at `now` (monotonic seconds, as in all methods), reading."""
        self._patience = patience
        self._due: dict[Overdue, float] = {}
        self._away_since: float | None = None
        self._arm(Overdue.FIRST_FRAME, patience.first_frame, now)
        self._arm(Overdue.QUIET, patience.quiet, now)

    def heard(self, now: float, *, completed: bool, in_frame: bool) -> None:
        """Bytes came: they `completed` frames, and left one begun (`in_frame`) or not."""
        self._due.pop(Overdue.PONG, None)
        self._arm(Overdue.QUIET, self._patience.quiet, now)
        if completed:
            self._due.pop(Overdue.FIRST_FRAME, None)
            self._due.pop(Overdue.FRAME, None)
        if in_frame and Overdue.FRAME not in self._due:
            self._arm(Overdue.FRAME, self._patience.frame, now)

    def pause(self, now: float) -> None:
        """This side stops reading."""
        self._away_since = now

    def resume(self, now: float) -> None:
        """This side reads again: what the other side had left it has still."""
        if self._away_since is not None:
            away = now - self._away_since
            self._away_since = None
            for overdue in _WHILE_READING:
                if overdue in self._due:
                    self._due[overdue] += away

    def pinged(self, now: float) -> None:
        """A ping was queued."""
        self._due.pop(Overdue.QUIET, None)
        self._arm(Overdue.PONG, self._patience.pong, now)

    def full(self, now: float) -> None:
        """The outgoing queue became full, or is full still and something was taken from it."""
        self._arm(Overdue.UNREAD, self._patience.unread, now)

    def roomy(self) -> None:
        """The outgoing queue has room."""
        self._due.pop(Overdue.UNREAD, None)

    def overdue(self, now: float) -> Overdue | None:
        """Return what ran out first, or None."""
        running = self._running()
        first = min(running, key=running.__getitem__, default=None)
        return first if first is not None and running[first] <= now else None

    def look_again(self, now: float) -> float:
        """Return how many seconds from `now` nothing can run out, whatever happens until then; `inf` when nothing can.

        A deadline that is set later lies at least the shortest patience ahead.
        """
        patience = self._patience
        shortest = min(
            (wait for wait in (patience.frame, patience.quiet, patience.unread) if wait is not None), default=inf
        )
        return max(0.0, min(min(self._running().values(), default=inf) - now, shortest))

    def _running(self) -> dict[Overdue, float]:
        if self._away_since is None:
            return self._due
        return {overdue: at for overdue, at in self._due.items() if overdue not in _WHILE_READING}

    def _arm(self, overdue: Overdue, wait: float | None, now: float) -> None:
        if wait is not None:
            self._due[overdue] = now + wait

    def __repr__(self) -> str:
        due = ", ".join(f"{overdue.name.lower()} at {at:g}" for overdue, at in sorted(self._due.items(), key=_at))
        return f"<Vigil {'not reading, ' if self._away_since is not None else ''}{due or 'nothing due'}>"


def _at(item: tuple[Overdue, float]) -> float:
    return item[1]
