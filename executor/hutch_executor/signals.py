"""A thing that happens again and again, for tasks that look at the state, then wait for it to change."""

from __future__ import annotations

import anyio

__all__ = ["Change"]


class Change:
    """Wakes all who wait at the moment. Nothing is remembered: look at the state before waiting, and again after."""

    def __init__(self) -> None:
        """Start with nobody waiting."""
        self._event: anyio.Event | None = None

    def happen(self) -> None:
        """Wake them. Costs next to nothing when nobody waits."""
        if self._event is not None:
            self._event.set()
            self._event = None

    async def wait(self) -> None:
        """Return when it happens next."""
        if self._event is None:
            self._event = anyio.Event()
        await self._event.wait()
