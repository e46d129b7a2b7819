"""Accepts connections at a Unix socket, within limits, and runs each to its end.

What is always true:

- The kernel reports a peer's uid and pid before any byte from it is read.
- One account cannot use up the connections of the others.
- A connection that fails does not affect the others.
- After a burst of `_BURST` connections, further ones are accepted with pauses between them. Otherwise a thousand
  simultaneous connections would delay all other work, once when they are accepted and again when their deadlines pass.
- Until its first message is complete, a connection uses only a socket, a timer and a buffer.
- A peer whose first line is not JSON is not a client: it gets `parse_error` and is closed.
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

from hutch_daemon.settings import SettingsInForce, SocketSettings
from hutch_shared.errors import HutchError, Reason
from hutch_shared.processes import Credentials, peer_credentials
from hutch_shared.rpc.envelope import EnvelopeFault, encode_error, parse
from hutch_shared.rpc.heartbeat import Timeouts
from hutch_shared.rpc.stream import SocketStream
from hutch_shared.watched_listener import WatchedListener

__all__ = ["Serve", "serve", "timeouts_of"]

_log: Final = structlog.get_logger(__name__)

_BURST: Final = 32
_PACE: Final = 0.002
"""Seconds between two accepted connections after a burst of `_BURST`."""
_MAX_FIRST_MESSAGE: Final = 1 << 16
"""The most bytes of a first message that are buffered before the connection is served."""
_LOG_AGAIN: Final = 1.0
"""Seconds between two lines in the log about the same account."""

Serve = Callable[[SocketStream, Credentials], Awaitable[None]]
"""Runs one connection; it owns the stream."""


def timeouts_of(sockets: SocketSettings) -> Timeouts:
    """Return the timeouts of a served connection. hutchd is the side that pings."""
    return Timeouts(
        frame=sockets.frame_timeout,
        quiet=sockets.ping_interval,
        pong=sockets.ping_timeout,
        unread=sockets.unread_timeout,
    )


async def serve(
    listener: WatchedListener,
    run: Serve,
    settings: SettingsInForce,
    first_frame: Callable[[SocketSettings], float],
) -> None:
    """Accept until cancelled, and watch the socket's file.

    Connections beyond the limits, and those whose peer is unknown, are closed unread.

    So are connections without a complete message within `first_frame` seconds.
    """
    async with anyio.create_task_group() as tasks:
        limiter = ConnectionLimiter(run, settings, tasks)
        tasks.start_soon(listener.watch)
        try:
            while True:
                sock = await listener.accept()
                credentials = limiter.admit(sock)
                if credentials is not None:
                    limiter.pending.add(
                        PendingConnection(limiter, sock, credentials, first_frame(settings.current.sockets))
                    )
                await anyio.sleep(limiter.pause())
        finally:
            for one in tuple(limiter.pending):
                one.close()


class PendingConnection:
    """A connection whose first message is not complete: a socket, a deadline, and the bytes received so far."""

    __slots__ = ("_credentials", "_deadline", "_limiter", "_loop", "_received", "_sock")

    def __init__(
        self, limiter: ConnectionLimiter, sock: socket.socket, credentials: Credentials, seconds: float
    ) -> None:
        self._limiter = limiter
        self._sock = sock
        self._credentials = credentials
        self._received = bytearray()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(sock, self._read)
        self._deadline = self._loop.call_later(seconds, self.close)

    def _read(self) -> None:
        try:
            chunk = self._sock.recv(_MAX_FIRST_MESSAGE)
        except BlockingIOError:
            return
        except OSError:
            chunk = b""
        if not chunk:
            self.close()
            return
        self._received += chunk
        if b"\n" not in chunk and len(self._received) < _MAX_FIRST_MESSAGE:
            return
        received = bytes(self._received)
        if b"\n" in chunk and (why := _answer_to_noise(received)) is not None:
            with suppress(OSError):  # the peer has gone
                self._sock.send(why)
            self.close()
            return
        self._stop_reading()
        self._limiter.tasks.start_soon(self._limiter.run, self._sock, self._credentials, received)

    def close(self) -> None:
        """Close the connection, and stop counting it."""
        self._stop_reading()
        self._sock.close()
        self._limiter.release(self._credentials)

    def _stop_reading(self) -> None:
        self._deadline.cancel()
        self._loop.remove_reader(self._sock)
        self._limiter.pending.discard(self)


def _answer_to_noise(received: bytes) -> bytes | None:
    """Return the reply to a first line that is not JSON, or None if it is JSON."""
    fault = parse(received.partition(b"\n")[0].rstrip(b"\r"))
    if not isinstance(fault, EnvelopeFault) or fault.reason is not Reason.PARSE_ERROR:
        return None
    return encode_error(None, HutchError(fault.reason, fault.message)) + b"\n"


class ConnectionLimiter:
    """Counts the open connections of each account, and admits new ones up to the limits."""

    def __init__(self, run: Serve, settings: SettingsInForce, tasks: TaskGroup) -> None:
        self.tasks = tasks
        self.pending: set[PendingConnection] = set()
        self._run = run
        self._settings = settings
        self._open: Counter[int] = Counter()
        self._allowance = float(_BURST)
        self._last = -math.inf
        self._refused: Counter[int] = Counter()
        self._logged_at: dict[int, float] = {}

    def pause(self) -> float:
        """Return the seconds to wait before the next connection is accepted. Call it once per connection."""
        now = monotonic()
        self._allowance = min(_BURST, self._allowance + (now - self._last) / _PACE) - 1
        self._last = now
        return 0.0 if self._allowance > 0 else _PACE

    def admit(self, sock: socket.socket) -> Credentials | None:
        """Count a connection and return its peer's credentials. If it exceeds the limits, close it and return None."""
        try:
            credentials = peer_credentials(sock)
        except HutchError as error:
            _log.warning("a connection was refused", error=error.message)
            sock.close()
            return None
        settings = self._settings.current.sockets
        if self._open.total() >= settings.connections or self._open[credentials.uid] >= settings.connections_per_uid:
            self._log_refused(credentials.uid)
            sock.close()
            return None
        self._open[credentials.uid] += 1
        return credentials

    def _log_refused(self, uid: int) -> None:
        self._refused[uid] += 1
        now = monotonic()
        if now - self._logged_at.get(uid, -math.inf) >= _LOG_AGAIN:
            self._logged_at[uid] = now
            refused = self._refused.pop(uid)
            _log.warning("too many connections", uid=uid, of_uid=self._open[uid], refused=refused)

    async def run(self, sock: socket.socket, credentials: Credentials, received: bytes) -> None:
        """Serve a connection that has received `received`, and stop counting it when it ends."""
        try:
            await self._run(SocketStream(sock, received), credentials)
        except Exception:  # noqa: BLE001  # one connection's bug is logged and ends that connection alone
            _log.exception("a connection failed inside", uid=credentials.uid, pid=credentials.pid)
        finally:
            sock.close()
            self.release(credentials)

    def release(self, credentials: Credentials) -> None:
        """Stop counting a connection."""
        self._open[credentials.uid] -= 1
        if not self._open[credentials.uid]:
            del self._open[credentials.uid]
