"""Every cell of the table of executors, through real connections to real services, their pool and their store."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final

import anyio
import msgspec
import pytest

from hutch_daemon.api.executors import ExecutorListener
from hutch_daemon.api.gate import EXECUTOR_GATE, LeaseStanding, expected_of_executor
from hutch_daemon.pool.view import ExecutorKey
from hutch_daemon.settings import ExecutorSettings
from hutch_daemon.store import events
from hutch_shared import messages as m
from hutch_shared.errors import HutchError, Reason
from hutch_shared.events import ReportedEvent, Text
from hutch_shared.ids import new_id
from hutch_shared.methods import EXECUTOR, TO_EXECUTOR
from hutch_shared.processes import Credentials
from hutch_shared.rpc.dispatch import Dispatcher
from hutch_shared.rpc.peer import Peer
from hutch_shared.rpc.stream import SocketStream
from hutch_shared.times import now_ms, to_wire
from tests.fakes.executors import FakeExecutor
from tests.fakes.stage import WAIT, Stage, new_stage, settings, until

BASH: Final = m.ToolCall("c-1", "run_command", "Bash", {"command": "make"}, command="make")


def event() -> ReportedEvent:
    """Return the first event that an executor reports."""
    return ReportedEvent(1, to_wire(now_ms()), "text", msgspec.Raw(msgspec.json.encode(Text("hi"))))


CALLS: Final[Mapping[str, Callable[[str, FakeExecutor], msgspec.Struct]]] = {
    # the parameters of each method, for a session and an executor
    "ping": lambda session, who: m.Nothing(),
    "hello": lambda session, who: hello_of(who),
    "heartbeat": lambda session, who: m.Heartbeat(),
    "get_api_key": lambda session, who: m.GetApiKey(session, "anthropic"),
    "request_permission": lambda session, who: m.RequestPermission(
        new_id("ask"), session, new_id("turn"), "tool", BASH, "/project"
    ),
    "judge_reads": lambda session, who: m.JudgeReads(session, {"/project/CLAUDE.md": "/project/CLAUDE.md"}),
    "report_message": lambda session, who: m.ReportMessage(session, (event(),)),
}


def hello_of(who: FakeExecutor, **changes: Any) -> m.Hello:
    """Return the hello of an executor, with `changes`."""
    hello = m.Hello(who.spec.executor, who.spec.boot.token, m.PROTOCOL, "test", 0)
    return msgspec.structs.replace(hello, **changes)


class Line:
    """An executor's connection."""

    def __init__(self, peer: Peer[None]) -> None:
        self.peer = peer

    async def outcome(self, method: str, params: msgspec.Struct) -> str:
        """Call or notify; return `allowed`, the reason of the refusal, or `closed` if a notification ended the
        connection."""
        try:
            if EXECUTOR[method].kind == "request":
                await self.peer.call(method, params, WAIT)
                return "allowed"
            await self.peer.notify(method, params)
            await self.peer.call("ping", m.Nothing(), WAIT)
        except HutchError as error:
            return "closed" if error.reason is Reason.CONNECTION_LOST else error.reason.word
        return "allowed"

    async def is_over(self) -> bool:
        """Return whether hutchd has closed the connection."""
        return await self.outcome("heartbeat", m.Heartbeat()) == "closed"


