"""A small client without a library, so that the harness sees exactly the frames that hutchd sent."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from hashlib import sha1
from pathlib import Path
from typing import Any

import anyio
from anyio.abc import ByteStream
from anyio.streams.buffered import BufferedByteReceiveStream

ANSWER = 20.0
"""Seconds to wait for an answer, after which the connection counts as lost."""
_FRAME = 64 << 20


class LostError(Exception):
    """The connection is lost, or could not be made."""


class RefusedError(Exception):
    """hutchd answered with an error; `reason` is its stable word."""

    def __init__(self, error: dict[str, Any]) -> None:
        self.data: dict[str, Any] = error.get("data") or {}
        self.reason = str(self.data.get("reason"))
        super().__init__(f"{self.reason}: {error.get('message')}")


class Line:
    """One connection. Only one task may use it."""

    def __init__(self, stream: ByteStream) -> None:
        self._stream = stream
        self._lines = BufferedByteReceiveStream(stream)
        self._number = 0
        self._events: deque[dict[str, Any]] = deque()

    async def ask(self, method: str, **params: Any) -> Any:
        """Call a method and return its result. RefusedError for an error, LostError if no answer comes."""
        self._number += 1
        await self._send({"id": self._number, "method": method, "params": params})
        with anyio.move_on_after(ANSWER):
            while True:
                frame = await self._receive()
                if frame.get("id") == self._number and "method" not in frame:
                    if "error" in frame:
                        raise RefusedError(frame["error"])
                    return frame["result"]
        raise LostError(f"no answer to {method}")

    async def event(self) -> dict[str, Any]:
        """Return the next event of a follow on this connection."""
        while not self._events:
            await self._receive()
        return self._events.popleft()

    async def _send(self, frame: dict[str, Any]) -> None:
        try:
            await self._stream.send(json.dumps({"jsonrpc": "2.0", **frame}).encode() + b"\n")
        except (anyio.BrokenResourceError, anyio.ClosedResourceError) as error:
            raise LostError from error

    async def _receive(self) -> dict[str, Any]:
        """Receive one frame. Answer it if it is a ping; keep it if it is an event."""
        try:
            frame: dict[str, Any] = json.loads(await self._lines.receive_until(b"\n", _FRAME))
        except (anyio.BrokenResourceError, anyio.ClosedResourceError, anyio.EndOfStream, anyio.IncompleteRead) as error:
            raise LostError from error
        match frame.get("method"):
            case "ping":
                await self._send({"id": frame["id"], "result": {}})
            case "event":
                self._events.append(frame["params"])
            case "follow_ended":
                raise LostError(frame["params"]["message"])
        return frame


@asynccontextmanager
async def connect(path: Path) -> AsyncIterator[Line]:
    """Yield a connection; LostError if nobody listens. At the end the connection breaks, as after a kill."""
    try:
        stream = await anyio.connect_unix(str(path))
    except OSError as error:
        raise LostError(str(error)) from error
    try:
        yield Line(stream)
    finally:
        with anyio.CancelScope(shield=True):
            await anyio.aclose_forcefully(stream)


async def history(line: Line, session: str) -> list[dict[str, Any]]:
    """Return all events of a session, or of all sessions (`"*"`)."""
    found: list[dict[str, Any]] = []
    after = 0
    while True:
        page = await line.ask("read_events", session=session, after=after, limit=1000)
        found += page["events"]
        if not page["more"]:
            return found
        after = found[-1]["position" if session == "*" else "seq"]


def digest(event: dict[str, Any]) -> str:
    """Return a hash of an event's content. It is the same for a followed event and one read from history."""
    said = {name: value for name, value in event.items() if name != "follow"}
    return sha1(json.dumps(said, sort_keys=True).encode()).hexdigest()[:16]
