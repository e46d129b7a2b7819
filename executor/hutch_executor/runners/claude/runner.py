"""Claude through claude-agent-sdk and its CLI: one CLI process for a session, a turn for each prompt.

How a tool call is kept under hutchd's rule: the PreToolUse hook answers every call with `ask`, in every mode, so that
each one reaches `may_use`. That asks hutchd and hands back the judged input, which alone runs. The PostToolUse hook
compares the digest of what ran with what was decided; another input, or a call that was never decided, ends the turn.
A hook that answered `allow` would not be the last word, and settings of the project are not loaded.

A turn ends with the CLI's `result`, or with the CLI. Everything that could keep both from coming has a bound in
`Bounds`; where one is reached the CLI is killed, and the next turn starts another that goes on with the conversation.
"""

from __future__ import annotations

import importlib
import logging
import shutil
import tempfile
import uuid
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Final

import anyio
import msgspec
from claude_agent_sdk import (
    ClaudeAgentOptions,
    ClaudeSDKClient,
    ClaudeSDKError,
    CLIConnectionError,
    HookMatcher,
    PermissionResultAllow,
    PermissionResultDeny,
    ToolPermissionContext,
)

from hutch_executor.account.setup import Setup
from hutch_executor.runners.claude import calls as claude_calls
from hutch_executor.runners.claude import launch as claude_launch
from hutch_executor.runners.claude.events import Meter, ModelUsage, Narrator, Result, ended, failure, total
from hutch_executor.runners.claude.process import Broken, ClaudeProcess, Skipped
from hutch_executor.runners.port import DaemonPort
from hutch_executor.sandbox.command import Enclosure, Entered
from hutch_shared import messages as m
from hutch_shared.digest import input_digest
from hutch_shared.errors import HutchError, Reason
from hutch_shared.events import Notice, StderrText, TurnEnded
from hutch_shared.vocabulary import to_call, to_questions

__all__ = ["Bounds", "ClaudeRunner"]

PROVIDER: Final = "anthropic"
_HOOK_TIMEOUT: Final = 7 * 24 * 3600.0
"""Seconds; far above any permission's expiry, since a hook that times out is a call that fails."""
_STDERR_LINES: Final = 20
_NOTHING_STARTS: Final = "The turn has ended; nothing is started any more."

# Whatever the SDK logs as an error also comes as an exception, and is dealt with here.
logging.getLogger("claude_agent_sdk").setLevel(logging.CRITICAL)


@dataclass(frozen=True, slots=True)
class Bounds:
    """How long anything may take, in seconds, and how often a model request is tried again."""

    connect: float = 60.0
    retries: int = 2
    stream_idle: float = 60.0
    """Silence of a model's stream after which the CLI itself gives the request up; it takes no less than 10."""
    model_silence: float = 180.0
    """Silence of the CLI while the model owes an answer: the CLI's own bounds have failed then."""
    probe_after: float = 20.0
    """Silence of the CLI after which it is asked whether it is alive …"""
    probe_answer: float = 20.0
    """… and how long it may take to answer."""
    interrupt: float = 5.0
    stop: float = 10.0
    """From the interrupt to the end of the turn; after it the CLI is killed."""
    close: float = 10.0

    @classmethod
    def of(cls, session: m.PrepareSession) -> Bounds:
        """Return those that follow from the session: its CLI is looked after as often as its stream may be silent."""
        idle = session.stream_idle
        probe = min(20.0, idle)
        return cls(
            retries=session.retries,
            stream_idle=idle,
            model_silence=2 * idle,
            probe_after=probe,
            probe_answer=probe,
        )


