"""Claude Code through claude-agent-sdk and its CLI: one CLI process for a session, one turn for each prompt.

`hooks` keeps every tool call under hutchd's decision. A turn ends when the CLI writes its `result` line or ends.
`ClaudeTimeouts` limits everything that could prevent both: when a limit is reached, the CLI is killed, and the next
turn starts another CLI that resumes the conversation.
"""

from __future__ import annotations

import importlib
import logging
import uuid
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import ClassVar, Final

import anyio
import msgspec
from claude_agent_sdk import ClaudeSDKClient, ClaudeSDKError, CLIConnectionError

from hutch_executor.account import agent_dir
from hutch_executor.account.setup import Setup
from hutch_executor.account.space import free_space
from hutch_executor.runners.claude import launch as claude_launch
from hutch_executor.runners.claude import message_socket
from hutch_executor.runners.claude.broker_directory import LOST, BrokerDirectory
from hutch_executor.runners.claude.config_dir import ConfigDirectory, unknown_conversation
from hutch_executor.runners.claude.connection import ClaudeConnection
from hutch_executor.runners.claude.events import EventTranslator
from hutch_executor.runners.claude.hooks import PermissionHooks
from hutch_executor.runners.claude.instructions import InstructionSet, read_instructions
from hutch_executor.runners.claude.lines import ModelUsage, ResultLine, UsageResponse
from hutch_executor.runners.claude.process import BrokenOutput, ClaudeProcess, SkippedMessage
from hutch_executor.runners.claude.prompt import compact_line, prompt_line, prompt_uuid
from hutch_executor.runners.claude.transcripts import keeps_turn, lacks_prompt
from hutch_executor.runners.claude.turn import (
    ALREADY_ACCEPTED,
    CLEARED,
    NOTHING_TO_COMPACT,
    STOPPED,
    ClaudeTimeouts,
    ClaudeTurn,
)
from hutch_executor.runners.claude.turn_end import compacted, ended, failure
from hutch_executor.runners.claude.unknown import UnknownLines
from hutch_executor.runners.claude.usage import USAGE_UNKNOWN, UsageMeter, total
from hutch_executor.runners.port import DaemonPort
from hutch_executor.sandbox.command import SandboxedCommand, SessionSandbox
from hutch_executor.sandbox.probe import was_replaced
from hutch_shared import messages as m
from hutch_shared.agents import provider_of
from hutch_shared.backoff import Backoff
from hutch_shared.errors import HutchError, Reason
from hutch_shared.events import Notice, StderrText, TurnEnded
from hutch_shared.tree import UnfitFileError

__all__ = ["ClaudeRunner"]

_MODE_CHANGES: Final = 20

# The SDK raises every error that it logs, and the runner handles the exception.
logging.getLogger("claude_agent_sdk").setLevel(logging.CRITICAL)


_SUMMARY_DEADLINE: Final = 1.0
_STARTS: Final = 4
"""How often a CLI is started whose sandbox fails since a file was replaced meanwhile, as when an account is added."""
_LOST_BROKER: Final = (
    "The agent could not reach its model any more: the directory of the broker's socket was removed and made again. The"
    " next prompt goes on from the conversation."
)
_STORE_PAUSES: Final = (0.01, 0.05)
"""The shortest and the longest pause, in seconds, before another look at whether the CLI has stored the turn."""


