"""Executors in memory and the environment that starts them: objects for processes, method calls for sockets."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import msgspec
from anyio.abc import TaskGroup
from msgspec import UNSET, Raw

from hutch_daemon.environments.port import Account, Alive, Exited, InForce, IsolationOffer, Killed, Launched, LaunchSpec
from hutch_daemon.environments.sandbox_probe import SandboxProbe
from hutch_daemon.pool.executors import Executor
from hutch_daemon.services.services import Services
from hutch_daemon.settings import SandboxSettings
from hutch_shared import messages as m
from hutch_shared.errors import HutchError, Reason
from hutch_shared.events import EventKind, ReportedEvent, Text, TurnEnded, TurnStarted
from hutch_shared.ids import new_id
from hutch_shared.processes import Credentials
from hutch_shared.times import now_ms, to_wire

Play = Callable[["FakeExecutor", m.ExecutePrompt], Awaitable[TurnEnded | None]]
"""A play: the executor's actions for a prompt. It returns the end of the turn, or None if the turn never ends."""


async def say_done(executor: FakeExecutor, prompt: m.ExecutePrompt) -> TurnEnded:
    """Reply with one text."""
    await executor.report("text", Text(f"done: {prompt.prompt}"), prompt.turn)
    return TurnEnded("completed", "done", "Done.", agent_session="conversation-1")


async def never_end(executor: FakeExecutor, prompt: m.ExecutePrompt) -> None:
    """Work until interrupted."""
    await anyio.sleep_forever()


@contextmanager
def refusals_end_it() -> Iterator[None]:
    """End a play if hutchd refuses one of its calls, made directly or in one of its tasks."""
    try:
        yield
    except HutchError:
        return
    except ExceptionGroup as group:
        if group.split(HutchError)[1] is not None:
            raise


class Connection:
    """One connection of a fake executor, together with hutchd's end."""

    def __init__(self, executor: FakeExecutor) -> None:
        self.fake = executor
        self.known: Executor | None = None
        self.open = True
        self._calls: set[anyio.CancelScope] = set()

    async def call(self, name: str, params: msgspec.Struct, timeout: float, /) -> Any:
        if not self.open:
            raise HutchError(Reason.CONNECTION_LOST)
        self.fake.calls.append((name, params))
        with anyio.move_on_after(timeout) as scope:
            self._calls.add(scope)
            try:
                return await self.fake.answer(name, params)
            finally:
                self._calls.discard(scope)
        raise HutchError(Reason.TIMED_OUT if self.open else Reason.CONNECTION_LOST)

    async def notify(self, name: str, params: msgspec.Struct, /) -> None:
        assert isinstance(params, m.AckEvents)
        self.fake.acked = params.n

    def close(self) -> None:
        self.fake.hang_up(self)

    def lose(self) -> None:
        """Lose the connection: calls that wait for a result fail."""
        self.open = False
        for scope in self._calls:
            scope.cancel()