@dataclass(slots=True, eq=False)
class _Turn:
    """The running turn."""

    stop_asked: anyio.Event = field(default_factory=anyio.Event)
    asking: int = 0
    """Calls that wait for a decision."""
    places: dict[str, str] = field(default_factory=dict)
    """Where a call would run, by call: a sub-agent may have a working tree of its own."""
    decided: dict[str, str] = field(default_factory=dict)
    """Digest of the input that may run, by call."""
    cause: TurnEnded | None = None
    """Why the turn had to be ended from here; it outweighs what the CLI says."""

    @property
    def stopping(self) -> bool:
        return self.stop_asked.is_set()

    def give_up(self, reason: str, message: str) -> None:
        """End the turn as failed; the first cause stands."""
        self.cause = self.cause or TurnEnded("failed", reason, message)
        self.stop_asked.set()


@dataclass(slots=True, eq=False)
class _Link:
    """A connected CLI and how far its messages have been told."""

    client: ClaudeSDKClient
    process: ClaudeProcess
    narrator: Narrator
    meter: Meter
    ran: dict[str, str]
    entered: Entered | None
    told: int = 0
    stderr: deque[str] = field(default_factory=lambda: deque(maxlen=_STDERR_LINES))
    stderr_ended: anyio.Event = field(default_factory=anyio.Event)
    _progress: anyio.Event | None = None

    async def end(self) -> None:
        """End the CLI at once, and its way to the network."""
        await self.process.close(0)
        self.process.messages.close()
        if self.entered is not None:
            self.entered.close()

    def tell_progress(self) -> None:
        self.told += 1
        if self._progress is not None:
            self._progress.set()
            self._progress = None

    async def caught_up(self) -> None:
        """Wait until all that the CLI said before now is reported, so that a question follows what led to it."""
        goal = self.process.received
        while self.told < goal:
            self._progress = self._progress or anyio.Event()
            await self._progress.wait()


