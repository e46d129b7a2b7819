"""The script runner: plays a file of JSON lines through the same ports as a real agent, for demonstrations and tests.

Turn k of the session plays part k of the script; turns after the last part play the last part again. Without a script
the prompt is the script if its first line is an object; any other prompt is answered with its own text. Each event
carries its line as the native message.

The script and the files that it waits for are read as the account. Its commands run in the session's sandbox, if there
is one, each with a /tmp and a home of its own.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any, ClassVar, Final, Literal

import anyio
import msgspec
from msgspec import UNSET

from hutch_executor.account.environment import ALLOWED_ENVIRONMENT
from hutch_executor.account.setup import Setup
from hutch_executor.runners.port import DaemonPort
from hutch_executor.runners.script_language import Line, Step, read_script, read_step
from hutch_executor.sandbox.command import SessionSandbox
from hutch_executor.sandbox.project_programs import run_in_project
from hutch_shared import messages as m
from hutch_shared.digest import input_digest
from hutch_shared.errors import HutchError, Reason
from hutch_shared.events import StderrText, Text, ToolCallSeen, ToolResult, TurnEnded
from hutch_shared.failpoints import failpoint
from hutch_shared.vocabulary import to_call, to_questions

__all__ = ["ScriptRunner"]

OUTPUT_LIMIT: Final = 24 << 20
_SCRIPT_LIMIT: Final = 64 << 20
_POLL_FILE: Final = 0.02
"""Seconds between looks for a file that the script waits for."""
_CLOSE_DEADLINE: Final = 5.0


class _EndedError(Exception):
    """Ends a turn before its last line."""

    def __init__(self, ended: TurnEnded) -> None:
        super().__init__()
        self.ended = ended


class ScriptRunner:
    """An `AgentRunner` that plays a script."""

    agent: ClassVar[str] = "script"
    abilities: ClassVar[tuple[str, ...]] = ()

    def __init__(self) -> None:
        """Make a runner without a script."""
        self._session: m.PrepareSession | None = None
        self._daemon: DaemonPort | None = None
        self._turns: list[list[Step]] | None = None
        self._scope: anyio.CancelScope | None = None
        self._finished = anyio.Event()
        self._calls = 0
        self._result: str | None = None
        self._sandbox: SessionSandbox | None = None
        self.setup = Setup()

    def __repr__(self) -> str:
        state = "not open" if self._session is None else "playing" if self._scope else "idle"
        return f"<ScriptRunner {state}>"

    @classmethod
    def preload(cls) -> None:
        """Do nothing: everything is imported."""

    async def open(self, session: m.PrepareSession, daemon: DaemonPort) -> m.Prepared:
        """Read the script, a path from the session's directory, and try the sandbox once."""
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
            self._sandbox = SessionSandbox(session, session.sandbox)
            tried = await anyio.to_thread.run_sync(self._sandbox.wrap, (), {})
            await tried.aclose()
        return m.Prepared(agent_session=session.resume or f"script-{session.session}", keys="none")

    async def run(self, prompt: m.ExecutePrompt) -> TurnEnded:
        """Play the turn's part of the script."""
        assert self._session is not None
        self._result = None
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
        """Stop playing, and kill the command that runs."""
        if self._scope is not None:
            self._scope.cancel()
            await self._finished.wait()

    async def set_mode(self, mode: m.PermissionMode) -> None:
        """Do nothing: hutchd decides what may run."""

    async def close(self) -> None:
        """Stop playing."""
        with anyio.move_on_after(_CLOSE_DEADLINE):
            await self.interrupt()
        if self._sandbox is not None:
            await anyio.to_thread.run_sync(self._sandbox.close)

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
            self._result = line.text
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
            awaited = anyio.Path(self._session.cwd, line.wait_file)
            while not await awaited.exists():  # noqa: ASYNC110  # another process makes it
                await anyio.sleep(_POLL_FILE)
        elif line.repeat is not UNSET:
            again = read_step(bytes(line.repeat.line), "The line to repeat")
            for _ in range(line.repeat.times):
                await self._play_step(again)
        elif line.end is not UNSET:
            raise _EndedError(self._ended(line.end.state, line.end.reason, line.end.message))
        elif line.exit is not UNSET:
            os._exit(line.exit)

    def _ended(self, state: Literal["completed", "failed", "stopped"], reason: str, message: str) -> TurnEnded:
        assert self._session is not None
        conversation = self._session.resume or f"script-{self._session.session}"
        return TurnEnded(state, reason, message, result=self._result, agent_session=conversation)

    # ------------------------------------------------------------ tools

    def _call(self, tool: str, tool_input: dict[str, Any]) -> m.ToolCall:
        assert self._session is not None
        self._calls += 1
        return to_call(
            tool,
            tool_input,
            f"call-{os.getpid()}-{self._calls}",
            self._session.cwd,
            servers=self._session.options.mcp_servers,
            with_diff=True,
        )

    async def _use(self, step: Step, call: m.ToolCall, kind: m.PermissionKind = "tool") -> None:
        """Report the call, request permission, and run the call if it is allowed."""
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
        """Run the judged command and return its output, cut at the limit, and whether it failed.

        Its process group does not outlive the step. `isolation_unavailable` if the session has a sandbox that cannot be
        made; the command does not run then.
        """
        assert self._session is not None
        argv: Sequence[str] = ["/bin/sh", "-c", str(judged.get("command", ""))]
        output = bytearray()
        env = self.setup.environ()
        if self._sandbox is not None:
            env = {name: value for name, value in env.items() if ALLOWED_ENVIRONMENT.fullmatch(name)}
            env |= {"HOME": self._session.home, "PWD": self._session.cwd}
        try:
            code = await run_in_project(
                self._sandbox,
                argv,
                lambda chunk: output.extend(chunk[: OUTPUT_LIMIT - len(output)]),
                cwd=self._session.cwd,
                env=env,
                read_only=False,  # it is a command of the agent
                umask=self.setup.umask,
            )
        except OSError as error:
            return f"The command could not be started: {error.strerror}.", True
        return output.decode(errors="replace"), code != 0
