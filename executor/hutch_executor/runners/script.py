"""The script runner: plays a JSONL file through the same ports as a real agent, for demonstrations and tests.

One line is one step, an object with exactly one of the keys of `Line` that say what to do. A line `{"turn": true}`
separates turns: turn k of the session plays part k, and later ones the last part. Without a script the prompt is the
script, if its first line is an object; any other prompt is answered with its own text. Each event carries its line as
the native message.

The script is read, and files are waited for, as the account; its commands run inside the walls of the session, if it
has any. Each has walls of its own, with a /tmp and a home that go with it.
"""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Literal

import anyio
import msgspec
from msgspec import UNSET, Raw, UnsetType

from hutch_executor.account.commands import run_command
from hutch_executor.account.environment import ALLOWED_ENVIRONMENT
from hutch_executor.account.setup import Setup
from hutch_executor.process.limits import agent_first
from hutch_executor.runners.port import DaemonPort
from hutch_executor.sandbox.command import Enclosure
from hutch_shared import messages as m
from hutch_shared.digest import input_digest
from hutch_shared.errors import HutchError, Reason
from hutch_shared.events import Notice, StderrText, Text, ToolCallSeen, ToolResult, TurnEnded, UsageSeen
from hutch_shared.failpoints import failpoint
from hutch_shared.vocabulary import to_call, to_questions

__all__ = ["Line", "ScriptRunner", "Step", "read_script"]

OUTPUT_LIMIT: Final = 24 << 20
_SCRIPT_LIMIT: Final = 64 << 20
_LOOK_AGAIN: Final = 0.02
_CLOSE_DEADLINE: Final = 5.0


class Repeat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Plays `line` `times` times."""

    times: int
    line: Raw


class End(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Ends the turn at once."""

    state: Literal["completed", "failed"] = "completed"
    reason: str = "completed"
    message: str = "The script says so."


class Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a line may say."""

    text: str | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    thinking_delta: str | UnsetType = UNSET
    stderr: str | UnsetType = UNSET
    notice: Notice | UnsetType = UNSET
    usage: UsageSeen | UnsetType = UNSET
    tool: str | UnsetType = UNSET
    """Asks for the call of this tool with `input`; if it may, `run` runs its command in a shell, else `result` came."""
    ask: list[dict[str, Any]] | UnsetType = UNSET
    """Questions in the form of `AskUserQuestion`."""
    plan: str | UnsetType = UNSET
    pause: float | UnsetType = UNSET
    """Seconds."""
    wait_file: str | UnsetType = UNSET
    """Waits until this file is there."""
    repeat: Repeat | UnsetType = UNSET
    end: End | UnsetType = UNSET
    exit: int | UnsetType = UNSET
    """Ends the executor's process on the spot, with this code."""
    turn: Literal[True] | UnsetType = UNSET
    input: dict[str, Any] = {}
    run: bool = False
    result: str = ""
    is_error: bool = False

    def __post_init__(self) -> None:
        """Refuse a line that says nothing to do, or two things."""
        said = [name for name in _DOES if getattr(self, name) is not UNSET]
        if len(said) != 1:
            raise ValueError(f"a line says one thing to do, this one says {', '.join(said) or 'none'}")


_DOES: Final = tuple(name for name in Line.__struct_fields__ if name not in {"input", "run", "result", "is_error"})


@dataclass(frozen=True, slots=True)
class Step:
    """A line and the bytes it was written in."""

    line: Line
    native: bytes


def read_script(text: str) -> list[list[Step]]:
    """Return the steps of each turn; HutchError that names the line that cannot be read. Blank lines are nothing."""
    turns: list[list[Step]] = [[]]
    for number, written in enumerate(text.split("\n"), 1):
        if not written.strip():
            continue
        step = _read_step(written.encode(), f"Line {number} of the script")
        if step.line.turn is UNSET:
            turns[-1].append(step)
        else:
            turns.append([])
    return turns


def _read_step(written: bytes, where: str) -> Step:
    try:
        return Step(msgspec.json.decode(written, type=Line), written)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise HutchError(Reason.AGENT_UNAVAILABLE, f"{where} cannot be read: {error}") from error


class _EndedError(Exception):
    """Unwinds a turn that ends before its last line."""

    def __init__(self, ended: TurnEnded) -> None:
        super().__init__()
        self.ended = ended


