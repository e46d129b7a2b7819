"""The Claude CLI as a process, with the two halves of its output kept apart.

The SDK carries the control protocol (hooks, permission requests, interrupt) over the transport that this module
implements. The agent's own messages bypass the SDK: each is passed on as the bytes that the CLI wrote, so it is decoded
once and never encoded again. Always true:

- One task (the SDK's) reads standard output; one task at a time writes standard input. When nobody takes `messages`,
  reading stops, and with it the CLI: back-pressure, never loss.
- A line longer than `MAX_LINE` is skipped and does not end the CLI; a request in it is refused.
- A line that is not JSON does not end the CLI either: the runner gets it like every other, and a request in it is
  refused. Only `_GARBAGE` such lines in a row show that the output has no lines of JSON any more.
- The SDK gets control messages whose fields have the types that it relies on, with valid text; others are refused.
- `close` ends the process and everything that came from it, within its own deadline.
"""

from __future__ import annotations

import itertools
import json
import re
import secrets
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any, Final

import anyio
from anyio.abc import ByteReceiveStream, Process, SocketStream
from claude_agent_sdk import CLIConnectionError, Transport

from hutch_executor.runners.claude.lines import (
    CONTROL,
    MESSAGES,
    UNREADABLE,
    control_fault,
    kind_of_line,
    lax_line,
)
from hutch_executor.runners.claude.message_socket import find_listening
from hutch_executor.runners.claude.spawn import Launch, feed, kill_marked, marked, spawn
from hutch_shared.text import valid_value

__all__ = ["MAX_LINE", "BrokenOutput", "ClaudeProcess", "SkippedMessage"]

MAX_LINE: Final = 32 * 1024 * 1024
"""Bytes of one line of the CLI. A tool result may have 10 MB, and its line contains it twice."""

_CHUNK: Final = 256 * 1024
_AHEAD: Final = 64
"""Messages that may wait for the runner before reading stops."""
_KILL_DEADLINE: Final = 5.0
_REQUEST: Final = re.compile(rb'\{"type":"control_request","request_id":"([^"\\]+)"')
_GARBAGE: Final = 100
"""Lines in a row that are not JSON, after which nothing more is read."""
_SEEN: Final = 1000
"""Requests of the CLI that are remembered, so that one sent again is not answered twice."""


@dataclass(frozen=True, slots=True)
class SkippedMessage:
    """Stands for a message that was longer than `MAX_LINE`; `size` is its length in bytes."""

    size: int

    def __str__(self) -> str:
        return f"it had {self.size} bytes"


@dataclass(frozen=True, slots=True)
class BrokenOutput:
    """The last item of `messages` if the CLI does not write messages any more. Nothing after it is read."""

    detail: str


@dataclass(slots=True)
class _ControlRequest:
    """A control request to the CLI, and the CLI's response once it came."""

    answered: anyio.Event = field(default_factory=anyio.Event)
    response: dict[str, Any] = field(default_factory=lambda: {"error": "it has ended"})


