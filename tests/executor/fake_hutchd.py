"""A small fake hutchd on a real socket with the real wire, for the executors of these tests."""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import msgspec
from anyio.abc import TaskGroup

from hutch_shared import messages as m
from hutch_shared import unix
from hutch_shared.digest import input_digest
from hutch_shared.errors import HutchError, Reason
from hutch_shared.events import ReportedEvent
from hutch_shared.latch import Latch
from hutch_shared.methods import EXECUTOR, TO_EXECUTOR
from hutch_shared.rpc.dispatch import Dispatcher
from hutch_shared.rpc.peer import Peer, PeerLimits
from hutch_shared.rpc.stream import SocketStream, accept

EXECUTOR_ID = "x-0000000000000001"
SESSION = "s-0000000000000001"
WAIT = 30.0
"""Seconds after which a test gives up; nothing is measured with it."""
LOOK_AGAIN = 0.02

QUESTION = m.Permission(
    id="p-1",
    session="s-1",
    turn="t-1",
    kind="tool",
    state="pending",
    asked_at="2026-01-31T12:00:00.000Z",
    call=m.ToolCall("c-1", "run_command", "Bash", {"command": "ls"}),
    digest="d",
)

Answer = Callable[[m.RequestPermission], Awaitable[m.PermissionDecision]]


def boot(path: Path, **changes: Any) -> m.Boot:
    """Return the boot line of an executor for the script agent."""
    fields: dict[str, Any] = {
        "executor": EXECUTOR_ID,
        "token": "token-of-the-test",
        "socket": str(path),
        "server_uid": os.getuid(),
        "agent": "script",
    }
    return m.Boot(**(fields | changes))


def prepare(cwd: Path, **changes: Any) -> m.PrepareSession:
    """Return the parameters of `prepare_session`; the spool directory is made beside `cwd`."""
    spool = cwd.parent / "spool"
    spool.mkdir(mode=0o700, exist_ok=True)
    fields: dict[str, Any] = {
        "session": SESSION,
        "agent": "script",
        "cwd": str(cwd),
        "permission_mode": "ask",
        "options": m.AgentOptions(),
        "limits": m.Limits(),
        "spool": str(spool),
        "home": str(cwd.parent),
    }
    return m.PrepareSession(**(fields | changes))


def prompt(text: str, *, turn: str = "t-1", number: int = 1, timeout: float | None = None) -> m.ExecutePrompt:
    """Return a prompt for the session."""
    return m.ExecutePrompt(SESSION, turn, number, text, timeout)


async def allow(request: m.RequestPermission) -> m.PermissionDecision:
    """Allow the input as it is."""
    return decision(request.call, "allow")


def decision(call: m.ToolCall, what: m.Decision, **changes: Any) -> m.PermissionDecision:
    """Return a decision about the input of `call`, or about another input."""
    state: dict[m.Decision, m.PermissionState] = {"allow": "allowed", "deny": "denied", "answer": "answered"}
    given = changes.pop("input", call.input)
    return m.PermissionDecision(
        decision=what, state=state[what], input=given, digest=input_digest(call.agent_tool, given), **changes
    )