class FakeExecutor:
    """The process: it connects, takes a session, runs plays, requests permissions and reports events."""

    def __init__(self, host: FakeHost, spec: LaunchSpec, pid: int) -> None:
        self.host = host
        self.spec = spec
        self.pid = pid
        self.calls: list[tuple[str, msgspec.Struct]] = []
        self.prepared: m.PrepareSession | None = None
        self.connection: Connection | None = None
        self.events: list[ReportedEvent] = []
        self.acked = 0
        self.turn: str | None = None
        self.taken: list[str] = []
        self.exited = anyio.Event()
        self.abilities: tuple[str, ...] = host.abilities
        self.refuses: str | None = None
        self.deaf = False
        """It takes no request but hello's answer: a stopped process."""
        self.timed_out = False
        self.breaks_off = False
        """Interrupted, its turn fails."""
        self.stubborn = False
        """It does not stop when it is interrupted."""
        self.shutdown_wished = False
        self._scope = anyio.CancelScope()
        self._turn_scope = anyio.CancelScope()
        self.real: dict[str, str] = {}

    async def run(self) -> None:
        with self._scope:
            if not self.host.mute:
                with suppress(HutchError):  # hutchd has stopped meanwhile
                    await self.dial()
            await anyio.sleep_forever()

    # ------------------------------------------------------------ the connection

    async def dial(self, **changes: Any) -> m.Welcome:
        """Say hello on a new connection, and send unacknowledged events again."""
        fields: dict[str, Any] = {
            "executor": self.spec.executor,
            "token": self.spec.boot.token,
            "protocol": m.PROTOCOL,
            "version": "test",
            "epoch_seen": 0,
            "session": self.prepared.session if self.prepared is not None else None,
            "turn": self.turn,
            "last_n": len(self.events),
            "abilities": self.abilities,
        }
        connection = Connection(self)
        pid = changes.pop("pid", self.pid)
        uid = changes.pop("uid", self.spec.account.uid)
        connection.known, welcome = await self.host.services.executors.hello(
            connection, Credentials(uid, uid, pid), m.Hello(**(fields | changes))
        )
        self.connection = connection
        await self.resend(welcome.acked)
        return welcome

    async def resend(self, after: int) -> None:
        """Report all events after a number again."""
        events = tuple(self.events[after:])
        if events and self.prepared is not None:
            await self._send(m.ReportMessage(self.prepared.session, events))

    def hang_up(self, connection: Connection | None = None) -> None:
        """Close the connection."""
        connection = connection or self.connection
        if connection is not None and connection.open:
            connection.lose()
            if connection is self.connection:
                self.connection = None
            if connection.known is not None:
                self.host.services.executors.gone(connection.known, connection)

    async def answer(self, name: str, params: Any) -> Any:
        if self.deaf or (name == "execute_prompt" and self.host.deaf_prompts):
            await anyio.sleep_forever()
        match name:
            case "prepare_session":
                self.prepared = params
                if params.sandbox is not None and params.sandbox.kind in self.host.refused_kinds:
                    raise HutchError(Reason.ISOLATION_UNAVAILABLE, f"{params.sandbox.kind} does not hold.")
                if self.host.unpreparable is not None:
                    raise HutchError(Reason.AGENT_UNAVAILABLE, self.host.unpreparable)
                return m.Prepared(keys="none", cwd=self.host.work_really_is, instructions=self.host.instructions)
            case "execute_prompt":
                if self.host.answer_prompt is not None:
                    answered = await self.host.answer_prompt(self, params)
                    if answered is not None:
                        return answered
                return self._take(params)
            case "interrupt_turn":
                was = self.turn == params.turn
                if self.stubborn:
                    await anyio.sleep_forever()
                self.timed_out = params.timed_out
                self._turn_scope.cancel()
                return m.Interrupted(was_running=was)
            case "resolve_paths":
                await self.host.slow_paths.wait()
                return m.ResolvedPaths({path: self.real.get(path, path) for path in params.paths})
            case "run_notify":
                return m.Notified(ok=True)
            case "take_spool":
                return self.host.take_spool(params)
            case "remove_agent_dir":
                self.host.removed.append(params.directory)
                return m.Nothing()
            case "shutdown" if isinstance(params, m.Shutdown) and params.if_alone is None:
                self.shutdown_wished = True
                self.die()
                return m.Nothing()
            case _:
                return m.Nothing()

    # ------------------------------------------------------------ turns

    def _take(self, prompt: m.ExecutePrompt) -> m.Accepted:
        if self.refuses is not None:
            return m.Accepted(accepted=False, reason=self.refuses)
        if prompt.turn not in self.taken:
            self.taken.append(prompt.turn)
            self.host.played.append((self.spec.executor, prompt.prompt))
            self.turn = prompt.turn
            self.host.tasks.start_soon(self._play, prompt)
        return m.Accepted(accepted=True)

    async def _play(self, prompt: m.ExecutePrompt) -> None:
        ended = None
        with anyio.CancelScope() as self._turn_scope:
            await self.report("turn_started", TurnStarted(prompt.prompt, prompt.number, prompt.kind), prompt.turn)
            with refusals_end_it():
                ended = await self.host.play(self, prompt)
        if self.exited.is_set():
            return
        if self._turn_scope.cancel_called:
            ended = TurnEnded("stopped", "interrupted", "The turn was interrupted.")
            if self.timed_out:
                ended = TurnEnded("timed_out", "timed_out", "The turn took too long.")
            if self.breaks_off:
                ended = TurnEnded("failed", "broke", "The agent broke off.")
        if ended is not None:
            self.turn = None
            await self.report("turn_ended", ended, prompt.turn)

    async def report(
        self, kind: EventKind, data: msgspec.Struct, turn: str | None, native: bytes | None = None
    ) -> None:
        """Number an event, keep it, and send it if connected; an unacknowledged event is sent again later."""
        own = UNSET if native is None else Raw(native)
        event = ReportedEvent(len(self.events) + 1, to_wire(now_ms()), kind, Raw(msgspec.json.encode(data)), turn, own)
        self.events.append(event)
        if self.prepared is not None:
            with suppress(HutchError):
                await self._send(m.ReportMessage(self.prepared.session, (event,)))

    async def _send(self, message: m.ReportMessage) -> None:
        connection = self.connection
        if connection is not None and connection.known is not None:
            await self.host.services.reports.report_message(connection.known, message)

    async def get_key(self) -> m.KeyGrant:
        """Ask for the key of the session."""
        assert self.connection is not None
        assert self.connection.known is not None
        assert self.prepared is not None
        asked = m.GetApiKey(self.prepared.session, "anthropic")
        return await self.host.services.executors.get_api_key(self.connection.known, asked)

    async def ask(self, call: m.ToolCall, **changes: Any) -> m.PermissionDecision:
        """Request permission for a tool call of the current turn."""
        assert self.connection is not None
        assert self.connection.known is not None
        assert self.prepared is not None
        fields: dict[str, Any] = {
            "ask": new_id("ask"),
            "session": self.prepared.session,
            "turn": self.turn or "",
            "kind": "tool",
            "call": call,
            "cwd": self.prepared.cwd,
        }
        return await self.host.services.approvals.request_permission(
            self.connection.known, m.RequestPermission(**(fields | changes))
        )

    def die(self) -> None:
        """End, as by SIGKILL."""
        if not self.exited.is_set():
            self.exited.set()
            self._turn_scope.cancel()
            self._scope.cancel()
            self.hang_up()