class ScriptRunner:
    """An `AgentRunner` that plays a script."""

    agent: ClassVar[str] = "script"

    def __init__(self) -> None:
        """Make a runner that has no script yet."""
        self._session: m.PrepareSession | None = None
        self._daemon: DaemonPort | None = None
        self._turns: list[list[Step]] | None = None
        self._scope: anyio.CancelScope | None = None
        self._finished = anyio.Event()
        self._calls = 0
        self._said: str | None = None
        self._enclosure: Enclosure | None = None
        self.setup = Setup()

    @classmethod
    def preload(cls) -> None:
        """Import nothing more: all is here."""

    async def open(self, session: m.PrepareSession, daemon: DaemonPort) -> m.Prepared:
        """Read the script, which is found from the session's directory, and put the walls up once, for a trial."""
        if session.options.script is not None:
            path = anyio.Path(session.cwd, session.options.script)
            try:
                if (await path.stat()).st_size > _SCRIPT_LIMIT:
                    raise HutchError(Reason.AGENT_UNAVAILABLE, f"The script {path} is too long.")
                text = await path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise HutchError(Reason.AGENT_UNAVAILABLE, f"The script {path} cannot be read: {error}") from error
            self._turns = read_script(text)
        self._session, self._daemon = session, daemon
        if session.sandbox is not None:
            self._enclosure = Enclosure(session, session.sandbox)
            entered = await anyio.to_thread.run_sync(self._enclosure.enter, (), {})
            entered.close()
        return m.Prepared(agent_session=session.resume or f"script-{session.session}", keys="none")

    async def run(self, prompt: m.ExecutePrompt) -> TurnEnded:
        """Play the turn's part."""
        assert self._session is not None
        self._said = None
        self._finished = anyio.Event()
        try:
            with anyio.CancelScope() as self._scope:
                await self._play(self._part(prompt))
                return self._ended("completed", "completed", "The turn completed.")
        except _EndedError as end:
            return end.ended
        except HutchError as error:
            return self._ended("failed", error.reason.word, error.message)
        finally:
            self._scope = None
            self._finished.set()
        return self._ended("stopped", "interrupted", "The turn was interrupted.")

    async def interrupt(self) -> None:
        """Stop playing; the command that runs is killed first."""
        if self._scope is not None:
            self._scope.cancel()
            await self._finished.wait()

    async def set_mode(self, mode: m.PermissionMode) -> None:
        """Need not know: hutchd decides."""

    async def close(self) -> None:
        """Stop playing."""
        with anyio.move_on_after(_CLOSE_DEADLINE):
            await self.interrupt()
        if self._enclosure is not None:
            await anyio.to_thread.run_sync(self._enclosure.close)

    # ------------------------------------------------------------ a turn

    def _part(self, prompt: m.ExecutePrompt) -> Sequence[Step]:
        if self._turns is not None:
            return self._turns[min(prompt.number, len(self._turns)) - 1]
        if prompt.prompt.lstrip().startswith("{"):
            return [step for turn in read_script(prompt.prompt) for step in turn]
        return [Step(Line(text=prompt.prompt), msgspec.json.encode({"text": prompt.prompt}))]

    async def _play(self, steps: Sequence[Step]) -> None:
        for step in steps:
            await self._play_step(step)

    async def _play_step(self, step: Step) -> None:
        assert self._daemon is not None
        report, line = self._daemon.report, step.line
        if line.text is not UNSET:
            self._said = line.text
            await report("text", Text(line.text), step.native)
        elif line.delta is not UNSET:
            await report("text_delta", Text(line.delta), step.native)
        elif line.thinking is not UNSET:
            await report("thinking", Text(line.thinking), step.native)
        elif line.thinking_delta is not UNSET:
            await report("thinking_delta", Text(line.thinking_delta), step.native)
        elif line.stderr is not UNSET:
            await report("stderr", StderrText(line.stderr), step.native)
        elif line.notice is not UNSET:
            await report("notice", line.notice, step.native)
        elif line.usage is not UNSET:
            await report("usage", line.usage, step.native)
        elif line.tool is not UNSET:
            await self._use(step, self._call(line.tool, line.input))
        elif line.ask is not UNSET:
            await self._use(step, self._call("AskUserQuestion", {"questions": line.ask}), kind="question")
        elif line.plan is not UNSET:
            await self._use(step, self._call("ExitPlanMode", {"plan": line.plan}), kind="plan")
        elif line.pause is not UNSET:
            await anyio.sleep(line.pause)
        elif line.wait_file is not UNSET:
            assert self._session is not None
            while not await anyio.Path(self._session.cwd, line.wait_file).exists():  # noqa: ASYNC110  # others make it
                await anyio.sleep(_LOOK_AGAIN)
        elif line.repeat is not UNSET:
            again = _read_step(bytes(line.repeat.line), "The line to repeat")
            for _ in range(line.repeat.times):
                await self._play_step(again)
        elif line.end is not UNSET:
            raise _EndedError(self._ended(line.end.state, line.end.reason, line.end.message))
        elif line.exit is not UNSET:
            os._exit(line.exit)

    def _ended(self, state: Literal["completed", "failed", "stopped"], reason: str, message: str) -> TurnEnded:
        assert self._session is not None
        named = self._session.resume or f"script-{self._session.session}"
        return TurnEnded(state, reason, message, result=self._said, agent_session=named)

    # ------------------------------------------------------------ tools

    def _call(self, tool: str, tool_input: dict[str, Any]) -> m.ToolCall:
        assert self._session is not None
        self._calls += 1
        return to_call(tool, tool_input, f"call-{os.getpid()}-{self._calls}", self._session.cwd, with_diff=True)

    async def _use(self, step: Step, call: m.ToolCall, kind: m.PermissionKind = "tool") -> None:
        """Show the call, ask, and do what was allowed."""
        assert self._daemon is not None
        await self._daemon.report("tool_call", ToolCallSeen(msgspec.to_builtins(call)), step.native)
        decision = await self._daemon.request_permission(
            kind, call, questions=to_questions(call.input) if kind == "question" else (), plan=call.input.get("plan")
        )
        failpoint("executor.decided")
        if decision.decision == "deny":
            text, is_error = decision.message or "It was denied.", True
        elif kind == "question":
            text, is_error = json.dumps(decision.answers or {}), False
        elif step.line.run and call.action == "run_command":
            text, is_error = await self._run_command(decision.input)
        else:
            text, is_error = step.line.result, step.line.is_error
        ran = None if decision.decision == "deny" else input_digest(call.agent_tool, decision.input)
        await self._daemon.report("tool_result", ToolResult(call.call_id, text, is_error, ran))
        if decision.interrupt:
            reason = "interrupted" if decision.state == "withdrawn" else "denied"
            raise _EndedError(self._ended("stopped", reason, decision.message or "A denial stopped the turn."))

    async def _run_command(self, judged: dict[str, Any]) -> tuple[str, bool]:
        """Run the judged command; its group does not outlive the step. Output beyond the limit is left out.

        `isolation_unavailable` when the session has walls and they cannot be put up: it does not run then.
        """
        assert self._session is not None
        argv: Sequence[str] = ["/bin/sh", "-c", str(judged.get("command", ""))]
        said = bytearray()
        async with self._entered(argv, self.setup.environ()) as (argv, env, inherited):
            try:
                code = await run_command(
                    agent_first(argv),
                    lambda chunk: said.extend(chunk[: OUTPUT_LIMIT - len(said)]),
                    cwd=self._session.cwd,
                    env=env,
                    umask=self.setup.umask,
                    pass_fds=inherited,
                )
            except OSError as error:
                return f"The command could not be started: {error.strerror}.", True
        return said.decode(errors="replace"), code != 0

    @asynccontextmanager
    async def _entered(
        self, argv: Sequence[str], env: Mapping[str, str]
    ) -> AsyncIterator[tuple[Sequence[str], Mapping[str, str], tuple[int, ...]]]:
        """Give the command as it is to be started: inside the walls of the session, where it has any."""
        if self._enclosure is None or self._session is None:
            yield argv, env, ()
            return
        allowed = {name: value for name, value in env.items() if ALLOWED_ENVIRONMENT.fullmatch(name)}
        allowed |= {"HOME": self._session.home, "PWD": self._session.cwd}
        entered = await anyio.to_thread.run_sync(self._enclosure.enter, argv, allowed)
        try:
            yield entered.argv, entered.env, entered.descriptors
        except FileNotFoundError as error:  # taken away since
            raise HutchError(Reason.ISOLATION_UNAVAILABLE, f"The sandbox is gone: {error}") from error
        finally:
            entered.close()
