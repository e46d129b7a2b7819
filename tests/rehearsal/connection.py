"""HTTP/1.1 for the rehearsal model: one connection, read by `Inbox` and written by `Outlet`. As strict as possible.

A request that is ambiguous (two lengths, a length beside chunks, a broken header line) is a `BadRequestError`: nothing
is guessed.
"""

from __future__ import annotations

import re
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from http.client import responses

import anyio
from anyio.abc import SocketAttribute, SocketStream

HEAD_LIMIT = 64 * 1024
BODY_LIMIT = 64 * 1024 * 1024
_WRITE_SIZE = 64 * 1024
_TOKEN = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")


class BadRequestError(Exception):
    """The peer's fault. The connection ends after the answer."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


class DroppedError(Exception):
    """The script requires a reset of the connection now."""


class HungUpError(Exception):
    """The peer closed the connection before a request was complete."""


@dataclass(frozen=True, slots=True)
class Head:
    """Request line and headers; names in lower case, repeated ones joined by `, `."""

    method: str
    target: str
    version: str
    headers: Mapping[str, str]

    @property
    def keeps_alive(self) -> bool:
        """Return whether the client may send another request on this connection."""
        return self.version == "HTTP/1.1" and "close" not in self.headers.get("connection", "").lower()


def parse_head(data: bytes) -> Head:
    """Parse a head without its empty last line. Raises BadRequestError."""
    first, *lines = data.split(b"\r\n")
    words = first.split(b" ")
    if len(words) != 3 or not _TOKEN.fullmatch(words[0]) or words[2] not in (b"HTTP/1.1", b"HTTP/1.0"):
        raise BadRequestError(400, "malformed request line")
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(b":")
        if not colon or not _TOKEN.fullmatch(name):
            raise BadRequestError(400, "malformed header line")
        key = name.decode().lower()
        if key in headers and key in ("content-length", "transfer-encoding", "host"):
            raise BadRequestError(400, f"more than one {key}")
        text = value.strip().decode("latin-1")
        headers[key] = f"{headers[key]}, {text}" if key in headers else text
    if "content-length" in headers and "transfer-encoding" in headers:
        raise BadRequestError(400, "content-length beside transfer-encoding")
    return Head(words[0].decode(), words[1].decode("latin-1"), words[2].decode(), headers)


class Inbox:
    """The reading side. `ended` is set once the peer will send no more."""

    def __init__(self, stream: SocketStream) -> None:
        self._stream = stream
        self._data = bytearray()
        self.ended = False

    async def more(self) -> bool:
        """Wait for bytes or the end; return True for bytes."""
        try:
            self._data += await self._stream.receive()
        except (anyio.EndOfStream, anyio.BrokenResourceError):
            self.ended = True
        return not self.ended

    async def watch(self) -> None:
        """Return when the peer hangs up. Keep up to HEAD_LIMIT of the next request; leave more unread."""
        while len(self._data) < HEAD_LIMIT and await self.more():
            pass
        if not self.ended:
            await anyio.sleep_forever()

    async def _until(self, mark: bytes, limit: int) -> bytes:
        searched = 0
        while (at := self._data.find(mark, searched)) < 0:
            if len(self._data) > limit:
                raise BadRequestError(431, f"more than {limit} bytes of header")
            searched = max(0, len(self._data) - len(mark) + 1)
            if not await self.more():
                raise HungUpError
        return self._take(at + len(mark))[:at]

    async def _exactly(self, count: int) -> bytes:
        while len(self._data) < count:
            if not await self.more():
                raise HungUpError
        return self._take(count)

    def _take(self, count: int) -> bytes:
        taken = bytes(memoryview(self._data)[:count])
        del self._data[:count]
        return taken

    async def head(self) -> Head:
        """Return the next request's head. Raises HungUpError, BadRequestError."""
        return parse_head(await self._until(b"\r\n\r\n", HEAD_LIMIT))

    async def body(self, head: Head) -> bytes:
        """Return the body that belongs to `head`. Raises HungUpError, BadRequestError."""
        if "transfer-encoding" in head.headers:
            if head.headers["transfer-encoding"].lower() != "chunked":
                raise BadRequestError(501, "only the chunked transfer coding is known here")
            return await self._chunks()
        length = head.headers.get("content-length", "0")
        if not re.fullmatch("[0-9]{1,12}", length):
            raise BadRequestError(400, "malformed content-length")
        if int(length) > BODY_LIMIT:
            raise BadRequestError(413, f"more than {BODY_LIMIT} bytes of body")
        return await self._exactly(int(length))

    async def _chunks(self) -> bytes:
        body = bytearray()
        while True:
            size = (await self._until(b"\r\n", 1024)).partition(b";")[0]
            if not re.fullmatch(b"[0-9A-Fa-f]{1,8}", size):
                raise BadRequestError(400, "malformed chunk size")
            if len(body) + int(size, 16) > BODY_LIMIT:
                raise BadRequestError(413, f"more than {BODY_LIMIT} bytes of body")
            if not int(size, 16):
                while await self._until(b"\r\n", HEAD_LIMIT):
                    pass  # ignore trailers
                return bytes(body)
            body += await self._exactly(int(size, 16))
            if await self._exactly(2) != b"\r\n":
                raise BadRequestError(400, "a chunk does not end where its size says")


class Outlet:
    """The writing side of one response. Small writes are gathered; `flush` sends them.

    `drop_after` ends the response after that many bytes more, by a DroppedError. `cut` limits the size of a write.
    """

    def __init__(self, stream: SocketStream) -> None:
        self._stream = stream
        self._gathered = bytearray()
        self._chunked = False
        self.drop_after: int | None = None
        self.cut: int | None = None

    async def start(self, status: int, headers: Mapping[str, str], *, chunked: bool) -> None:
        """Send the head."""
        self._chunked = chunked
        phrase = responses.get(status, "Overloaded")
        fields = {**headers, **({"transfer-encoding": "chunked"} if chunked else {})}
        lines = [f"HTTP/1.1 {status} {phrase}", *(f"{name}: {value}" for name, value in fields.items())]
        await self._send("\r\n".join([*lines, "", ""]).encode())

    async def write(self, data: bytes) -> None:
        """Append a piece of the body; it is sent once enough has been gathered."""
        self._gathered += data
        if len(self._gathered) >= _WRITE_SIZE:
            await self.flush()

    async def flush(self) -> None:
        """Send all gathered bytes and wait until the kernel has them."""
        gathered, self._gathered = bytes(self._gathered), bytearray()
        step = self.cut or max(1, len(gathered))
        for start in range(0, len(gathered), step):
            piece = gathered[start : start + step]
            await self._send(b"%x\r\n%b\r\n" % (len(piece), piece) if self._chunked else piece)

    async def finish(self) -> None:
        """End the body."""
        await self.flush()
        if self._chunked:
            await self._send(b"0\r\n\r\n")

    async def _send(self, data: bytes) -> None:
        if self.drop_after is not None:
            data, self.drop_after = data[: self.drop_after], self.drop_after - len(data)
        if data:
            await self._stream.send(data)
        if self.drop_after is not None and self.drop_after <= 0:
            raise DroppedError


async def reset(stream: SocketStream) -> None:
    """Close so that the peer sees a reset instead of an end."""
    sock = stream.extra(SocketAttribute.raw_socket)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    await anyio.aclose_forcefully(stream)