class ClaudeRunner:
    """Drives Claude for one session. `agent_session` is the CLI's own id of a conversation that can be resumed."""

    agent: ClassVar[str] = "claude"

    def __init__(self, bounds: Bounds | None = None, cli: str | None = None) -> None:
        """Make a runner that has done nothing yet; `cli` is a program to start in place of the SDK's own CLI."""
        self._given_bounds = bounds
        self._bounds: Bounds
        self._cli = cli
        self._link: _Link | None = None
        self._turn: _Turn | None = None
        self._conversation = ""
        self._begun = False
        """The CLI knows the conversation by its id …"""
        self._kept = False
        """… and has it on disk, so that it outlives the CLI."""
        self._spoiled = False
        """A turn was left before its end: the CLI cannot be used again."""
        self._enclosure: Enclosure | None = None
        self._scratch: str | None = None
        """Without walls, in place of the CLI's own folder in /tmp: anybody may have made that before."""
        self._closed = False
        self.setup = Setup()
        self._session: m.PrepareSession
        self._daemon: DaemonPort

    def __repr__(self) -> str:
        return f"<ClaudeRunner {self._conversation or 'not open'}, {self._link.process if self._link else 'no CLI'}>"

    @classmethod
    def preload(cls) -> None:
        """Import what the SDK imports late, on its first connection."""
        for module in ("query", "session_resume", "session_store_validation", "transport.subprocess_cli"):
            with suppress(ImportError):
                importlib.import_module(f"claude_agent_sdk._internal.{module}")

    # ---------------------------------------------------------------- opening

    async def open(self, session: m.PrepareSession, daemon: DaemonPort) -> m.Prepared:
        """Start the CLI. HutchError: no key, no CLI, or `not_found` for a conversation to resume that is unknown."""
        self._session, self._daemon = session, daemon
        self._bounds = self._given_bounds or Bounds.of(session)
        self._conversation = session.resume if session.resume and not session.fork else str(uuid.uuid4())
        self._begun = self._kept = session.resume == self._conversation
        if session.sandbox is not None:
            self._enclosure = Enclosure(session, session.sandbox)
        else:
            self._scratch = await anyio.to_thread.run_sync(partial(tempfile.mkdtemp, prefix="hutch-claude-"))
        grant = await self._connect()
        return m.Prepared(
            agent_session=self._conversation if self._kept else None,
            agent_version=await self._version(),
            keys="brokered" if grant.delivery == "lease" and (session.sandbox or session.apart) else "exposed",
        )

    def _words(self) -> tuple[str, ...]:
        """Say which conversation the CLI has to go on with."""
        if self._begun:
            return (f"--resume={self._conversation}",)
        words = (f"--session-id={self._conversation}",)
        return (f"--resume={self._session.resume}", "--fork-session", *words) if self._session.fork else words

    async def _connect(self) -> m.KeyGrant:
        session, bounds = self._session, self._bounds
        grant = await self._daemon.get_api_key(PROVIDER)
        text = await anyio.to_thread.run_sync(
            claude_launch.instructions, session.cwd, session.home, session.instructions
        )
        launch = claude_launch.build(
            session,
            grant,
            self._words(),
            text,
            cli=self._cli or claude_launch.bundled_cli(),
            retries=bounds.retries,
            stream_idle=bounds.stream_idle,
            environ=self.setup.environ(),
        )
        launch = replace(launch, umask=self.setup.umask)
        if self._scratch is not None:
            launch = replace(launch, env={**launch.env, "CLAUDE_CODE_TMPDIR": self._scratch})
        entered: Entered | None = None
        if self._enclosure is not None:
            launch, entered = await anyio.to_thread.run_sync(
                claude_launch.walled, launch, session, grant, self._enclosure
            )
        process = ClaudeProcess(launch)
        client = ClaudeSDKClient(self._options(), transport=process)
        ran: dict[str, str] = {}
        link = _Link(client, process, Narrator(session.cwd, ran), Meter({}), ran, entered)
        failure: Exception | None = None
        async with anyio.create_task_group() as group:
            group.start_soon(partial(self._read_stderr, link, tell=False))
            try:
                with anyio.fail_after(bounds.connect):
                    await client.connect()
                    if self._begun or session.fork:
                        link.meter = Meter(await self._sums(process))
            except Exception as error:  # noqa: BLE001 -- the SDK raises the bare Exception
                failure = error
                process.kill()
                with anyio.move_on_after(1):
                    await link.stderr_ended.wait()
            group.cancel_scope.cancel()
        if failure is not None:
            raise await self._refusal(link, failure) from failure
        self._link, self._spoiled = link, False
        if self._closed:
            await self._discard()
            raise HutchError(Reason.SHUTTING_DOWN)
        return grant

    def _options(self) -> ClaudeAgentOptions:
        return ClaudeAgentOptions(
            can_use_tool=self.may_use,
            hooks={
                "PreToolUse": [HookMatcher(hooks=[self.before_tool], timeout=_HOOK_TIMEOUT, on_failure="block")],
                "PostToolUse": [HookMatcher(hooks=[self.after_tool], timeout=_HOOK_TIMEOUT, on_failure="block")],
                "PostToolUseFailure": [HookMatcher(hooks=[self.after_tool], timeout=_HOOK_TIMEOUT)],
            },
        )

    async def _sums(self, process: ClaudeProcess) -> dict[str, ModelUsage] | None:
        """Ask what a conversation that goes on has used before: the CLI counts on from there."""
        with anyio.move_on_after(self._bounds.interrupt), suppress(ClaudeSDKError, msgspec.ValidationError):
            usage = (await process.ask("get_usage")).get("session", {}).get("model_usage")
            return msgspec.convert(usage, dict[str, ModelUsage])
        return None

    async def _version(self) -> str | None:
        info = await self._link.client.get_server_info() if self._link else None
        version = (info or {}).get("claude_code_version")
        return version if isinstance(version, str) else None

    async def _refusal(self, link: _Link, failure: Exception) -> HutchError:
        """Say why the CLI did not start, from the last that it wrote; `word` of the details is a turn's reason."""
        result: Result | None = None
        with suppress(anyio.EndOfStream, anyio.ClosedResourceError, anyio.WouldBlock, msgspec.DecodeError):
            while result is None:
                line = link.process.messages.receive_nowait()
                if isinstance(line, bytes):
                    link.narrator.tell(line)
                    result = link.narrator.result
        await link.end()
        if result is not None:
            end = ended(result, None)
            reason = Reason.NOT_FOUND if end.reason == "resume_unknown" else Reason.AGENT_UNAVAILABLE
            return HutchError(reason, end.message, word=end.reason)
        why = "\n".join(link.stderr) or ("it took too long" if isinstance(failure, TimeoutError) else str(failure))
        return HutchError(Reason.AGENT_UNAVAILABLE, f"Claude Code could not be started: {why}", word="agent_died")

    # ---------------------------------------------------------------- a turn

    async def run(self, prompt: m.ExecutePrompt) -> TurnEnded:
        """Play one turn; see the port. The CLI is started again when the last turn ended it."""
        turn = self._turn = _Turn()
        try:
            if self._spoiled or (self._link is not None and not self._link.process.is_ready()):
                await self._discard()
            try:
                link = self._link or await self._connect_again()
            except HutchError as error:
                return self._end(TurnEnded("failed", error.details.get("word", error.reason.word), error.message))
            if turn.stopping:
                return self._end(_STOPPED)
            self._spoiled = True
            end = await self._play(turn, link, prompt.prompt)
            if link.narrator.result is None:
                await self._discard()
            link.narrator.result = None
            self._spoiled = False
            return self._end(end)
        finally:
            self._turn = None
            if self._spoiled and self._link is not None:  # cancelled: nothing may go on without a turn
                self._link.process.kill()

    def _end(self, end: TurnEnded) -> TurnEnded:
        return msgspec.structs.replace(end, agent_session=self._conversation if self._kept else None)

    async def _connect_again(self) -> _Link:
        try:
            await self._connect()
        except HutchError as error:
            if not self._begun or error.details.get("word") != "resume_unknown":
                raise
            self._begun = False  # the CLI ended before it had written anything down
            await self._connect()
            message = "Claude Code had not written the conversation down; it begins anew."
            await self._daemon.report("notice", Notice("conversation_lost", message))
        assert self._link is not None
        return self._link

    async def _play(self, turn: _Turn, link: _Link, prompt: str) -> TurnEnded:
        await self._catch_up(link)
        async with anyio.create_task_group() as group:
            group.start_soon(partial(self._read_stderr, link, tell=True))
            group.start_soon(self._watch_stop, turn, link)
            group.start_soon(self._watch_silence, turn, link)
            group.start_soon(self._submit, link, prompt)
            end = await self._listen(turn, link)
            group.cancel_scope.cancel()
        return msgspec.structs.replace(turn.cause, usage=end.usage) if turn.cause else end

    async def _catch_up(self, link: _Link) -> None:
        """Report what the CLI said since the last turn; a result among it is not of the turn that begins."""
        with suppress(anyio.WouldBlock, anyio.EndOfStream):
            while True:
                await self._take(link, link.process.messages.receive_nowait())
                link.narrator.result = None

    async def _submit(self, link: _Link, prompt: str) -> None:
        with suppress(CLIConnectionError):  # the CLI has ended: the listener sees it
            await link.client.query(prompt)

    async def _listen(self, turn: _Turn, link: _Link) -> TurnEnded:
        """Report what the CLI says until it says how the turn ended, or ends itself."""
        while True:
            try:
                line = await link.process.next_message()
            except anyio.EndOfStream:
                return await self._died(turn, link)
            if isinstance(line, Broken):
                link.process.kill()
                return TurnEnded("failed", "agent_broken", f"Claude Code wrote what is no message: {line.detail}")
            await self._take(link, line)
            if link.narrator.result is not None:
                return await self._conclude(link, link.narrator.result, line)

    async def _take(self, link: _Link, line: bytes | Skipped | Broken) -> None:
        """Report one message; the native line goes with the first of its events."""
        native: bytes | None = None
        if isinstance(line, bytes):
            native = line
            try:
                told = link.narrator.tell(line)
            except msgspec.DecodeError as error:
                told = [("notice", Notice("agent_note", f"Claude Code sent a message of an unknown shape: {error}"))]
        else:
            message = f"A message of Claude Code was left out: {line}."
            told = [("notice", Notice("message_too_large", message))]
        for kind, data in told:
            await self._daemon.report(kind, data, native)
            native = None
        link.tell_progress()
        if link.narrator.session is not None:
            self._conversation, self._begun = link.narrator.session, True
            self._kept |= link.narrator.spoke

    async def _conclude(self, link: _Link, result: Result, line: bytes | Skipped) -> TurnEnded:
        native = line if isinstance(line, bytes) else None
        used = link.meter.turn(result.model_usage)
        for usage in used:
            await self._daemon.report("usage", usage, native)
            native = None
        end = ended(result, total(used))
        if native is not None:
            await self._daemon.report("notice", Notice("agent_result", end.message), native)
        return end

    async def _died(self, turn: _Turn, link: _Link) -> TurnEnded:
        with anyio.move_on_after(1):
            await link.stderr_ended.wait()
        code = await link.process.exit_code()
        if turn.stopping:
            return _STOPPED
        if code is not None and code > 128 and self._session.sandbox is not None:
            code = 128 - code  # so bubblewrap tells of a signal
        if not code:
            return TurnEnded("failed", "no_result", "Claude Code ended without saying how the turn ended.")
        how = f"with exit code {code}" if code > 0 else f"by signal {-code}"
        last = f" It said: {link.stderr[-1]}" if link.stderr else ""
        return TurnEnded("failed", "agent_died", f"Claude Code was ended in mid-turn {how}.{last}")

    async def _read_stderr(self, link: _Link, *, tell: bool) -> None:
        while (text := await link.process.stderr()) is not None:
            link.stderr.extend(text.splitlines())
            if tell and text.strip():
                await self._daemon.report("stderr", StderrText(text))
        link.stderr_ended.set()

    # ---------------------------------------------------------------- bounds

    async def _watch_stop(self, turn: _Turn, link: _Link) -> None:
        await turn.stop_asked.wait()
        await anyio.sleep(self._bounds.stop)
        link.process.kill()

    async def _watch_silence(self, turn: _Turn, link: _Link) -> None:
        """Give the turn up when the CLI does not answer, or has long been waiting for its model.

        A tool that runs long and a question that waits long are silent too: a CLI that answers is not stuck.
        """
        bounds, process = self._bounds, link.process
        since, received = anyio.current_time(), process.received
        while True:
            lines = process.lines
            await anyio.sleep(bounds.probe_after)
            if process.received != received or process.blocked or turn.asking or not link.narrator.awaits_model:
                since, received = anyio.current_time(), process.received
            if process.lines != lines or process.blocked:
                continue
            with anyio.move_on_after(bounds.probe_answer) as answer, suppress(ClaudeSDKError):
                await process.ask("mcp_status")
            if answer.cancelled_caught and not process.blocked:
                turn.give_up("agent_stuck", "Claude Code did not answer any more and was ended.")
            elif anyio.current_time() - since > bounds.model_silence:
                turn.give_up(*failure(link.narrator.awaited()))
            if turn.cause is not None:
                process.kill()
                return

    async def interrupt(self) -> None:
        """Stop the turn; see the port. A CLI that does not acknowledge is killed before this returns."""
        if (turn := self._turn) is None:
            return
        turn.stop_asked.set()
        if (link := self._link) is None:
            return
        with anyio.move_on_after(self._bounds.interrupt, shield=True), suppress(ClaudeSDKError):
            await link.process.ask("interrupt")
            return
        link.process.kill()

    async def set_mode(self, mode: m.PermissionMode) -> None:
        """Tell the CLI whether to plan. What may run is hutchd's to say, so that a CLI that fails here is no danger."""
        self._session = msgspec.structs.replace(self._session, permission_mode=mode)
        if self._link is not None:
            with anyio.move_on_after(self._bounds.interrupt), suppress(ClaudeSDKError):
                await self._link.process.ask("set_permission_mode", mode=claude_launch.cli_mode(mode))

    async def close(self) -> None:
        """End the CLI and what it started, within the bound."""
        self._closed = True
        if self._turn is not None:
            self._turn.stop_asked.set()
        await self._discard()
        if self._enclosure is not None:
            await anyio.to_thread.run_sync(self._enclosure.close)
        if self._scratch is not None:
            await anyio.to_thread.run_sync(partial(shutil.rmtree, self._scratch, ignore_errors=True))

    async def _discard(self) -> None:
        link, self._link, self._spoiled = self._link, None, False
        if link is None:
            return
        with anyio.CancelScope(shield=True):
            with anyio.move_on_after(self._bounds.close), suppress(ClaudeSDKError):
                await link.client.disconnect()
            await link.end()

    # ---------------------------------------------------------------- the SDK's questions

    async def before_tool(self, given: Any, call_id: str | None, _context: Any) -> Any:
        """PreToolUse: send every call to `may_use`, whatever the CLI would think of it."""
        turn = self._turn
        starts = turn is not None and not turn.stopping
        if turn is not None and isinstance(place := given.get("cwd"), str):
            turn.places[call_id or ""] = place
        return {
            "hookSpecificOutput": {
                "hookEventName": "PreToolUse",
                "permissionDecision": "ask" if starts else "deny",
                "permissionDecisionReason": "Hutch decides." if starts else _NOTHING_STARTS,
            }
        }

    async def may_use(
        self, tool: str, tool_input: dict[str, Any], context: ToolPermissionContext
    ) -> PermissionResultAllow | PermissionResultDeny:
        """Ask hutchd about one call and hand back the judged input, which alone may run."""
        turn, link = self._turn, self._link
        if turn is None or link is None or turn.stopping:
            return PermissionResultDeny(message=_NOTHING_STARTS, interrupt=True)
        call_id = context.tool_use_id or ""
        cwd = turn.places.pop(call_id, self._session.cwd)
        call = to_call(tool, tool_input, call_id, cwd, with_diff=True)
        kind = claude_calls.kind_of(tool)
        turn.asking += 1
        try:
            await link.caught_up()
            decision = await self._daemon.request_permission(
                kind,
                call,
                cwd=cwd,
                questions=to_questions(tool_input) if kind == "question" else (),
                plan=claude_calls.plan_of(tool_input) if kind == "plan" else None,
            )
        finally:
            turn.asking -= 1
        judged = claude_calls.judged_input(tool, decision)
        if turn.stopping or judged is None:
            message = decision.message or ("Nobody answered." if kind == "question" else "This was not allowed.")
            return PermissionResultDeny(message=message, interrupt=decision.interrupt or turn.stopping)
        turn.decided[call_id] = input_digest(tool, judged)
        return PermissionResultAllow(updated_input=judged)

    async def after_tool(self, given: Any, call_id: str | None, _context: Any) -> Any:
        """PostToolUse: what ran must be what was decided. A plan is no input that runs: the CLI takes it out again."""
        turn, link, tool = self._turn, self._link, str(given.get("tool_name"))
        ran = input_digest(tool, given.get("tool_input") or {})
        decided = turn.decided.pop(call_id or "", None) if turn else None
        if turn is None or link is None:
            return {"continue_": False, "stopReason": _NOTHING_STARTS}
        link.ran[call_id or ""] = ran
        if decided == ran or (decided is not None and tool == claude_calls.PLAN_TOOL):
            return {}
        word, message = (
            ("unasked_tool", f"Claude Code ran {tool} without asking.")
            if decided is None
            else ("input_mismatch", f"Claude Code ran {tool} with another input than was decided.")
        )
        turn.give_up(word, f"{message} The turn was stopped.")
        details = {"call_id": call_id, "tool": tool, "ran": ran, "decided": decided}
        await self._daemon.report("notice", Notice(word, message, details))
        return {"continue_": False, "stopReason": message}


_STOPPED: Final = TurnEnded("stopped", "interrupted", "The turn was stopped.")
