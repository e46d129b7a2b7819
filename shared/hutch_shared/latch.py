"""A wake-up that cannot be lost: a notification is kept until somebody waits for it.

The loop that it serves looks at the state first and waits afterwards:

    while True:
        ...  # look at the state and do what is due
        await latch.wait()

A notification that arrives during the look makes the next `wait` return at once, so the loop looks once more. The latch
says only that something changed: many notifications before one look count as one, and a wait may return although
nothing is due. It is Postgres's latch, or tokio's `Notify`.
"""

from __future__ import annotations

import anyio
from anyio.lowlevel import checkpoint

__all__ = ["Latch"]


class Latch:
    """For tasks of one event loop. One task waits; several may if none of them awaits between its look and its wait."""

    def __init__(self) -> None:
        """Start without a notification."""
        self._notified = False
        self._parked: anyio.Event | None = None
        self._waiting = 0

    def __repr__(self) -> str:
        return f"<Latch {'notified' if self._notified else 'clear'}, {self._waiting} waiting>"

    def notify(self) -> None:
        """Wake every task that waits; if none does, the next `wait` returns at once."""
        if self._parked is None:
            self._notified = True
        else:
            self._parked.set()
            self._parked = None

    async def wait(self) -> None:
        """Return when there was a notification since the last `wait` returned. On cancel the notification is kept."""
        if self._notified:
            await checkpoint()
            self._notified = False
            return
        parked = self._parked = self._parked or anyio.Event()
        self._waiting += 1
        try:
            await parked.wait()
        except BaseException:
            if parked.is_set():
                self._notified = True
            raise
        finally:
            self._waiting -= 1
            if self._waiting == 0 and self._parked is parked:
                self._parked = None
