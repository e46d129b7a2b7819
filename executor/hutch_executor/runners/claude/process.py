"""The Claude CLI as a process of ours, with the two halves of what it writes kept apart.

The SDK carries the control protocol (hooks, permission questions, interrupt) over the transport given here. The
agent's own messages do not go through it: each is handed on as the line of bytes that the CLI wrote, so that it is
decoded once and never encoded again. What this keeps true:

- Nothing secret is in the command line, the environment or a file: documents reach the CLI through pipes, and what was
  read from a pipe is no longer in it.
- One task reads standard output (the SDK's), one at a time writes standard input. When nobody takes `messages`, reading
  stops, and with it the CLI: back-pressure, never loss.
- A line beyond `MAX_LINE` is skipped, not fatal; a question in it is refused.
- `close` ends the process and everything that came from it, within its own deadline.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import secrets
import shutil
import signal
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import anyio
from anyio.abc import ByteReceiveStream, Process
from claude_agent_sdk import CLIConnectionError, Transport

from hutch_executor.process.limits import agent_first
from hutch_executor.runners.claude.events import kind_of_line
from hutch_shared.secret import Secret

__all__ = ["MAX_LINE", "Broken", "ClaudeProcess", "Launch", "Skipped"]

MAX_LINE: Final = 32 * 1024 * 1024
"""Bytes of one line of the CLI: a tool result of 10 MB comes twice in its line."""

_CHUNK: Final = 256 * 1024
_AHEAD: Final = 64
"""Messages that may wait for the runner before reading stops."""

_FEED_DEADLINE: Final = 30.0
_KILL_DEADLINE: Final = 5.0
_QUESTION: Final = re.compile(rb'\{"type":"control_request","request_id":"([^"\\]+)"')
_MARK: Final = "HUTCH_AGENT_RUN"
"""A variable that everything which comes from one CLI inherits, so that it can be found when the CLI is gone."""
_CONTROL: Final = frozenset({"control_request", "control_response", "control_cancel_request"})


@dataclass(frozen=True, slots=True)
class Launch:
    """How to start the CLI. Documents come through pipes: by number in a variable, by path after a flag."""

    argv: tuple[str, ...]
    cwd: str
    env: Mapping[str, str]
    in_variables: Mapping[str, Secret] = field(default_factory=dict)
    after_flags: Mapping[str, Secret] = field(default_factory=dict)
    inherited: tuple[int, ...] = ()
    """Descriptors that it gets under the numbers that they have here."""
    umask: int = -1
    """-1: that of this process."""


@dataclass(frozen=True, slots=True)
class Skipped:
    """In place of a message that was longer than `MAX_LINE`: how many bytes it had."""

    size: int

    def __str__(self) -> str:
        return f"it had {self.size} bytes"


@dataclass(frozen=True, slots=True)
class Broken:
    """The last thing in `messages` when the CLI wrote what is no message; nothing after it can be trusted."""

    detail: str


@dataclass(slots=True)
class _Asked:
    """A question of ours that the CLI has not answered, or the answer."""

    answered: anyio.Event = field(default_factory=anyio.Event)
    response: dict[str, Any] = field(default_factory=lambda: {"error": "it has ended"})


class ClaudeProcess(Transport):
    """The SDK's transport over one CLI process. `messages` ends when the CLI's output has ended."""

    def __init__(self, launch: Launch) -> None:
        """Prepare; `connect` starts the process."""
        self._launch = launch
        self._process: Process | None = None
        self._writing = anyio.Lock()
        self._ready = False
        self._sender, self.messages = anyio.create_memory_object_stream[bytes | Skipped | Broken](_AHEAD)
        self.received = 0
        """Messages taken from the CLI so far; a question of the CLI comes after all of them."""
        self.lines = 0
        """Lines of any sort: it stands still while the CLI is silent."""
        self._mark = secrets.token_hex(8)
        self._asked: dict[str, _Asked] = {}
        self._numbers = itertools.count()
        self._stderr_rest = b""

    def __repr__(self) -> str:
        state = "not started" if self._process is None else f"pid {self.pid}, exit {self._process.returncode}"
        return f"<ClaudeProcess {state}, {self.received} messages>"

    @property
    def pid(self) -> int | None:
        """The process id, or None before the start."""
        return self._process.pid if self._process else None

    @property
    def blocked(self) -> bool:
        """Whether reading has stopped because `messages` are not taken: the silence is then not the CLI's."""
        return self._sender.statistics().current_buffer_used >= _AHEAD

    async def connect(self) -> None:
        """Start the CLI and feed it its documents. CLIConnectionError when it cannot be started."""
        launch, argv = self._launch, [*agent_first((*_dying_with_us(), *self._launch.argv))]
        env = {**launch.env, _MARK: self._mark}
        readers: list[int] = []
        feeds: list[tuple[int, Secret]] = []
        try:
            for name, document in [*launch.in_variables.items(), *launch.after_flags.items()]:
                reader, writer = os.pipe()
                readers.append(reader)
                feeds.append((writer, document))
                if name in launch.in_variables:
                    env[name] = str(reader)
                else:
                    argv += [name, f"/dev/fd/{reader}"]
            self._process = await anyio.open_process(
                argv,
                cwd=launch.cwd,
                env=env,
                start_new_session=True,
                pass_fds=[*readers, *launch.inherited],
                umask=launch.umask,
            )
        except BaseException as error:
            for writer, _ in feeds:
                os.close(writer)
            if isinstance(error, OSError | ValueError):
                raise CLIConnectionError(f"The Claude CLI could not be started: {error}") from error
            raise
        finally:
            for reader in readers:
                os.close(reader)
        self._ready = True
        async with anyio.create_task_group() as group:
            for writer, document in feeds:
                group.start_soon(_feed, writer, document)

    async def write(self, data: str) -> None:
        """Write one line to the CLI. CLIConnectionError when it takes none any more."""
        async with self._writing:
            if not self._ready or self._process is None or self._process.stdin is None:
                raise CLIConnectionError("The Claude CLI is not running.")
            try:
                await self._process.stdin.send(data.encode())  # queued whole at once: a cancelled caller tears no line
            except (anyio.BrokenResourceError, anyio.ClosedResourceError, OSError) as error:
                self._ready = False
                raise CLIConnectionError("The Claude CLI takes no more input.") from error

    async def read_messages(self) -> AsyncIterator[dict[str, Any]]:
        """Yield the control messages to the SDK; hand all others to `messages`, whole."""
        assert self._process is not None
        assert self._process.stdout is not None
        try:
            async with aclosing(self._lines(self._process.stdout)) as lines:
                async for line in lines:
                    self.lines += 1
                    if isinstance(line, Skipped):
                        await self._hand_on(line)
                    elif line.startswith(b"{"):  # some builds mix in lines such as `[SandboxDebug] …`
                        if kind_of_line(line) not in _CONTROL:
                            await self._hand_on(line)
                        elif not self._answered(control := json.loads(line)):
                            yield control
        except ValueError as error:
            await self._hand_on(Broken(str(error)))
            raise CLIConnectionError("The Claude CLI wrote what is no message.") from error
        finally:
            self._ready = False
            self._sender.close()
            for asked in self._asked.values():
                asked.answered.set()
        raise CLIConnectionError("The Claude CLI has ended.")

    async def _lines(self, output: ByteReceiveStream) -> AsyncGenerator[bytes | Skipped, None]:
        """Split the output at newlines. Of a line too long only the size is kept; a question in it is refused."""
        buffer, skipped = bytearray(), 0
        while chunk := await _receive(output):
            *complete, rest = chunk.split(b"\n")
            for piece in complete:
                buffer += piece
                yield Skipped(skipped + len(buffer)) if skipped else bytes(buffer)
                skipped = 0
                buffer.clear()
            buffer += rest
            if skipped or len(buffer) > MAX_LINE:
                if not skipped and (question := _QUESTION.match(buffer)):
                    await self._refuse(question[1].decode())
                skipped += len(buffer)
                buffer.clear()

    async def _refuse(self, question: str) -> None:
        response = {"subtype": "error", "request_id": question, "error": f"more than {MAX_LINE} bytes"}
        await self.write(json.dumps({"type": "control_response", "response": response}) + "\n")

    async def _hand_on(self, message: bytes | Skipped | Broken) -> None:
        self.received += 1
        try:
            self._sender.send_nowait(message)
        except anyio.WouldBlock:
            await self._sender.send(message)

    async def next_message(self) -> bytes | Skipped | Broken:
        """Return the next of `messages`; EndOfStream when there are no more.

        What is there is taken without giving up the turn: a stream of deltas would pay more for that than for all else.
        """
        try:
            return self.messages.receive_nowait()
        except anyio.WouldBlock:
            return await self.messages.receive()

    async def ask(self, subtype: str, **fields: Any) -> dict[str, Any]:
        """Put a question of the control protocol to the CLI and wait for the answer, as long as it takes.

        Beside the SDK, which knows fewer questions and fails with bare exceptions. CLIConnectionError when the CLI
        has ended or refuses.
        """
        name = f"hutch-{next(self._numbers)}"
        asked = self._asked[name] = _Asked()
        try:
            request = {"type": "control_request", "request_id": name, "request": {"subtype": subtype, **fields}}
            await self.write(json.dumps(request) + "\n")
            await asked.answered.wait()
        finally:
            del self._asked[name]
        if asked.response.get("subtype") != "success":
            raise CLIConnectionError(f"The Claude CLI refused {subtype}: {asked.response.get('error')}")
        answer = asked.response.get("response")
        return answer if isinstance(answer, dict) else {}

    def _answered(self, control: dict[str, Any]) -> bool:
        """Take what answers a question of `ask`; the rest is the SDK's."""
        response = control.get("response")
        if not isinstance(response, dict) or (asked := self._asked.get(str(response.get("request_id")))) is None:
            return False
        asked.response = response
        asked.answered.set()
        return True

    async def stderr(self) -> str | None:
        """Wait for more on standard error: whole lines, or the rest when it ends; then None."""
        if self._process is None or self._process.stderr is None:
            return None
        while chunk := await _receive(self._process.stderr):
            text, newline, self._stderr_rest = (self._stderr_rest + chunk).rpartition(b"\n")
            if newline or len(self._stderr_rest) > _CHUNK:
                return text.decode(errors="replace")
        rest, self._stderr_rest = self._stderr_rest, b""
        return rest.decode(errors="replace") if rest else None

    async def exit_code(self) -> int | None:
        """Wait a moment for the exit code after the output ended; negative is a signal."""
        if self._process is not None:
            with anyio.move_on_after(1.0):
                return await self._process.wait()
        return None

    def kill(self) -> bool:
        """Kill the CLI and everything that came from it, at once; tell whether there was anything to kill."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
        left = _marked(f"{_MARK}={self._mark}".encode())
        for pid in left:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        return bool(left)

    async def end_input(self) -> None:
        """Close the CLI's input; it ends by itself after that."""
        if self._process is not None and self._process.stdin is not None:
            await self._process.stdin.aclose()

    async def close(self, grace: float = 2.0) -> None:
        """End the CLI: close its input, wait `grace` seconds, then kill all that came from it. Safe to call twice.

        What it said before stays in `messages`, which its reader closes.
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
                while self.kill():  # noqa: ASYNC110 -- nobody is told when a grandchild ends, or starts one more
                    await anyio.sleep(0.01)
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    with suppress(OSError):
                        await stream.aclose()

    def is_ready(self) -> bool:
        """Whether the CLI takes input."""
        return self._ready


async def _receive(stream: ByteReceiveStream) -> bytes:
    try:
        return await stream.receive(_CHUNK)
    except (anyio.EndOfStream, anyio.ClosedResourceError, anyio.BrokenResourceError):
        return b""


async def _feed(writer: int, document: Secret) -> None:
    """Write the document and close the pipe; a CLI that dies before it has read all of it is seen elsewhere."""
    os.set_blocking(writer, False)
    rest = document.reveal().encode()
    try:
        with anyio.move_on_after(_FEED_DEADLINE), suppress(BrokenPipeError):
            while rest:
                try:
                    rest = rest[os.write(writer, rest) :]
                except BlockingIOError:
                    await anyio.wait_writable(writer)
    finally:
        os.close(writer)


def _dying_with_us() -> list[str]:
    """The words that make the CLI die with this process: by itself it would work on to the end of its turn."""
    setpriv = shutil.which("setpriv")
    return [setpriv, "--pdeathsig", "KILL", "--"] if setpriv else []


def _marked(mark: bytes) -> list[int]:
    """The live processes with `mark` in their environment, as Linux tells; elsewhere none are found."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found