class ClaudeProcess(Transport):
    """The SDK's transport over one CLI process. `messages` ends when the CLI's output has ended."""

    def __init__(self, launch: Launch) -> None:
        """Prepare; `connect` starts the process."""
        self._launch = launch
        self._process: Process | None = None
        self._input: SocketStream | None = None
        self._output: SocketStream | None = None
        self._writing = anyio.Lock()
        self._ready = False
        self._sender, self.messages = anyio.create_memory_object_stream[bytes | SkippedMessage | BrokenOutput](_AHEAD)
        self.received = 0
        """The number of messages read so far. A permission request of the CLI follows all of them."""
        self.lines = 0
        """The number of lines of any kind read so far: it does not grow while the CLI is silent."""
        self._mark = secrets.token_hex(8)
        self._requests: dict[str, _ControlRequest] = {}
        self._numbers = itertools.count()
        self._seen: deque[str] = deque(maxlen=_SEEN)
        self._garbage = 0
        """The number of lines in a row that are not JSON."""
        self._stderr_rest = b""
        self._started = anyio.Event()

    def __repr__(self) -> str:
        state = "not started" if self._process is None else f"pid {self.pid}, exit {self._process.returncode}"
        return f"<ClaudeProcess {state}, {self.received} messages>"

    @property
    def pid(self) -> int | None:
        """The process id, or None before the start."""
        return self._process.pid if self._process else None

    @property
    def blocked(self) -> bool:
        """Whether reading has stopped because nobody takes `messages`, so that silence does not mean a stuck CLI."""
        return self._sender.statistics().current_buffer_used >= _AHEAD

    async def connect(self) -> None:
        """Start the CLI and feed it its documents. CLIConnectionError if it cannot be started."""
        try:
            self._process, self._input, self._output, documents = await spawn(self._launch, self._mark)
        finally:
            self._started.set()
        self._ready = True
        await feed(documents)

    async def write(self, data: str) -> None:
        """Write one line to the CLI. CLIConnectionError if it accepts no more input."""
        async with self._writing:
            if not self._ready or self._input is None:
                raise CLIConnectionError("The Claude CLI is not running.")
            try:
                await self._input.send(data.encode())  # queued whole: a cancelled caller tears no line
            except (anyio.BrokenResourceError, anyio.ClosedResourceError, OSError, RuntimeError) as error:
                self._ready = False  # RuntimeError: the input was ended while this line waited
                raise CLIConnectionError("The Claude CLI accepts no more input.") from error

    async def read_messages(self) -> AsyncIterator[dict[str, Any]]:
        """Yield control messages to the SDK; put every other message into `messages`, as its bytes."""
        assert self._output is not None
        try:
            async with aclosing(self._lines(self._output)) as lines:
                async for line in lines:
                    self.lines += 1
                    if isinstance(line, SkippedMessage):
                        await self._queue(line)
                    elif line.lstrip()[:1] == b"{":  # some builds mix in lines such as `[SandboxDebug] …`
                        if (control := await self._sort(line)) is not None:
                            yield control
                        if self._garbage >= _GARBAGE:
                            await self._queue(BrokenOutput(f"{self._garbage} lines in a row that are not JSON"))
                            raise CLIConnectionError("The Claude CLI does not write messages any more.")
        finally:
            self._ready = False
            self._sender.close()
            for request in self._requests.values():
                request.answered.set()
        raise CLIConnectionError("The Claude CLI has ended.")

    async def _sort(self, line: bytes) -> dict[str, Any] | None:
        """Return a control message for the SDK, or queue the line. Count the lines in a row that are not JSON."""
        try:
            if kind_of_line(line) in MESSAGES:
                self._garbage = 0
                await self._queue(line)
                return None
        except UNREADABLE:
            pass
        try:
            kind, control = lax_line(line)
            if kind in CONTROL or isinstance(control.get("request"), dict):
                for_sdk = await self._control(kind, valid_value(control), line)
                self._garbage = 0
                return for_sdk
            self._garbage = 0
        except UNREADABLE:
            self._garbage += 1
            if request := _REQUEST.match(line):
                await self._refuse(request[1].decode(errors="replace"), "it is not readable")
        await self._queue(line)
        return None

    async def _control(self, kind: str, control: dict[str, Any], line: bytes) -> dict[str, Any] | None:
        """Return a control message that the SDK can read. Refuse a request that it cannot read; report the others."""
        fault = control_fault(control) if kind in CONTROL else "it has another type"
        if fault is None:
            return None if self._is_response(control) or self._is_repeated(control) else control
        name = control.get("request_id")
        asks = kind == "control_request" or isinstance(control.get("request"), dict)
        if asks and isinstance(name, str | int):
            await self._refuse(name, fault)
        await self._queue(line)
        return None

    def _is_repeated(self, control: dict[str, Any]) -> bool:
        """Whether this request came before; an answer to it is on its way."""
        if control["type"] != "control_request":
            return False
        if control["request_id"] in self._seen:
            return True
        self._seen.append(control["request_id"])
        return False

    async def _lines(self, output: ByteReceiveStream) -> AsyncGenerator[bytes | SkippedMessage, None]:
        """Split the output at newlines. Keep only the size of a line that is too long, and refuse a request in it."""
        buffer, skipped = bytearray(), 0
        while chunk := await _receive(output):
            *complete, rest = chunk.split(b"\n")
            for piece in complete:
                buffer += piece
                yield SkippedMessage(skipped + len(buffer)) if skipped else bytes(buffer)
                skipped = 0
                buffer.clear()
            buffer += rest
            if skipped or len(buffer) > MAX_LINE:
                if not skipped and (request := _REQUEST.match(buffer)):
                    await self._refuse(request[1].decode(errors="replace"), f"it has more than {MAX_LINE} bytes")
                skipped += len(buffer)
                buffer.clear()

    async def _refuse(self, request: str | int, why: str) -> None:
        response = {"subtype": "error", "request_id": request, "error": f"Hutch cannot read this request: {why}."}
        with suppress(CLIConnectionError):  # the CLI has closed its input
            await self.write(json.dumps({"type": "control_response", "response": response}) + "\n")

    async def _queue(self, message: bytes | SkippedMessage | BrokenOutput) -> None:
        self.received += 1
        try:
            self._sender.send_nowait(message)
        except anyio.WouldBlock:
            await self._sender.send(message)

    async def next_message(self) -> bytes | SkippedMessage | BrokenOutput:
        """Return the next of `messages`; EndOfStream after the last.

        Does not yield to other tasks if one is ready: for a stream of deltas that would cost more than all other work.
        """
        try:
            return self.messages.receive_nowait()
        except anyio.WouldBlock:
            return await self.messages.receive()

    async def control(self, subtype: str, **fields: Any) -> dict[str, Any]:
        """Send a request of the control protocol to the CLI and return its response. Waits without limit.

        Bypasses the SDK, which supports fewer requests and raises bare exceptions. CLIConnectionError if the CLI has
        ended or refuses.
        """
        name = f"hutch-{next(self._numbers)}"
        pending = self._requests[name] = _ControlRequest()
        try:
            request = {"type": "control_request", "request_id": name, "request": {"subtype": subtype, **fields}}
            await self.write(json.dumps(request) + "\n")
            await pending.answered.wait()
        finally:
            del self._requests[name]
        if pending.response.get("subtype") != "success":
            raise CLIConnectionError(f"The Claude CLI refused {subtype}: {pending.response.get('error')}")
        response = pending.response.get("response")
        return response if isinstance(response, dict) else {}

    def _is_response(self, control: dict[str, Any]) -> bool:
        """Take a response to a request of `control` and return True; return False for a message for the SDK."""
        response = control.get("response")
        if not isinstance(response, dict) or (pending := self._requests.get(str(response.get("request_id")))) is None:
            return False
        pending.response = response
        pending.answered.set()
        return True

    async def stderr(self) -> str | None:
        """Return the next whole lines of standard error; at its end return the rest, then None.

        Waits for `connect`, which may not have begun; None if it failed.
        """
        await self._started.wait()
        if self._process is None or self._process.stderr is None:
            return None
        while chunk := await _receive(self._process.stderr):
            text, newline, self._stderr_rest = (self._stderr_rest + chunk).rpartition(b"\n")
            if newline or len(self._stderr_rest) > _CHUNK:
                return text.decode(errors="replace")
        rest, self._stderr_rest = self._stderr_rest, b""
        return rest.decode(errors="replace") if rest else None

    async def exit_code(self) -> int | None:
        """Wait up to a second and return the exit code; negative for a signal, None if the CLI still runs."""
        if self._process is not None:
            with anyio.move_on_after(1.0):
                return await self._process.wait()
        return None

    def message_socket(self) -> str | None:
        """Return the path of a Unix socket on which the CLI accepts connections; None if there is none. Blocks.

        See `find_listening` for a CLI that cannot be examined.
        """
        return find_listening(marked(self._mark), self._process.pid) if self._process is not None else None

    def kill(self) -> bool:
        """Kill the CLI and everything that came from it; return whether a process was left besides the CLI."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
        return kill_marked(self._mark)

    async def end_input(self) -> None:
        """Close the CLI's input; it then ends by itself. Nothing can be written any more."""
        self._ready = False
        if self._input is not None:
            with suppress(OSError):  # it has ended already
                await self._input.send_eof()

    async def close(self, grace: float = 2.0) -> None:
        """Close the CLI's input, wait `grace` seconds, then kill everything that came from it. Safe to call twice.

        Messages read before stay in `messages`; the reader of `messages` closes it.
        """
        self._ready = False
        self._sender.close()
        process = self._process
        if process is None:
            return
        with anyio.CancelScope(shield=True):
            with anyio.move_on_after(grace):
                await self.end_input()
                await process.wait()
            self.kill()
            with anyio.move_on_after(_KILL_DEADLINE):
                await process.wait()
                while self.kill():  # noqa: ASYNC110 -- nothing reports that a grandchild ended or forked
                    await anyio.sleep(0.01)
            for stream in (self._input, self._output, process.stderr):
                if stream is not None:
                    with suppress(OSError):
                        await stream.aclose()

    def is_ready(self) -> bool:
        """Whether the CLI accepts input."""
        return self._ready


async def _receive(stream: ByteReceiveStream) -> bytes:
    try:
        return await stream.receive(_CHUNK)
    except (anyio.EndOfStream, anyio.ClosedResourceError, anyio.BrokenResourceError, OSError):
        return b""
