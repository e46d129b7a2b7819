"""A stage for the Claude runner: the real SDK and CLI, a scripted model, and a fake daemon that the test controls."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import anyio
import msgspec

from hutch_executor.runners.claude.runner import ClaudeRunner
from hutch_executor.runners.claude.turn import ClaudeTimeouts
from hutch_shared import messages as m
from hutch_shared.digest import input_digest
from hutch_shared.events import EventKind, Notice, TurnEnded, TurnKind
from hutch_shared.ids import new_id
from tests.rehearsal import Model, Script, serve

KEY = "sk-ant-a-key-of-this-test"


def allow(call: m.ToolCall, changed: dict[str, Any] | None = None) -> m.PermissionDecision:
    """Allow the call, with a changed input if one is given."""
    judged = call.input if changed is None else changed
    return m.PermissionDecision("allow", "allowed", judged, input_digest(call.agent_tool, judged))


def deny(call: m.ToolCall, message: str | None = None, *, interrupt: bool = False) -> m.PermissionDecision:
    """Deny the call."""
    digest = input_digest(call.agent_tool, call.input)
    return m.PermissionDecision("deny", "denied", call.input, digest, message, interrupt)


def answer(call: m.ToolCall, answers: dict[str, Any]) -> m.PermissionDecision:
    """Answer the questions."""
    digest = input_digest(call.agent_tool, call.input)
    return m.PermissionDecision("answer", "answered", call.input, digest, answers=answers)


@dataclass(slots=True, eq=False)
class Ask:
    """A permission request that waits until the test decides it."""

    kind: m.PermissionKind
    call: m.ToolCall
    cwd: str | None
    questions: tuple[m.Question, ...]
    plan: str | None
    after: int
    """The number of events reported before it."""
    decision: m.PermissionDecision | None = None
    decided: anyio.Event = field(default_factory=anyio.Event)

    def settle(self, decision: m.PermissionDecision) -> None:
        """Decide the request."""
        self.decision = decision
        self.decided.set()


class FakeDaemon:
    """A DaemonPort that records reports. `decide` decides a call at once, or returns None and the test decides."""

    def __init__(self, grant: m.KeyGrant, decide: Callable[[m.ToolCall], m.PermissionDecision] | None) -> None:
        self.grant = grant
        self.decide = decide
        self.events: list[tuple[EventKind, Any, bytes | None]] = []
        self.asks: list[Ask] = []
        self.takes = anyio.Event()
        """While it is not set, reports wait, as they do when memory and spool are full."""
        self.takes.set()
        self._changed = anyio.Event()

    async def get_api_key(self, provider: str) -> m.KeyGrant:
        assert provider == "anthropic"
        return self.grant

    async def request_permission(
        self,
        kind: m.PermissionKind,
        call: m.ToolCall,
        *,
        cwd: str | None = None,
        questions: tuple[m.Question, ...] = (),
        plan: str | None = None,
    ) -> m.PermissionDecision:
        ask = Ask(kind, call, cwd, questions, plan, len(self.events))
        self.asks.append(ask)
        self._notify()
        if self.decide is not None:
            return self.decide(call)
        await ask.decided.wait()
        assert ask.decision is not None
        return ask.decision

    async def judge_reads(self, named: Mapping[str, str], imported: Mapping[str, str]) -> Mapping[str, str]:
        return {}

    async def report(self, kind: EventKind, data: msgspec.Struct, native: bytes | None = None) -> None:
        await self.takes.wait()
        self.events.append((kind, data, native))
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    async def until(self, holds: Callable[[FakeDaemon], bool]) -> None:
        """Return once `holds(self)` is true; it is called after each report and each request."""
        while not holds(self):
            await self._changed.wait()

    def of(self, kind: EventKind) -> list[Any]:
        """Return the data of all events of a kind."""
        return [data for k, data, _ in self.events if k == kind]

    def notices(self) -> list[str]:
        """Return the words of all notices."""
        return [data.word for data in self.of("notice") if isinstance(data, Notice)]


@dataclass(slots=True)
class Stage:
    """An open runner with everything around it."""

    runner: ClaudeRunner
    daemon: FakeDaemon
    model: Model
    prepared: m.Prepared
    cwd: Path
    home: Path
    turns: int = 0

    async def turn(
        self, prompt: str = "go", kind: TurnKind = "prompt", *, turn: str | None = None, offered: bool = False
    ) -> TurnEnded:
        """Run a turn; `turn` is its id."""
        self.turns += 1
        submitted = m.ExecutePrompt("s-1", turn or new_id("turn"), self.turns, prompt, kind=kind, offered=offered)
        return await self.runner.run(submitted)

    @property
    def pid(self) -> int:
        """Return the CLI's process id."""
        link = self.runner.connection
        assert link is not None
        pid = link.process.pid
        assert pid is not None
        return pid


@asynccontextmanager
async def stage(
    root: Path,
    script: Script,
    *,
    decide: Callable[[m.ToolCall], m.PermissionDecision] | None = allow,
    timeouts: ClaudeTimeouts | None = None,
    options: m.AgentOptions | None = None,
    limits: m.Limits | None = None,
    mode: m.PermissionMode = "bypass",
    resume: str | None = None,
    resume_from: tuple[str, ...] = (),
    resume_named: bool = False,
    fork: bool = False,
    agent_dir: Path | None = None,
    instructions: Literal["all", "project", "none"] = "all",
    cli: str | None = None,
    auth: Any = "api_key",
    sandbox: m.SandboxSpec | None = None,
    cwd: Path | None = None,
) -> AsyncIterator[Stage]:
    """Open a runner below `root`; by default the project is `root/work` and the account's home is `root/home`."""
    cwd, home = cwd or root / "work", root / "home"
    cwd.mkdir(exist_ok=True)
    home.mkdir(exist_ok=True)
    async with serve(key=KEY, script=script) as model:
        daemon = FakeDaemon(m.KeyGrant("direct", KEY, auth=auth), decide)
        runner = ClaudeRunner(timeouts or ClaudeTimeouts(retries=1), cli)
        session = m.PrepareSession(
            session="s-1",
            agent="claude",
            cwd=str(cwd),
            permission_mode=mode,
            options=options or m.AgentOptions(),
            limits=limits or m.Limits(),
            spool=str(root),
            home=str(home),
            base_url=model.url,
            resume=resume,
            resume_from=resume_from,
            resume_named=resume_named,
            fork=fork,
            agent_dir=str(agent_dir or root / "agents" / "s-1"),
            instructions=instructions,
            sandbox=sandbox,
        )
        try:
            prepared = await runner.open(session, daemon)
            yield Stage(runner, daemon, model, prepared, cwd, home)
        finally:
            await runner.close()


def alive(pid: int) -> bool:
    """Return whether the process runs; a zombie does not."""
    try:
        return b") Z" not in Path(f"/proc/{pid}/stat").read_bytes() if Path("/proc").is_dir() else _signals(pid)
    except FileNotFoundError:
        return False


async def gone(pid: int) -> bool:
    """Return whether the process ends soon; a killed one may need a moment."""
    with anyio.move_on_after(20):
        while alive(pid):
            await anyio.sleep(0.02)
        return True
    return False


def _signals(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
