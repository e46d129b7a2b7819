"""Bytes in and out: a connected socket as an anyio byte stream, and the frames in the received bytes.

anyio's own Unix stream yields to the event loop twice per message and registers with the selector for each wait;
cancelling its `receive` in the tick in which EOF arrives raises InvalidStateError in the loop. `SocketStream` tries the
system call first, stays registered between waits, and never wakes a cancelled waiter.

A frame is one line, split on the byte `\\n` alone. `FrameSplitter` holds at most the limit plus one chunk, looks at
each byte once, and drops only the frame that exceeds the limit.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Literal

import anyio
from anyio.abc import ByteStream, SocketAttribute

from hutch_shared.unix import connect

__all__ = ["OVERSIZED", "FrameSplitter", "SocketStream", "accept", "accept_waiting", "dial"]

_RECEIVE: Final = 1 << 16
_IN_A_ROW: Final = 16
OVERSIZED: Final = "oversized"
"""Takes the place of a frame over the limit, whose bytes are dropped."""

_FRAME_BLANK: Final = b" \t\r"
_EXHAUSTED: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class SocketStream(ByteStream):
    """A byte stream that owns `sock`. One task receives and one sends; `aclose` ends both with ClosedResourceError."""

    def __init__(self, sock: socket.socket, received: bytes = b"") -> None:
        """Own a connected stream socket. Needs a running asyncio loop. `received`: bytes already read from it."""
        sock.setblocking(False)
        self._received = received
        self.socket = sock
        """The raw socket, for credentials. Only the stream reads and writes it."""
        self._loop = asyncio.get_running_loop()
        self._readable: asyncio.Future[None] | None = None
        self._writable: asyncio.Future[None] | None = None
        self._watching = False
        self._closed = False
        self._in_a_row = 0

    @property
    def extra_attributes(self) -> Mapping[Any, Callable[[], Any]]:
        """The raw socket, for code that has the stream as a `ByteStream`."""
        return {SocketAttribute.raw_socket: lambda: self.socket}

    async def receive(self, max_bytes: int = _RECEIVE) -> bytes:
        """Return the bytes that have arrived; wait for the first. EndOfStream at EOF, BrokenResourceError on a reset.

        While bytes are available it yields to the event loop only every 16th call. Cancelled: nothing was consumed.
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
                chunk = self.socket.recv(max_bytes)
            except BlockingIOError:
                self._in_a_row = 0
                self._readable = self._loop.create_future()
                if not self._watching:
                    self._watching = True
                    self._loop.add_reader(self.socket, self._on_readable)
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
            self._loop.remove_reader(self.socket)

    def send_now(self, item: bytes) -> int:
        """Write as much as the socket takes without waiting; return the number of bytes; 0 also for a broken stream."""
        try:
            return 0 if self._closed else self.socket.send(item)
        except OSError:
            return 0  # `send` meets the same error and raises it

    async def send(self, item: bytes | memoryview) -> None:
        """Write all of `item`; BrokenResourceError when the peer no longer reads.

        Cancelled: a part may be written. So only one writer task calls it, and nothing cancels that task mid-frame.
        """
        rest = memoryview(item)
        while rest:
            if self._closed:
                raise anyio.ClosedResourceError
            try:
                rest = rest[self.socket.send(rest) :]
            except BlockingIOError:
                self._writable = self._loop.create_future()
                self._loop.add_writer(self.socket, self._on_writable)
                try:
                    await self._writable
                finally:
                    self._writable = None
                    if not self._closed:
                        self._loop.remove_writer(self.socket)
            except OSError as error:
                raise anyio.BrokenResourceError from error

    def _on_writable(self) -> None:
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)

    async def send_eof(self) -> None:
        """Announce that nothing more will be sent; reading goes on."""
        try:
            self.socket.shutdown(socket.SHUT_WR)
        except OSError:
            return  # the peer has closed already

    async def aclose(self) -> None:
        """Close at once, also while tasks wait on it. Closing again does nothing."""
        if self._closed:
            return
        self._closed = True
        self._unwatch()
        self._loop.remove_writer(self.socket)
        self.socket.close()
        for waiter in (self._readable, self._writable):
            if waiter is not None and not waiter.done():
                waiter.set_result(None)


async def accept(listener: socket.socket) -> socket.socket:
    """Return the next connection of a non-blocking listener. Raises as `accept_waiting` does."""
    while (sock := await accept_waiting(listener)) is None:
        await anyio.wait_readable(listener)
    return sock


async def accept_waiting(listener: socket.socket) -> socket.socket | None:
    """Return a connection, non-blocking, that waits at a non-blocking listener; None if there may be none.

    While the process or host has no file descriptors or memory left, it returns None after a pause; it raises the
    listener's other errors.
    """
    try:
        sock, _ = listener.accept()
    except (BlockingIOError, ConnectionError):
        return None
    except OSError as error:
        if error.errno not in _EXHAUSTED:
            raise
        await anyio.sleep(0.05)
        return None
    sock.setblocking(False)
    return sock


async def dial(path: Path, timeout: float = 10.0) -> SocketStream:
    """Connect to `path`. Raises as `unix.connect`, and TimeoutError when its queue stays full for `timeout` seconds."""
    with anyio.fail_after(timeout):
        while True:
            try:
                return SocketStream(connect(path, timeout=0))
            except BlockingIOError:  # the listener's queue is full; readiness events do not report that
                await anyio.sleep(0.01)


class FrameSplitter:
    """Cuts received bytes into frames without their `\\n`. Skips blank lines, and the blanks before a frame."""

    __slots__ = ("_begun", "_limit", "_skipping")

    def __init__(self, limit: int) -> None:
        """Accept frames of at most `limit` bytes."""
        self._limit = limit
        self._begun = bytearray()
        self._skipping = False

    @property
    def in_frame(self) -> bool:
        """Whether a frame has begun and not ended, also while an oversized one is skipped."""
        return self._skipping or bool(self._begun)

    def feed(self, chunk: bytes) -> list[bytes | Literal["oversized"]]:
        """Return the frames that `chunk` completes, in order, and OVERSIZED as soon as a frame exceeds the limit."""
        frames: list[bytes | Literal["oversized"]] = []
        *ends, rest = chunk.split(b"\n")
        for end in ends:
            if self._skipping:
                self._skipping = False
            elif self._begun:
                self._grow(end, frames)
                if not self._skipping:
                    frames.append(bytes(self._begun))
                self._begun = bytearray()
                self._skipping = False
            elif end := end.lstrip(_FRAME_BLANK):
                frames.append(end if len(end) <= self._limit else OVERSIZED)
        if rest and not self._skipping:
            self._grow(rest, frames)
        return frames

    def _grow(self, piece: bytes, frames: list[bytes | Literal["oversized"]]) -> None:
        if not self._begun:
            piece = piece.lstrip(_FRAME_BLANK)
        if len(self._begun) + len(piece) > self._limit:
            self._begun = bytearray()
            self._skipping = True
            frames.append(OVERSIZED)
        else:
            self._begun += piece

    def __repr__(self) -> str:
        return f"<FrameSplitter {'skipping' if self._skipping else f'holds {len(self._begun)}'} of {self._limit}>"
