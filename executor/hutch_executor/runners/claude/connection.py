"""A connected Claude CLI: its process, the translation of its lines, and the count of reported lines."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

import anyio
import msgspec
from claude_agent_sdk import ClaudeSDKClient

from hutch_executor.runners.claude.broker_directory import BrokerDirectory
from hutch_executor.runners.claude.events import EventTranslator
from hutch_executor.runners.claude.lines import ResultLine
from hutch_executor.runners.claude.process import BrokenOutput, ClaudeProcess, SkippedMessage
from hutch_executor.runners.claude.turn_end import ended
from hutch_executor.runners.claude.usage import UsageMeter
from hutch_executor.sandbox.command import SandboxedCommand
from hutch_shared.errors import HutchError, Reason
from hutch_shared.events import EventKind, Notice
from hutch_shared.latch import Latch

__all__ = ["ClaudeConnection"]

_STDERR_LINES: Final = 20


@dataclass(slots=True, eq=False)
class ClaudeConnection:
    """One CLI process, from its start to its end."""

    client: ClaudeSDKClient
    process: ClaudeProcess
    translator: EventTranslator
    meter: UsageMeter
    ran: dict[str, str]
    """The digest of the input that each call ran with, by call."""
    command: SandboxedCommand | None
    broker: BrokerDirectory | None = None
    """The broker's directory in its sandbox; None without a sandbox or a broker."""
    mode: str = "default"
    """The mode that the CLI should be in."""
    knows_commands: bool = False
    """Whether it was started with its built-in commands; such a CLI runs one command and gets no prompt."""
    reported: int = 0
    """The number of messages whose events are reported."""
    stderr: deque[str] = field(default_factory=lambda: deque(maxlen=_STDERR_LINES))
    stderr_ended: anyio.Event = field(default_factory=anyio.Event)
    mode_reported: Latch = field(default_factory=Latch)
    """Notified when the CLI has reported another mode than before."""
    _socket: str | None = None
    _looked: bool = False
    """Whether it is known that the CLI has no message socket, or has one."""
    _progress: Latch = field(default_factory=Latch)

    @property
    def lost_broker(self) -> bool:
        """Whether the broker's directory was made again, so that this CLI cannot reach the broker any more."""
        return self.broker is not None and self.broker.is_replaced()

    async def end(self) -> None:
        """End the CLI at once, and close its network bridge."""
        await self.process.close(0)
        self.process.messages.close()
        if self.command is not None:
            await self.command.aclose()

    def translate(self, line: bytes | SkippedMessage | BrokenOutput) -> list[tuple[EventKind, msgspec.Struct]]:
        """Return the events of one message of the CLI."""
        if isinstance(line, bytes):
            return self.translator.translate(line)
        return [("notice", Notice("message_too_large", f"A message of Claude Code was left out: {line}."))]

    def note_reported(self) -> None:
        """Count one more message whose events are reported."""
        self.reported += 1
        self._progress.notify()

    async def caught_up(self) -> None:
        """Wait until every message read so far is reported, so that a permission request follows them."""
        goal = self.process.received
        while self.reported < goal:
            await self._progress.wait()

    async def message_socket(self) -> str | None:
        """Return the socket over which the CLI takes messages from other processes; None if it takes none.

        Asks the kernel once, before the CLI's first call; the CLI itself names a socket at the start of each turn.
        """
        if not self._looked:
            self._socket = await anyio.to_thread.run_sync(self.process.message_socket)
            self._looked = True
        return self._socket or self.translator.message_socket

    async def read_stderr(self, report: Callable[[str], Awaitable[None]] | None = None) -> None:
        """Keep the last lines of standard error until it ends; pass the text to `report`."""
        while (text := await self.process.stderr()) is not None:
            self.stderr.extend(text.splitlines())
            if report is not None and text.strip():
                await report(text)
        self.stderr_ended.set()

    async def start_error(self, failure: Exception) -> HutchError:
        """End the CLI and return why it did not start; the detail `word` is the reason for a failed turn."""
        result: ResultLine | None = None
        with suppress(anyio.EndOfStream, anyio.ClosedResourceError, anyio.WouldBlock):
            while result is None:
                line = self.process.messages.receive_nowait()
                if isinstance(line, bytes):
                    self.translator.translate(line)
                    result = self.translator.result
        await self.end()
        if result is not None:
            end = ended(result, None)
            reason = Reason.NOT_FOUND if end.reason == "resume_unknown" else Reason.AGENT_UNAVAILABLE
            return HutchError(reason, end.message, word=end.reason)
        why = "\n".join(self.stderr) or ("it took too long" if isinstance(failure, TimeoutError) else str(failure))
        return HutchError(Reason.AGENT_UNAVAILABLE, f"Claude Code could not be started: {why}", word="agent_died")