class Place:
    """A hutchd whose executors start but do not connect: the test connects for them."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.side = ExecutorListener(stage.services, stage.in_force)

    @asynccontextmanager
    async def line(self, uid: int, pid: int) -> AsyncIterator[Line]:
        """Connect as a process of an account."""
        ours, theirs = socket.socketpair()
        peer = Peer(
            SocketStream(theirs),
            sends=EXECUTOR,
            context=None,
            serves=Dispatcher(TO_EXECUTOR, {"prepare_session": lambda _, params: m.Prepared(keys="none")}),
        )
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.side.run, SocketStream(ours), Credentials(uid, uid, pid))
            async with peer.serving():
                yield Line(peer)
            tasks.cancel_scope.cancel()

    @asynccontextmanager
    async def dialled(self, who: FakeExecutor) -> AsyncIterator[Line]:
        """Connect as an executor and say hello."""
        async with self.line(who.spec.account.uid, who.pid) as line:
            await line.peer.call("hello", hello_of(who), WAIT)
            yield line

    async def spare(self) -> FakeExecutor:
        """Start one more executor; hutchd waits for it to connect."""
        before = len(self.stage.host.started)
        key = ExecutorKey(self.stage.account_of(self.stage.me.uid), "script", self.stage.host.name)
        self.stage.pool.warm([key])
        await until(lambda: len(self.stage.host.started) > before)
        return self.stage.host.started[-1]

    async def leased(self, session: m.Session, who: FakeExecutor) -> None:
        """Wait until the executor has prepared the session."""

        async def has() -> bool:
            found = self.stage.pool.roster.serving.get(session.id)
            return found is not None and found.id == who.spec.executor and found.prepared

        await until(has)


@asynccontextmanager
async def place(folder: Path) -> AsyncIterator[Place]:
    async with new_stage(folder) as stage:
        stage.host.mute = True
        stage.settings = settings(
            executors=ExecutorSettings(spares=1, spare_agents=("script",), hello_timeout=WAIT, lost_timeout=WAIT)
        )
        async with stage.hutchd():
            yield Place(stage)


@asynccontextmanager
async def standing(here: Place, which: LeaseStanding) -> AsyncIterator[tuple[Line, str, FakeExecutor]]:
    """Give a connection with this standing, a session and the executor."""
    who = await here.spare()
    if which is LeaseStanding.STRANGER:
        session = await here.stage.open(cwd="/project/elsewhere")
        async with here.line(who.spec.account.uid, who.pid) as line:
            yield line, session.id, who
        return
    async with here.dialled(who) as line:
        if which is LeaseStanding.SPARE:
            yield line, new_id("session"), who
            return
        session = await here.stage.open()
        await here.leased(session, who)
        if which is LeaseStanding.OVER:
            await until(lambda: len(here.stage.host.started) > 1)  # wait for the next spare
            follower = here.stage.host.started[-1]
            async with here.dialled(follower):
                key = here.stage.pool.roster.all()[0].key
                await here.stage.pool.lease(session.id, key)
                yield line, session.id, who
            return
        yield line, session.id if which is LeaseStanding.LEASED else new_id("session"), who


@pytest.mark.parametrize("method", EXECUTOR)
@pytest.mark.parametrize("which", LeaseStanding)
async def test_each_cell_is_as_the_table_says(tmp_path: Path, which: LeaseStanding, method: str) -> None:
    """Each method answers as the table says, in each standing of an executor.

    A refused notification ends the connection, because it has no answer.
    """
    want = expected_of_executor(method, which)
    async with place(tmp_path) as here, standing(here, which) as (line, session, who):
        said = await line.outcome(method, CALLS[method](session, who))
        stored = 0
        with suppress(HutchError):  # the session does not exist
            stored = len((await here.stage.store.read(lambda conn: events.read(conn, session, 0))).events)

    refused = want.word if want is not None and EXECUTOR[method].kind == "request" else "closed"
    assert said == ("allowed" if want is None else refused)
    assert stored == (1 if method == "report_message" and want is None else 0)


def test_every_method_has_a_row_and_a_call() -> None:
    """Without a row in the table, a method of the wire would be refused to everybody, so the test fails."""
    assert set(EXECUTOR_GATE) == set(EXECUTOR) == set(CALLS)


def another(who: FakeExecutor, other: FakeExecutor) -> m.Hello:
    """Return a hello of one executor with the token of another."""
    return hello_of(who, token=other.spec.boot.token)


HELLOS: Final[Mapping[str, tuple[Callable[[FakeExecutor, FakeExecutor], m.Hello], str]]] = {
    # the hello of a spare while another executor exists, and its outcome
    "its own": (lambda who, other: hello_of(who), "allowed"),
    "the protocol before": (lambda who, other: hello_of(who, protocol=m.PROTOCOL - 1), "allowed"),
    "no token": (lambda who, other: hello_of(who, token=""), "token_unknown"),
    "garbage": (lambda who, other: hello_of(who, token="\0\u2028" * 100), "token_unknown"),
    "another's token": (another, "token_unknown"),
    "all of another": (lambda who, other: hello_of(other), "not_allowed"),
    "its token and another's name": (lambda who, other: hello_of(who, executor=other.spec.executor), "token_unknown"),
    "a session": (lambda who, other: hello_of(who, session=new_id("session")), "lease_lost"),
    "an old protocol": (lambda who, other: hello_of(who, protocol=m.PROTOCOL - 2), "protocol_mismatch"),
}


@pytest.mark.parametrize("what", HELLOS)
async def test_a_token_admits_only_its_executor(tmp_path: Path, what: str) -> None:
    """hutchd accepts a token only from the executor that it was issued for; a refused hello ends the connection."""
    say, want = HELLOS[what]
    async with place(tmp_path) as here:
        other = await here.spare()
        async with here.dialled(other):
            session = await here.stage.open()
            await here.leased(session, other)
            await until(lambda: len(here.stage.host.started) > 1)
            who = here.stage.host.started[-1]
            async with here.line(who.spec.account.uid, who.pid) as line:
                said = await line.outcome("hello", say(who, other))
                over = await line.is_over()

    assert (said, over) == (want, want != "allowed")


@pytest.mark.parametrize(("uid", "pid"), [(1, 0), (0, 1)])
async def test_a_token_admits_only_its_process(tmp_path: Path, uid: int, pid: int) -> None:
    """Another account or process that shows the token is refused; the right process is admitted afterwards."""
    async with place(tmp_path) as here:
        who = await here.spare()
        async with here.line(who.spec.account.uid + uid, who.pid + pid) as thief:
            stolen = await thief.outcome("hello", hello_of(who))
        async with here.line(who.spec.account.uid, who.pid) as line:
            shown = await line.outcome("hello", hello_of(who))

    assert (stolen, shown) == ("not_allowed", "allowed")
