"""Takes connections at a Unix socket, within bounds, and runs each to its end.

What is always true: who connects is known by the kernel's word before a byte of theirs is read; one account cannot use
up the connections of the others; a connection that fails ends alone.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Awaitable, Callable
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


class _Door:
    """Counts who is inside."""

    def __init__(self, run: Serve, settings: Callable[[], Sockets]) -> None:
        self._run = run
        self._settings = settings
        self._inside: Counter[int] = Counter()

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
            _log.warning("too many connections", uid=credentials.uid, of_uid=self._inside[credentials.uid])
            sock.close()
            return None
        self._inside[credentials.uid] += 1
        return credentials

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