class ClaudeRunner:
    """Drives Claude Code for one session. `agent_session` is the CLI's own id of a conversation that can be resumed."""

    agent: ClassVar[str] = "claude"
    abilities: ClassVar[tuple[str, ...]] = ("compact", "clear", "offered", "agent_dir", "recap")

    def __init__(self, timeouts: ClaudeTimeouts | None = None, cli: str | None = None) -> None:
        """Make a runner; do nothing yet. `cli` is a program to start instead of the SDK's own CLI."""
        self.setup = Setup()
        self.turn: ClaudeTurn | None = None
        self.connection: ClaudeConnection | None = None
        self._given_timeouts = timeouts
        self._timeouts: ClaudeTimeouts
        self._cli = cli
        self._conversation = ""
        self._conversed = False
        """Whether a turn of this executor has used the conversation."""
        self._begun = False
        """Whether the CLI knows the conversation by its id."""
        self._stored = False
        """Whether the CLI has stored the conversation on disk, so that it outlives the CLI."""
        self._instructions = InstructionSet()
        """The instruction files as they were when the session was opened here."""
        self._lost = False
        """Whether the conversation to resume was gone, which no turn has reported yet."""
        self._recap: str | None = None
        """What the next prompt must begin with, since the conversation is new; None once it was stored with a turn."""
        self._spoiled = False
        """Whether a turn was cancelled before its end: then the CLI cannot be used again."""
        self._sandbox: SessionSandbox | None = None
        self._scratch: str | None = None
        """The CLI's temporary folder if it has no sandbox: its usual one in /tmp may belong to another account, and no
        one removes it after an executor was killed."""
        self._closed = False
        self._unknown = UnknownLines()
        self._session: m.PrepareSession
        self._config: ConfigDirectory
        self._daemon: DaemonPort
        self._hooks: PermissionHooks

    def __repr__(self) -> str:
        cli = self.connection.process if self.connection else "no CLI"
        return f"<ClaudeRunner {self._conversation or 'not open'}, {cli}>"

    @classmethod
    def preload(cls) -> None:
        """Import the modules that the SDK imports late, on its first connection."""
        for module in ("query", "session_resume", "session_store_validation", "transport.subprocess_cli"):
            with suppress(ImportError):
                importlib.import_module(f"claude_agent_sdk._internal.{module}")

    # ---------------------------------------------------------------- opening

    async def open(self, session: m.PrepareSession, daemon: DaemonPort) -> m.Prepared:
        """Start the CLI. HutchError: no key, no CLI, or `not_found` if the conversation that the user named is unknown.

        A conversation of an earlier executor that is gone is replaced by a new one.
        """
        self._session, self._daemon = session, daemon
        self._hooks = PermissionHooks(self, daemon, session.cwd, session.options.mcp_servers)
        self._timeouts = self._given_timeouts or ClaudeTimeouts.of(session)
        self._instructions = await self._read_instructions()
        self._config = ConfigDirectory(session)
        await anyio.to_thread.run_sync(agent_dir.make, self._config.path)
        if session.sandbox is not None:
            self._sandbox = SessionSandbox(session, session.sandbox)
        else:
            self._scratch = await anyio.to_thread.run_sync(agent_dir.make_scratch, self._config.path)
        noted = None
        self._recap = session.recap
        if session.recap is not None:
            session = self._session = msgspec.structs.replace(session, resume=None, fork=False)
        elif session.resume is None or session.fork:  # an earlier executor may have died in its first turn
            noted = await anyio.to_thread.run_sync(self._config.noted)
            if noted is not None:
                session = self._session = msgspec.structs.replace(session, resume=noted, fork=False)
        self._conversation = session.resume if session.resume and not session.fork else str(uuid.uuid4())
        self._begun = self._stored = session.resume == self._conversation
        if session.resume is not None and noted is None:
            found = await anyio.to_thread.run_sync(self._config.carry_over, session.resume, session.resume_from)
            if not found:
                self._begin_new(unknown_conversation())
        grant = await self._connect_or_begin_new()
        return m.Prepared(
            instructions=self._instructions.record(),
            agent_session=self._conversation if self._stored else None,
            agent_version=await self._version(),
            keys="brokered" if grant.delivery == "lease" and (session.sandbox or session.apart) else "exposed",
        )

    async def _read_instructions(self) -> InstructionSet:
        """Read the instruction files, without those that a rule denies. If hutchd cannot say, nothing is imported."""
        session = self._session
        hidden = session.sandbox.hide if session.sandbox is not None else ()
        read = partial(read_instructions, session.cwd, session.home, session.instructions, hidden)
        found = await anyio.to_thread.run_sync(read)
        if not found.given:
            return found
        try:
            return found.without(await self._daemon.judge_reads(found.named(), found.imported()))
        except HutchError as error:
            return found.without(dict.fromkeys(found.imported(), f"hutchd could not judge it: {error.message}"))

    async def _connect_or_begin_new(self, *, commands: bool = False) -> m.KeyGrant:
        """Connect the CLI. If it does not know the conversation, let it begin a new one."""
        try:
            return await self._connect(commands=commands)
        except HutchError as error:
            if error.details.get("word") != "resume_unknown" or not (self._begun or self._session.fork):
                raise
            self._begin_new(error)
            return await self._connect(commands=commands)

    def _begin_new(self, why: HutchError) -> None:
        """Give the lost conversation up, which the next turn reports. Raises `why` if the user named it."""
        if self._session.resume_named and not self._conversed:
            raise why
        if self._begun or self._session.fork:
            self._conversation = str(uuid.uuid4())
        self._session = msgspec.structs.replace(self._session, resume=None, fork=False)
        self._begun = self._stored = False
        self._lost = True

    def _conversation_arguments(self) -> tuple[str, ...]:
        """Return the CLI's arguments that name the conversation to start, resume or fork."""
        if self._begun:
            return (f"--resume={self._conversation}",)
        name = f"--session-id={self._conversation}"
        return (f"--resume={self._session.resume}", "--fork-session", name) if self._session.fork else (name,)

    async def _connect(self, *, commands: bool = False) -> m.KeyGrant:
        """Start a CLI; again if its sandbox failed since a file was replaced while it was being hidden."""
        for left in reversed(range(_STARTS)):
            try:
                return await self._start(commands=commands)
            except HutchError as error:
                # `isolation_unavailable`: the sandbox itself was tried again already.
                if not left or error.reason is not Reason.AGENT_UNAVAILABLE or not was_replaced(error.message):
                    raise
        raise AssertionError

    async def _start(self, *, commands: bool) -> m.KeyGrant:
        """Start a CLI; with `commands` one that knows its built-in commands."""
        session, timeouts, provider = self._session, self._timeouts, provider_of(self.agent)
        assert provider is not None
        grant = await self._daemon.get_api_key(provider)
        launch = claude_launch.build(
            session,
            grant,
            self._conversation_arguments(),
            self._instructions.text(),
            cli=self._cli or claude_launch.bundled_cli(),
            config=self._config.path,
            retries=timeouts.retries,
            stream_idle=timeouts.stream_idle,
            environ=self.setup.environ(),
            commands=commands,
        )
        launch = replace(launch, umask=self.setup.umask)
        if self._scratch is not None:
            launch = replace(launch, env={**launch.env, "CLAUDE_CODE_TMPDIR": self._scratch})
        await anyio.to_thread.run_sync(self._config.forget_settings)
        command: SandboxedCommand | None = None
        broker = None
        if self._sandbox is not None:
            broker = await BrokerDirectory.wait(grant.unix_socket) if grant.unix_socket else None
            launch, command = await anyio.to_thread.run_sync(
                claude_launch.sandboxed, launch, session, grant, self._sandbox
            )
        process = ClaudeProcess(launch)
        client = ClaudeSDKClient(self._hooks.options(commands=commands), transport=process)
        ran: dict[str, str] = {}
        translator = EventTranslator(session.cwd, ran, session.options.mcp_servers, self._unknown)
        link = ClaudeConnection(client, process, translator, UsageMeter({}), ran, command, broker)
        link.mode, link.knows_commands = claude_launch.cli_mode(session.permission_mode), commands
        failure: Exception | None = None
        async with anyio.create_task_group() as group:
            group.start_soon(link.read_stderr)
            try:
                with anyio.fail_after(timeouts.connect):
                    await client.connect()
                    if self._begun or session.fork:
                        link.meter = UsageMeter(await self._earlier_usage(process))
            except Exception as error:  # noqa: BLE001 -- the SDK raises the bare Exception
                failure = error
                process.kill()
                with anyio.move_on_after(1):
                    await link.stderr_ended.wait()
            group.cancel_scope.cancel()
        if failure is not None:
            raise await link.start_error(failure) from failure
        self.connection, self._spoiled = link, False
        if self._closed:
            await self._discard()
            raise HutchError(Reason.SHUTTING_DOWN)
        return grant

    async def _earlier_usage(self, process: ClaudeProcess) -> dict[str, ModelUsage] | None:
        """Return the earlier usage of a resumed conversation, since the CLI's sums include it."""
        with anyio.move_on_after(self._timeouts.interrupt), suppress(ClaudeSDKError, msgspec.ValidationError):
            return msgspec.convert(await process.control("get_usage"), UsageResponse).session.model_usage
        return None

    async def _version(self) -> str | None:
        info = await self.connection.client.get_server_info() if self.connection else None
        version = (info or {}).get("claude_code_version")
        return version if isinstance(version, str) else None

    # ---------------------------------------------------------------- a turn

    async def run(self, prompt: m.ExecutePrompt) -> TurnEnded:
        """Play one turn; see the port. Starts the CLI again if the last turn ended it.

        A turn that compacts gets a CLI of its own, which knows its commands and goes on from the stored conversation.
        """
        turn = self.turn = ClaudeTurn(prompt_uuid(prompt.turn), expects_model=prompt.kind == "prompt")
        compacts = prompt.kind == "compact"
        try:
            if prompt.kind == "clear":
                return await self._clear()
            if prompt.offered and not await self._never_got(turn.uuid):
                return self._end(ALREADY_ACCEPTED)
            if compacts and not (self._stored or self._session.fork):
                return self._end(NOTHING_TO_COMPACT)
            if self._spoiled or (self.connection is not None and not self._is_usable(self.connection, compacts)):
                await self._discard()
            try:
                link = self.connection or await self._connect_again(commands=compacts)
            except HutchError as error:
                return self._end(TurnEnded("failed", error.details.get("word", error.reason.word), error.message))
            if turn.stopping:
                return self._end(STOPPED)
            self._spoiled = True
            if compacts:
                line = compact_line(prompt.prompt, prompt.turn)
            else:
                line = prompt_line(prompt.prompt, prompt.turn, self._recap)
            end = await self._play(turn, link, line)
            if compacts:
                end = self._compacted(turn, link, end)
            if end.state == "failed" and link.lost_broker:
                end = msgspec.structs.replace(end, reason=LOST, message=_LOST_BROKER)
            if self._is_usage_unknown(turn, link, end):
                await self._daemon.report("notice", USAGE_UNKNOWN)
            if link.translator.result is None or compacts:
                await self._discard()
            self._spoiled = False
            if link.translator.result is not None and link.translator.asked and not compacts:
                return await self._kept(turn, link, end)
            return self._end(end)
        finally:
            self.turn = None
            if self._spoiled and self.connection is not None:  # cancelled: the agent must not go on without a turn
                self.connection.process.kill()

    async def _kept(self, turn: ClaudeTurn, link: ClaudeConnection, end: TurnEnded) -> TurnEnded:
        """Return the end of a turn that asked the model, which says so if the CLI has not stored the turn.

        The CLI itself reports success then. It stores a turn a moment after it has reported it.
        """
        answered = end.state == "completed" and link.translator.spoke
        look = partial(keeps_turn, self._config.path, self._conversation, turn.uuid, answered=answered)
        deadline, backoff = anyio.current_time() + self._timeouts.store, Backoff(*_STORE_PAUSES)
        while anyio.current_time() < deadline:
            if await anyio.to_thread.run_sync(look):
                self._recap = None
                return self._end(end)
            await anyio.sleep(backoff.next())
        free = await anyio.to_thread.run_sync(free_space, self._config.path)
        words = (
            f"Claude Code did not store the conversation in {self._config.path}{free}. The next prompt begins a new"
            " one, with a recap of what Hutch recorded."
        )
        await self._daemon.report("notice", Notice("conversation_not_kept", words))
        return msgspec.structs.replace(
            end, message=f"{end.message} {words}", agent_session=None, conversation_kept=False
        )

    @staticmethod
    def _is_usable(link: ClaudeConnection, compacts: bool) -> bool:
        return link.process.is_ready() and link.knows_commands == compacts and not link.lost_broker

    async def _never_got(self, uuid: str) -> bool:
        """Return whether the agent's transcripts show that it never got the prompt."""
        return await anyio.to_thread.run_sync(lacks_prompt, self._config.path, uuid)

    async def _clear(self) -> TurnEnded:
        """Begin an empty conversation, with a CLI and an id of its own."""
        await self._discard()
        try:
            await anyio.to_thread.run_sync(self._config.note, None)
        except (OSError, UnfitFileError) as error:
            why = f"The conversation was not cleared: its note in {self._config.path} cannot be removed ({error})."
            return self._end(TurnEnded("failed", "agent_unavailable", why))
        self._session = msgspec.structs.replace(self._session, resume=None, fork=False)
        self._conversation = str(uuid.uuid4())
        self._begun = self._stored = self._lost = False
        self._recap = None
        return CLEARED

    def _compacted(self, turn: ClaudeTurn, link: ClaudeConnection, end: TurnEnded) -> TurnEnded:
        if turn.stopping and turn.cause is None:
            return msgspec.structs.replace(STOPPED, usage=end.usage)
        end = compacted(end, link.translator.compact_error)
        if end.state == "completed":
            self._begun = self._stored = True
        return end

    @staticmethod
    def _is_usage_unknown(turn: ClaudeTurn, link: ClaudeConnection, end: TurnEnded) -> bool:
        """Return whether the turn may have used more than the CLI counted, or the CLI's count cannot be read."""
        translator = link.translator
        if translator.summary_lost and (turn.expects_model or end.usage is None):
            return True
        used = translator.result is not None or translator.asked or not turn.expects_model
        return used and not turn.is_counted

    def _end(self, end: TurnEnded) -> TurnEnded:
        return msgspec.structs.replace(end, agent_session=self._conversation if self._stored else None)

    async def _connect_again(self, *, commands: bool = False) -> ClaudeConnection:
        await self._connect_or_begin_new(commands=commands)
        assert self.connection is not None
        return self.connection

    async def _play(self, turn: ClaudeTurn, link: ClaudeConnection, line: str) -> TurnEnded:
        self._conversed = True
        if not self._stored:
            with suppress(OSError, UnfitFileError):  # it only matters if this executor dies in the turn
                await anyio.to_thread.run_sync(self._config.note, self._conversation)
        await self._report_lost()
        await self._report_earlier(link)
        link.translator.begin_turn()
        async with anyio.create_task_group() as group:
            group.start_soon(link.read_stderr, self._report_stderr)
            group.start_soon(self._watch_stop, turn, link)
            group.start_soon(self._watch_silence, turn, link)
            group.start_soon(self._keep_mode, link)
            group.start_soon(self._submit, link, line)
            end = await self._listen(turn, link)
            group.cancel_scope.cancel()
        return msgspec.structs.replace(turn.cause, usage=end.usage) if turn.cause else end

    async def _report_earlier(self, link: ClaudeConnection) -> None:
        """Report the messages since the last turn. A result among them does not belong to the new turn."""
        with suppress(anyio.WouldBlock, anyio.EndOfStream):
            while True:
                await self._take(link, link.process.messages.receive_nowait())

    async def _report_lost(self) -> None:
        """Report once that a new conversation begins in place of the lost one."""
        if self._lost:
            self._lost = False
            message = "The earlier conversation is not stored any more; a new one begins."
            await self._daemon.report("notice", Notice("conversation_lost", message))

    async def _submit(self, link: ClaudeConnection, line: str) -> None:
        with suppress(CLIConnectionError):  # the CLI has ended: `_listen` finds out
            await link.process.write(line)

    async def _report_stderr(self, text: str) -> None:
        await self._daemon.report("stderr", StderrText(text))

    async def _listen(self, turn: ClaudeTurn, link: ClaudeConnection) -> TurnEnded:
        """Report the CLI's messages until the CLI reports the turn's end, or ends."""
        while True:
            try:
                line = await link.process.next_message()
            except anyio.EndOfStream:
                return await self._died(turn, link)
            if isinstance(line, BrokenOutput):
                link.process.kill()
                message = f"Claude Code does not write messages any more: {line.detail}."
                return TurnEnded("failed", "agent_broken", message)
            await self._take(link, line)
            if link.translator.message_socket is not None:
                await self.end_for_message_socket(turn, link, link.translator.message_socket)
            if link.translator.dropped_prompt == turn.uuid:
                return ALREADY_ACCEPTED
            if link.translator.result is not None:
                return await self._conclude(turn, link, link.translator.result, line)

    async def _take(self, link: ClaudeConnection, line: bytes | SkippedMessage | BrokenOutput) -> None:
        """Report one message; the native line goes with the first of its events."""
        native = line if isinstance(line, bytes) else None
        mode = link.translator.mode
        for kind, data in link.translate(line):
            await self._daemon.report(kind, data, native)
            native = None
        link.note_reported()
        if link.translator.mode != mode:
            link.mode_reported.notify()
        if link.translator.session is not None:
            self._conversation, self._begun = link.translator.session, True
            self._stored |= link.translator.spoke

    async def end_for_message_socket(self, turn: ClaudeTurn, connection: ClaudeConnection, place: str) -> None:
        """End the turn, since the CLI takes messages from other processes at `place`: it runs nothing."""
        if turn.cause is None:
            notice = message_socket.notice_of(place)
            turn.give_up(notice.word, notice.message)
            await self._daemon.report("notice", notice)
        connection.process.kill()

    async def _conclude(
        self, turn: ClaudeTurn, link: ClaudeConnection, result: ResultLine, line: bytes | SkippedMessage
    ) -> TurnEnded:
        native = line if isinstance(line, bytes) else None
        asked = link.translator.asked or not turn.expects_model
        used = link.meter.turn(result, asked=asked)
        turn.is_counted = used is not None
        for usage in used or ():
            await self._daemon.report("usage", usage, native)
            native = None
        end = ended(result, total(used or []), asked=asked)
        if native is not None:
            await self._daemon.report("notice", Notice("agent_result", end.message), native)
        return end

    async def _died(self, turn: ClaudeTurn, link: ClaudeConnection) -> TurnEnded:
        with anyio.move_on_after(1):
            await link.stderr_ended.wait()
        code = await link.process.exit_code()
        if turn.stopping:
            return STOPPED
        sandbox = self._session.sandbox
        if code is not None and code > 128 and sandbox is not None and sandbox.kind == "bubblewrap":
            code = 128 - code  # bubblewrap reports a signal this way
        if not code:
            return TurnEnded("failed", "no_result", "Claude Code ended without saying how the turn ended.")
        how = f"with exit code {code}" if code > 0 else f"by signal {-code}"
        last = f" It said: {link.stderr[-1]}" if link.stderr else ""
        return TurnEnded("failed", "agent_died", f"Claude Code was ended in mid-turn {how}.{last}")

    # ---------------------------------------------------------------- timeouts

    async def _watch_stop(self, turn: ClaudeTurn, link: ClaudeConnection) -> None:
        await turn.stop_requested.wait()
        await anyio.sleep(self._timeouts.stop)
        link.process.kill()

    async def _watch_silence(self, turn: ClaudeTurn, link: ClaudeConnection) -> None:
        """Give the turn up if the CLI does not respond to a probe, or has been silent for too long without a reason.

        A model request is a reason for `model_silence`: the CLI's own limits end it earlier. A tool call without a
        result, a permission request and the shortening of the conversation are reasons without a limit. Without any
        reason the CLI would have gone on: after `turn_silence` the line that ends the turn is lost.
        """
        timeouts, process, translator = self._timeouts, link.process, link.translator
        since, received = anyio.current_time(), process.received
        while True:
            lines = process.lines
            await anyio.sleep(min(timeouts.probe_after, timeouts.turn_silence))
            behind = link.reported < process.received  # hutchd is away and the spool is full: we are the silent ones
            waits = behind or turn.undecided or (translator.in_flight and not translator.awaits_model)
            if process.received != received or process.blocked or waits:
                since, received = anyio.current_time(), process.received
            if process.lines != lines or process.blocked:
                continue
            with anyio.move_on_after(timeouts.probe_answer) as answer, suppress(ClaudeSDKError):
                await process.control("mcp_status")
            silence = anyio.current_time() - since
            if answer.cancelled_caught and not process.blocked:
                turn.give_up("agent_stuck", "Claude Code did not respond any more and was ended.")
            elif translator.awaits_model and silence > timeouts.model_silence:
                turn.give_up(*failure(translator.awaited()))
            elif not translator.in_flight and silence > timeouts.turn_silence:
                message = f"Claude Code was silent for {silence:.0f} s although nothing was under way, and was ended."
                turn.give_up("agent_silent", message)
            if turn.cause is not None:
                process.kill()
                return

    async def _keep_mode(self, link: ClaudeConnection) -> None:
        """Set the CLI's mode back if it is not the session's, at most `_MODE_CHANGES` times in a turn.

        hutchd judges calls by the session's mode. An agent that believes that it is in another one would act wrongly.
        """
        for _ in range(_MODE_CHANGES):
            await link.mode_reported.wait()
            if link.translator.mode in (None, link.mode):
                continue
            message = f"Claude Code changed its mode to {link.translator.mode!r}; it was set back to {link.mode!r}."
            await self._daemon.report("notice", Notice("agent_mode", message))
            await self._send_mode(link)

    async def _send_mode(self, link: ClaudeConnection) -> None:
        """Set the CLI's mode. A failure is harmless, since hutchd decides what may run."""
        with anyio.move_on_after(self._timeouts.interrupt), suppress(ClaudeSDKError):
            await link.process.control("set_permission_mode", mode=link.mode)

    def expect_mode(self, mode: m.PermissionMode) -> None:
        """Take the mode into which the CLI changes by itself, since its call was allowed."""
        self._session = msgspec.structs.replace(self._session, permission_mode=mode)
        if self.connection is not None:
            self.connection.mode = claude_launch.cli_mode(mode)

    async def interrupt(self) -> None:
        """Stop the turn; see the port. A CLI that does not acknowledge is killed before the return."""
        if (turn := self.turn) is None:
            return
        turn.stop_requested.set()
        if (link := self.connection) is None:
            return
        with anyio.move_on_after(self._timeouts.interrupt, shield=True), suppress(ClaudeSDKError):
            await link.process.control("interrupt")
            return
        link.process.kill()

    async def set_mode(self, mode: m.PermissionMode) -> None:
        """Pass the mode on to the CLI."""
        self.expect_mode(mode)
        if self.connection is not None:
            await self._send_mode(self.connection)

    async def close(self) -> None:
        """End the CLI and every process that came from it, within the time limit."""
        self._closed = True
        if self.turn is not None:
            self.turn.stop_requested.set()
        await self._discard()
        if (again := self._unknown.summary()) is not None:
            with anyio.move_on_after(_SUMMARY_DEADLINE):  # a full spool must not delay the end
                await self._daemon.report("notice", again)
        if self._sandbox is not None:
            await anyio.to_thread.run_sync(self._sandbox.close)
        if self._scratch is not None:
            with suppress(OSError):  # the next executor of the session removes what is left
                await anyio.to_thread.run_sync(agent_dir.remove_scratch, self._config.path)

    async def _discard(self) -> None:
        link, self.connection, self._spoiled = self.connection, None, False
        if link is None:
            return
        with anyio.CancelScope(shield=True):
            with anyio.move_on_after(self._timeouts.close), suppress(ClaudeSDKError):
                await link.client.disconnect()
            await link.end()
