"""Takes connections at a Unix socket, within bounds, and runs each to its end.

What is always true: who connects is known by the kernel's word before a byte of theirs is read; one account cannot use
up the connections of the others; a connection that fails ends alone. Beyond a few at once, connections are taken at a
pace that leaves time between them: a thousand that come together would else hold up everybody else, when they are taken
and again when their deadlines, all the same, run out. And one that has not sent a whole message yet costs next to
nothing: what serves it is made when it has. Who begins with what is no JSON speaks something else: told, and done with.
"""

from __future__ import annotations

import asyncio
import math
import socket
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from time import monotonic
from typing import Final

import anyio
import structlog
from anyio.abc import TaskGroup

from hutch_daemon.settings import SocketSettings
from hutch_shared.errors import HutchError, Reason
from hutch_shared.rpc.envelope import EnvelopeFault, encode_error, parse
from hutch_shared.rpc.heartbeat import Timeouts
from hutch_shared.rpc.stream import SocketStream, accept
from hutch_shared.unix import Credentials, Listener, peer_credentials

__all__ = ["Serve", "serve", "timeouts_of"]

_log: Final = structlog.get_logger(__name__)

_AT_ONCE: Final = 32
_PACE: Final = 0.002
"""Seconds between connections, once so many have come at once."""
_FIRST: Final = 1 << 16
"""Bytes of a first message that is not served before it is whole; a longer one is read by what serves it."""
_TELL_AGAIN: Final = 1.0
"""Seconds between two lines in the log about the same account."""

Serve = Callable[[SocketStream, Credentials], Awaitable[None]]
"""Runs one connection; it owns the stream."""


def timeouts_of(sockets: SocketSettings) -> Timeouts:
    """Return the deadlines of a connection that was let in: hutchd is the side that pings."""
    return Timeouts(
        frame=sockets.frame_timeout,
        quiet=sockets.ping_interval,
        pong=sockets.ping_timeout,
        unread=sockets.unread_timeout,
    )


async def serve(
    listener: Listener,
    run: Serve,
    settings: Callable[[], SocketSettings],
    first_frame: Callable[[SocketSettings], float],
) -> None:
    """Accept until cancelled. Connections beyond the bounds, and those whose peer is unknown, are closed unread.

    So is, after `first_frame` seconds, one on which no whole message came.
    """
    async with anyio.create_task_group() as tasks:
        door = _Door(run, settings, tasks)
        try:
            while True:
                sock = await accept(listener.socket)
                credentials = door.admit(sock)
                if credentials is not None:
                    door.newcomers.add(_Newcomer(door, sock, credentials, first_frame(settings())))
                await anyio.sleep(door.pause())
        finally:
            for newcomer in tuple(door.newcomers):
                newcomer.leave()


class _Newcomer:
    """A connection on which no whole message came yet: a descriptor, a deadline, and what came so far."""

    __slots__ = ("_credentials", "_deadline", "_door", "_loop", "_received", "_sock")

    def __init__(self, door: _Door, sock: socket.socket, credentials: Credentials, seconds: float) -> None:
        self._door = door
        self._sock = sock
        self._credentials = credentials
        self._received = bytearray()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(sock, self._read)
        self._deadline = self._loop.call_later(seconds, self.leave)

    def _read(self) -> None:
        try:
            chunk = self._sock.recv(_FIRST)
        except BlockingIOError:
            return
        except OSError:
            chunk = b""
        if not chunk:
            self.leave()
            return
        self._received += chunk
        if b"\n" not in chunk and len(self._received) < _FIRST:
            return
        received = bytes(self._received)
        if b"\n" in chunk and (why := _no_json(received)) is not None:
            with suppress(OSError):  # it does not listen either
                self._sock.send(why)
            self.leave()
            return
        self._rise()
        self._door.tasks.start_soon(self._door.keep, self._sock, self._credentials, received)

    def leave(self) -> None:
        """Close it."""
        self._rise()
        self._sock.close()
        self._door.count_out(self._credentials)

    def _rise(self) -> None:
        self._deadline.cancel()
        self._loop.remove_reader(self._sock)
        self._door.newcomers.discard(self)


def _no_json(received: bytes) -> bytes | None:
    """Return what to answer to a first message that is none, or None where it is one."""
    fault = parse(received.partition(b"\n")[0].rstrip(b"\r"))
    if not isinstance(fault, EnvelopeFault) or fault.reason is not Reason.PARSE_ERROR:
        return None
    return encode_error(None, HutchError(fault.reason, fault.message)) + b"\n"


class _Door:
    """Counts who is inside."""

    def __init__(self, run: Serve, settings: Callable[[], SocketSettings], tasks: TaskGroup) -> None:
        self.tasks = tasks
        self.newcomers: set[_Newcomer] = set()
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

    async def keep(self, sock: socket.socket, credentials: Credentials, received: bytes) -> None:
        """Run a connection on which this came, and count it out, however it ended."""
        try:
            await self._run(SocketStream(sock, received), credentials)
        except Exception:  # noqa: BLE001  # the border: one connection's bug is in the log, and no other's
            _log.exception("a connection failed inside", uid=credentials.uid, pid=credentials.pid)
        finally:
            sock.close()
            self.count_out(credentials)

    def count_out(self, credentials: Credentials) -> None:
        """Note that a connection is over."""
        self._inside[credentials.uid] -= 1
        if not self._inside[credentials.uid]:
            del self._inside[credentials.uid]
