"""A connected socket as an anyio byte stream.

anyio's own Unix stream gives up the turn twice a message and registers with the selector for each wait; cancelling its
`receive` in the tick in which EOF arrives raises InvalidStateError in the loop. This one tries the system call first,
stays registered while it keeps up, and a waiter that was cancelled is simply not woken.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import anyio
from anyio.abc import ByteStream, SocketAttribute

from hutch_shared.unix import connect

__all__ = ["SocketStream", "accept", "dial"]

_RECEIVE: Final = 1 << 16
_IN_A_ROW: Final = 16
_EXHAUSTED: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class SocketStream(ByteStream):
    """Owns `sock`. One task receives and one sends; `aclose` wakes both with ClosedResourceError."""

    def __init__(self, sock: socket.socket, received: bytes = b"") -> None:
        """Take over a connected stream socket; a running asyncio loop is needed. `received` was read from it before."""
        sock.setblocking(False)
        self._received = received
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._readable: asyncio.Future[None] | None = None
        self._writable: asyncio.Future[None] | None = None
        self._watching = False
        self._closed = False
        self._in_a_row = 0

    @property
    def extra_attributes(self) -> Mapping[Any, Callable[[], Any]]:
        """The raw socket, for credentials."""
        return {SocketAttribute.raw_socket: lambda: self._sock}

    async def receive(self, max_bytes: int = _RECEIVE) -> bytes:
        """Return what is there, waiting for the first byte. EndOfStream at EOF; BrokenResourceError on a reset.

        When something is there it gives up the turn only now and then. Cancelled: nothing was taken.
        """
        if self._received:
            chunk, self._received = self._received, b""
            return chunk
        self._in_a_row += 1
        if self._in_a_row >= _IN_A_ROW:
            self._in_a_row = 0
            await asyncio.sleep(0)
        while True:
            if self._closed:
                raise anyio.ClosedResourceError
            try:
                chunk = self._sock.recv(max_bytes)
            except BlockingIOError:
                self._in_a_row = 0
                self._readable = self._loop.create_future()
                if not self._watching:
                    self._watching = True
                    self._loop.add_reader(self._sock, self._on_readable)
                try:
                    await self._readable
                finally:
                    self._readable = None
            except OSError as error:
                raise anyio.BrokenResourceError from error
            else:
                if chunk:
                    return chunk
                self._unwatch()
                raise anyio.EndOfStream

    def _on_readable(self) -> None:
        if self._readable is None:
            self._unwatch()
        elif not self._readable.done():
            self._readable.set_result(None)

    def _unwatch(self) -> None:
        if self._watching:
            self._watching = False
            self._loop.remove_reader(self._sock)

    def send_now(self, item: bytes) -> int:
        """Write what the socket takes without waiting, and return how many bytes that was; 0 also when it is broken."""
        try:
            return 0 if self._closed else self._sock.send(item)
        except OSError:
            return 0  # `send` finds out

    async def send(self, item: bytes | memoryview) -> None:
        """Write all of `item`. Cancelled: a part may be out, so that only one writer task that is not cancelled sends.

        BrokenResourceError when the other side no longer reads.
        """
        rest = memoryview(item)
        while rest:
            if self._closed:
                raise anyio.ClosedResourceError
            try:
                rest = rest[self._sock.send(rest) :]
            except BlockingIOError:
                self._writable = self._loop.create_future()
                self._loop.add_writer(self._sock, self._on_writable)
                try:
                    await self._writable
                finally:
                    self._writable = None
                    if not self._closed:
                        self._loop.remove_writer(self._sock)
            except OSError as error:
                raise anyio.BrokenResourceError from error

    def _on_writable(self) -> None:
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)

    async def send_eof(self) -> None:
        """Say that nothing more will be sent; reading goes on."""
        try:
            self._sock.shutdown(socket.SHUT_WR)
        except OSError:
            return  # the other side has gone already

    async def aclose(self) -> None:
        """Close at once, whatever waits. Closing again does nothing."""
        if self._closed:
            return
        self._closed = True
        self._unwatch()
        self._loop.remove_writer(self._sock)
        self._sock.close()
        for waiter in (self._readable, self._writable):
            if waiter is not None and not waiter.done():
                waiter.set_result(None)


async def accept(listener: socket.socket) -> socket.socket:
    """Return the next connection of a non-blocking listener.

    Waits where the process has no file descriptors left, since that passes; other errors of the listener are raised.
    """
    loop = asyncio.get_running_loop()
    while True:
        try:
            sock, _ = await loop.sock_accept(listener)
        except ConnectionError:
            continue
        except OSError as error:
            if error.errno not in _EXHAUSTED:
                raise
            await anyio.sleep(0.05)
        else:
            return sock


async def dial(path: Path, timeout: float = 10.0) -> SocketStream:
    """Connect to `path`. Raises as `unix.connect`, and TimeoutError when its queue stays full for `timeout` seconds."""
    with anyio.fail_after(timeout):
        while True:
            try:
                return SocketStream(connect(path, timeout=0))
            except BlockingIOError:  # a full queue is told at once, and never as readiness
                await anyio.sleep(0.01)