def is_alive(pid: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


async def dead(pid: int) -> None:
    """Return whether a killed process is gone soon: the kernel needs a moment."""
    with anyio.fail_after(WAIT):
        while is_alive(pid):
            await anyio.sleep(LOOK_AGAIN)


class FakeHutchd:
    """Stores events as the journal does: each number once, a gap closes the connection, acknowledged when stored."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.epoch = 1
        self.events: list[ReportedEvent] = []
        self.hellos: list[m.Hello] = []
        self.asked: list[m.RequestPermission] = []
        self.beats: list[m.Heartbeat] = []
        self.refuse: HutchError | None = None
        self.answer: Answer = allow
        self.acknowledges = True
        self.unstored = 0
        """The number of reports that it will not store: each closes the connection, as on a full disk."""
        self.believes: Callable[[str | None], str | None] = lambda turn: turn
        """Which turn it says that runs, of the one that an executor names."""
        self.key: m.KeyGrant | HutchError = HutchError(Reason.NO_KEY)
        self.peer: Peer[Any] | None = None
        self.connections = 0
        self._changed = Latch()

    @asynccontextmanager
    async def up(self) -> AsyncIterator[None]:
        """Listen during the block; at its end, cut all connections."""
        with unix.listen(self.path) as listener:
            async with anyio.create_task_group() as group:
                group.start_soon(self._accept, listener.socket, group)
                yield
                group.cancel_scope.cancel()
        self.peer = None

    async def until(self, holds: Callable[[], Any]) -> None:
        """Wait until `holds()` is true. It is called after each message, and at intervals."""
        with anyio.fail_after(WAIT):
            while not holds():
                with anyio.move_on_after(LOOK_AGAIN):
                    await self._changed.wait()

    async def call(self, name: str, params: msgspec.Struct) -> Any:
        """Call the executor once it is connected."""
        await self.until(lambda: self.peer is not None)
        assert self.peer is not None
        return await self.peer.call(name, params, WAIT)

    async def ended(self, turn: str = "t-1") -> dict[str, Any]:
        """Return the data of `turn_ended`, once it has arrived."""
        await self.until(lambda: self.of_kind("turn_ended", turn))
        return self.of_kind("turn_ended", turn)[0]

    def of_kind(self, kind: str, turn: str | None = None) -> list[dict[str, Any]]:
        """Return the data of all events of one kind."""
        found = [event for event in self.events if event.kind == kind and turn in (None, event.turn)]
        return [msgspec.json.decode(event.data) for event in found]

    @property
    def stored(self) -> int:
        """The highest event number stored."""
        return self.events[-1].n if self.events else 0

    async def acknowledge(self) -> None:
        """Acknowledge every stored event."""
        assert self.peer is not None
        await self.peer.notify("ack_events", m.AckEvents(self.stored))

    async def cut(self) -> None:
        """Close the current connection."""
        peer, self.peer = self.peer, None
        assert peer is not None
        await peer.aclose()

    async def _accept(self, listener: socket.socket, group: TaskGroup) -> None:
        while True:
            sock = await accept(listener)
            self.connections += 1
            group.start_soon(self._serve, SocketStream(sock))
            self._changed.notify()

    async def _serve(self, stream: SocketStream) -> None:
        peer: Peer[Any] = Peer(
            stream,
            sends=TO_EXECUTOR,
            context=self,
            serves=Dispatcher(
                EXECUTOR,
                {
                    "hello": lambda _, params: self._hello(peer, params),
                    "get_api_key": lambda _, params: self._get_api_key(params),
                    "request_permission": _request_permission,
                    "judge_reads": lambda _, params: m.ReadsJudged(),
                    "report_message": _report_message,
                    "heartbeat": lambda _, params: self._heartbeat(params),
                },
            ),
            limits=PeerLimits(frame=32 << 20),
        )
        await peer.run()
        if self.peer is peer:
            self.peer = None
        self._changed.notify()

    def _hello(self, peer: Peer[Any], params: m.Hello) -> m.Welcome:
        self.hellos.append(params)
        self._changed.notify()
        if self.refuse is not None:
            raise self.refuse
        self.peer = peer
        return m.Welcome(acked=self.stored, daemon_epoch=self.epoch, turn=self.believes(params.turn))

    def _get_api_key(self, params: m.GetApiKey) -> m.KeyGrant:
        if isinstance(self.key, HutchError):
            raise self.key
        return self.key

    def _heartbeat(self, params: m.Heartbeat) -> None:
        self.beats.append(params)
        self._changed.notify()

    async def take(self, params: m.ReportMessage) -> None:
        """Store events."""
        for event in params.events:
            if event.n > self.stored + 1:
                raise HutchError(Reason.INVALID_REQUEST, f"a gap before {event.n}")
            if event.n == self.stored + 1:
                self.events.append(event)
        self._changed.notify()
        if self.acknowledges and self.peer is not None:
            await self.peer.notify("ack_events", m.AckEvents(self.stored))

    async def ask(self, params: m.RequestPermission) -> m.PermissionDecision:
        """Answer a permission request."""
        self.asked.append(params)
        self._changed.notify()
        return await self.answer(params)


async def _request_permission(hutchd: FakeHutchd, params: m.RequestPermission) -> m.PermissionDecision:
    return await hutchd.ask(params)


async def _report_message(hutchd: FakeHutchd, params: m.ReportMessage) -> None:
    if hutchd.unstored:
        hutchd.unstored -= 1
        raise HutchError(Reason.STORE_UNAVAILABLE)
    await hutchd.take(params)
