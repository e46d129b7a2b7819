"""Takes connections at a Unix socket, within bounds, and runs each to its end.

What is always true: who connects is known by the kernel's word before a byte of theirs is read; one account cannot use
up the connections of the others; a connection that fails ends alone. Beyond a few at once, connections are taken at a
pace that leaves time between them: a thousand that come together would else hold up everybody else, when they are taken
and again when their deadlines, all the same, run out.
"""

from __future__ import annotations

import math
import socket
from collections import Counter
from collections.abc import Awaitable, Callable
from time import monotonic
from typing import Final

import anyio
import structlog

from hutch_daemon.settings import Sockets
from hutch_shared.errors import HutchError
from hutch_shared.rpc.stream import SocketStream, accept
from hutch_shared.rpc.vigil import Patience
from hutch_shared.unix import Credentials, Listener, peer_credentials

__all__ = ["Serve", "patience", "serve"]

_log: Final = structlog.get_logger(__name__)

_AT_ONCE: Final = 32
_PACE: Final = 0.002
"""Seconds between connections, once so many have come at once."""
_TELL_AGAIN: Final = 1.0
"""Seconds between two lines in the log about the same account."""

Serve = Callable[[SocketStream, Credentials], Awaitable[None]]
"""Runs one connection; it owns the stream."""


def patience(sockets: Sockets, first_frame: float) -> Patience:
    """Return the deadlines of a connection: hutchd is the side that pings."""
    return Patience(
        first_frame=first_frame,
        frame=sockets.frame_timeout,
        quiet=sockets.ping_interval,
        pong=sockets.ping_timeout,
        unread=sockets.unread_timeout,
    )


async def serve(listener: Listener, run: Serve, settings: Callable[[], Sockets]) -> None:
    """Accept until cancelled. Connections beyond the bounds, and those whose peer is unknown, are closed unread."""
    door = _Door(run, settings)
    async with anyio.create_task_group() as tasks:
        while True:
            sock = await accept(listener.socket)
            credentials = door.admit(sock)
            if credentials is not None:
                tasks.start_soon(door.keep, sock, credentials)
            await anyio.sleep(door.pause())


class _Door:
    """Counts who is inside."""

    def __init__(self, run: Serve, settings: Callable[[], Sockets]) -> None:
        self._run = run
        self._settings = settings
        self._inside: Counter[int] = Counter()
        self._allowance = float(_AT_ONCE)
        self._last = -math.inf
        self._refused: Counter[int] = Counter()
        self._told_at: dict[int, float] = {}

    def pause(self) -> float:
        """Return how many seconds the next connection is to wait for, now that one was taken."""
        now = monotonic()
        self._allowance = min(_AT_ONCE, self._allowance + (now - self._last) / _PACE) - 1
        self._last = now
        return 0.0 if self._allowance > 0 else _PACE

    def admit(self, sock: socket.socket) -> Credentials | None:
        """Count a connection in, or close it."""
        try:
            credentials = peer_credentials(sock)
        except HutchError as error:
            _log.warning("a connection was refused", error=error.message)
            sock.close()
            return None
        settings = self._settings()
        if (
            self._inside.total() >= settings.connections
            or self._inside[credentials.uid] >= settings.connections_per_uid
        ):
            self._tell_refused(credentials.uid)
            sock.close()
            return None
        self._inside[credentials.uid] += 1
        return credentials

    def _tell_refused(self, uid: int) -> None:
        self._refused[uid] += 1
        now = monotonic()
        if now - self._told_at.get(uid, -math.inf) >= _TELL_AGAIN:
            self._told_at[uid] = now
            refused = self._refused.pop(uid)
            _log.warning("too many connections", uid=uid, of_uid=self._inside[uid], refused=refused)

    async def keep(self, sock: socket.socket, credentials: Credentials) -> None:
        """Run a connection and count it out, however it ended."""
        try:
            await self._run(SocketStream(sock), credentials)
        except Exception:  # noqa: BLE001  # the border: one connection's bug is in the log, and no other's
            _log.exception("a connection failed inside", uid=credentials.uid, pid=credentials.pid)
        finally:
            sock.close()
            self._inside[credentials.uid] -= 1
            if not self._inside[credentials.uid]:
                del self._inside[credentials.uid]
