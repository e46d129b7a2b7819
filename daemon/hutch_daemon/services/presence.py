"""Knows whether a user is present for a session: a client that can answer follows it, or did so a moment ago."""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import anyio
import structlog

from hutch_daemon.events.fanout import Fanout
from hutch_daemon.settings import SettingsInForce
from hutch_daemon.store.rows import SessionRow
from hutch_shared.errors import HutchError
from hutch_shared.latch import Latch

__all__ = ["Presence"]

_log = structlog.get_logger(__name__)


@dataclass(slots=True)
class _Watched:
    """A watched session."""

    owner: int
    present_until: float
    """The time when the last follower that can answer left; infinite while one follows, -infinite if none ever did."""


class Presence:
    """Watches the followers of sessions that have a task."""

    def __init__(
        self,
        fanout: Fanout,
        settings: SettingsInForce,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """A user counts as present for `settings().return_grace` seconds after the last follower left."""
        self._fanout = fanout
        self._settings = settings
        self._clock = clock
        self._watched: dict[str, _Watched] = {}
        self._left: list[tuple[float, str]] = []
        self._changed = Latch()
        fanout.presence_changed.subscribe(self._look)

    def watch(self, session: str, owner: int) -> None:
        """Watch a session from now on."""
        present = self._fanout.answering(session, owner)
        self._watched[session] = _Watched(owner, math.inf if present else -math.inf)

    def forget(self, session: str) -> None:
        """Stop watching a session."""
        self._watched.pop(session, None)

    def is_present(self, session: SessionRow) -> bool:
        """Return whether a client that can answer follows the session, or left it within the grace."""
        if self._fanout.answering(session.id, session.owner):
            return True
        watched = self._watched.get(session.id)
        return (
            watched is not None
            and self._clock() - watched.present_until < self._settings.current.permissions.return_grace
        )

    async def run(self, nobody_left: Callable[[str], Awaitable[None]]) -> None:
        """Call `nobody_left(session)` when a session's last follower has left and the grace has passed."""
        async with anyio.create_task_group() as tasks:
            while True:
                await self._changed.wait()
                left, self._left = self._left, []
                if left:
                    tasks.start_soon(self._after_grace, left, nobody_left)

    def _look(self) -> None:
        now = self._clock()
        for session, watched in self._watched.items():
            if self._fanout.answering(session, watched.owner):
                watched.present_until = math.inf
            elif watched.present_until == math.inf:
                watched.present_until = now
                self._left.append((now, session))
        self._changed.notify()

    async def _after_grace(self, left: list[tuple[float, str]], nobody_left: Callable[[str], Awaitable[None]]) -> None:
        await anyio.sleep(self._settings.current.permissions.return_grace)
        for since, session in left:
            watched = self._watched.get(session)
            if watched is not None and watched.present_until == since:
                try:
                    await nobody_left(session)
                except HutchError as error:  # the session's requests stay until they expire
                    _log.error("a permission request waits on", session=session, error=error.message)