class FakeHost:
    """The environment, which outlives each hutchd that uses it."""

    name = "fake"
    asks_each_time = True

    def __init__(self, tasks: TaskGroup, boot_id: str) -> None:
        self.tasks = tasks
        self.boot_id = boot_id
        self.services: Services
        self.started: list[FakeExecutor] = []
        self.play: Play = say_done
        self.played: list[tuple[str, str]] = []
        """(executor, prompt) of every prompt that was begun."""
        self.starts = 0
        """How many starts were asked for."""
        self.gate = anyio.Event()
        """Starts wait until it is set."""
        self.gate.set()
        self.slow_paths = anyio.Event()
        """Paths are not resolved until it is set."""
        self.slow_paths.set()
        self.refusing = 0
        """How many of the next starts fail."""
        self.abilities: tuple[str, ...] = ("compact", "clear", "offered", "agent_dir", "recap", "landlock")
        """What executors can do that start from now on."""
        self.answer_prompt: Callable[[FakeExecutor, m.ExecutePrompt], Awaitable[m.Accepted | None]] | None = None
        """Answers a prompt in the place of an executor; None lets the executor answer."""
        self.deaf_prompts = False
        """Executors do not answer when they get a prompt."""
        self.mute = False
        """Executors start and never say hello."""
        self.unpreparable: str | None = None
        self.work_really_is: str | None = None
        """What an executor says of the working directory of its session."""
        self.gids: tuple[int, ...] | None = None
        """The groups that the kernel reports of an executor; None: those of its account."""
        self.unkillable = False
        self.unknowable = ""
        """Why nobody can tell what is left of an executor."""
        self.apart = False
        """It gives each session another account and a cgroup."""
        self.refused_accounts: set[str] = set()
        self.hanging_accounts: set[str] = set()
        """Their executors do not come up."""
        self.swept: list[str] = []
        self.instructions: m.Instructions | None = None
        self.removed: list[str] = []
        """The directories that executors removed."""
        self.sandbox_of_all = SandboxProbe()
        self.sandbox_after_doubt: SandboxProbe | None = None
        """What the next probe finds once a sandbox was doubted, and then in turns; None: the same."""
        self.doubted: list[m.SandboxKind] = []
        self.probes = 0
        self.refused_kinds: set[m.SandboxKind] = set()
        """Executors refuse sandboxes of these kinds when they prepare a session."""
        self.over = ""
        """What an end says of a limit."""
        self.spools: dict[str, tuple[str, list[ReportedEvent]]] = {}
        """By directory: the session and the events in the spool there."""

    def take_spool(self, params: m.TakeSpool) -> m.SpooledEvents:
        session, events = self.spools.get(params.directory, ("", []))
        left = tuple(event for event in events if event.n > params.acked)[:2]
        if not left:
            for file in Path(params.directory).iterdir():
                file.unlink()
        return m.SpooledEvents(session, left)

    def serves(self, account: Account) -> bool:
        return True

    async def probe(self) -> str:
        return ""

    def isolation_offered(self) -> IsolationOffer:
        return IsolationOffer(self.apart, self.apart, "It is a fake.", "not at all", "It would have to be real.")

    async def check_account(self, account: Account) -> None:
        if account.name in self.refused_accounts:
            raise HutchError(Reason.ISOLATION_UNAVAILABLE, f"{account.name} may not.", refused=True)

    async def probe_sandbox(self, account: Account, settings: SandboxSettings) -> SandboxProbe:
        self.probes += 1
        return self.sandbox_of_all

    def doubt_sandbox(self, account: Account, kind: m.SandboxKind, probe: SandboxProbe) -> None:
        self.doubted.append(kind)
        if self.sandbox_after_doubt is not None:
            self.sandbox_of_all, self.sandbox_after_doubt = self.sandbox_after_doubt, self.sandbox_of_all

    def last_probe(self) -> SandboxProbe:
        return self.sandbox_of_all

    def gids_for(self, account: Account) -> tuple[int, ...]:
        return tuple(sorted({account.gid, *account.groups}))

    def in_force(self, launched: Launched) -> InForce:
        executor = self._of(launched)
        assert executor is not None
        spec = executor.spec
        limits = m.ResourceLimits(spec.memory_limit, spec.pids, spec.cpu_weight, spec.open_files)
        return InForce(limits, self.gids or self.gids_for(spec.account))

    def spool_of(self, account: Account, executor: str) -> Path | None:
        return None

    async def sweep(self, account: Account) -> str:
        self.swept.append(account.name)
        return ""

    async def start(self, spec: LaunchSpec) -> Launched:
        self.starts += 1
        with anyio.CancelScope(shield=True):
            await self.gate.wait()
            while spec.account.name in self.hanging_accounts:
                await anyio.sleep(0.01)
        if self.refusing > 0:
            self.refusing -= 1
            raise HutchError(Reason.AGENT_UNAVAILABLE, "There is no such program.")
        executor = FakeExecutor(self, spec, 10_000_000 + len(self.started))
        self.started.append(executor)
        self.tasks.start_soon(executor.run)
        state = {"executor": spec.executor, "pid": executor.pid, "cgroup": "/a/fake" if self.apart else None}
        return Launched(spec.executor, executor.pid, 1, self.boot_id, spec.account.uid, state)

    def _of(self, launched: Launched) -> FakeExecutor | None:
        return next((one for one in self.started if one.spec.executor == launched.executor), None)

    async def poll(self, launched: Launched) -> Alive | Exited:
        executor = self._of(launched)
        return Alive() if executor is not None and not executor.exited.is_set() else Exited()

    async def wait(self, launched: Launched) -> Exited:
        executor = self._of(launched)
        if executor is not None:
            await executor.exited.wait()
        return Exited(-9)

    async def kill(self, launched: Launched) -> Killed:
        await anyio.lowlevel.checkpoint()
        executor = self._of(launched)
        if executor is not None:
            executor.die()
        if self.unknowable:
            return Killed("unknown", why=self.unknowable)
        if self.unkillable:
            return Killed("left", (launched.pid,))
        return Killed("gone", scope="cgroup" if self.apart else "descent", over=self.over)

    def adopt(self, state: Mapping[str, Any]) -> Launched | None:
        executor = next((one for one in self.started if one.pid == state.get("pid")), None)
        if executor is None or executor.exited.is_set():
            return None
        spec = executor.spec
        return Launched(spec.executor, executor.pid, 1, self.boot_id, spec.account.uid, dict(state))

    def trim_output(self, launched: Launched) -> None:
        return None
