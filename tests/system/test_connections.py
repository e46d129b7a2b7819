"""Misbehaving clients of a real hutchd: each stays within its limits, and no other client is affected."""

from __future__ import annotations

import json
import resource
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio.abc import TaskStatus

from hutch_shared import messages as m
from hutch_shared.rpc.stream import SocketStream
from tests.system.host import Host, host
from tests.system.log import DEADLINE, log_of, wait_for, without_gaps

pytestmark = pytest.mark.system

DEADLINES = """
[executors]
spares = 0
[sockets]
client_frame = 65536
first_frame = 2
frame_timeout = 2
ping_interval = 0.5
ping_timeout = 4
"""
STALLED = """
[executors]
spares = 0
[sockets]
follower_bytes = 65536
unread_timeout = 3600
ping_interval = 3600
"""
MEMORY_OF_ONE = 1 << 20
"""The memory for a stalled follower: its bound and a page in several forms, far less than it misses."""


class Line:
    """A connection that the test writes and reads byte by byte."""

    def __init__(self, made: Host, *, buffer: int | None = None) -> None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        if buffer is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        sock.connect(str(made.socket))
        self.sock = sock
        self.stream = SocketStream(sock)
        self._received = b""

    async def ask(self, method: str, **params: Any) -> dict[str, Any]:
        """Make a request and return the reply; earlier messages are dropped."""
        await self.stream.send(_frame(method, params))
        while True:
            message = await self.next()
            if message.get("id") == 1:
                result: dict[str, Any] = message["result"]
                return result

    async def next(self) -> dict[str, Any]:
        """Return the next message."""
        while b"\n" not in self._received:
            self._received += await self.stream.receive(1 << 20)
        frame, _, self._received = self._received.partition(b"\n")
        message: dict[str, Any] = json.loads(frame)
        return message

    async def closed(self) -> None:
        """Read without replying until hutchd has closed the connection."""
        try:
            while True:
                await self.stream.receive()
        except (anyio.EndOfStream, anyio.BrokenResourceError):
            return


@contextmanager
def line(made: Host, **settings: Any) -> Iterator[Line]:
    """Connect during the block."""
    connected = Line(made, **settings)
    with connected.sock:
        yield connected


def _frame(method: str, params: dict[str, Any]) -> bytes:
    return json.dumps({"jsonrpc": "2.0", "id": 1, "method": method, "params": params}).encode() + b"\n"


@pytest.fixture(scope="module")
async def strict() -> AsyncIterator[Host]:
    """A host with short deadlines."""
    async with host(DEADLINES) as made:
        yield made


async def _say_nothing(there: Line, *, task_status: TaskStatus[None]) -> None:
    """Connect and send nothing."""
    task_status.started()


async def _drip(there: Line, *, task_status: TaskStatus[None]) -> None:
    """Send an endless frame, one byte at a time."""
    await there.ask("get_version", protocol=m.PROTOCOL)
    task_status.started()
    try:
        while True:
            await there.stream.send(b"{")
            await anyio.sleep(0.05)
    except (anyio.BrokenResourceError, anyio.ClosedResourceError):
        return


async def _drip_at_once(there: Line, *, task_status: TaskStatus[None]) -> None:
    """Send an endless frame as the first message, one byte at a time."""
    task_status.started()
    try:
        for byte in _frame("get_version", {"protocol": m.PROTOCOL}) * 100:
            await there.stream.send(bytes([byte]).replace(b"\n", b" "))
            await anyio.sleep(0.05)
    except (anyio.BrokenResourceError, anyio.ClosedResourceError):
        return


async def _half_a_frame(there: Line, *, task_status: TaskStatus[None]) -> None:
    """Begin a frame and send nothing more."""
    await there.ask("get_version", protocol=m.PROTOCOL)
    await there.stream.send(b'{"jsonrpc":"2.0",')
    task_status.started()


async def _never_answer(there: Line, *, task_status: TaskStatus[None]) -> None:
    """Be a correct client that answers no ping."""
    await there.ask("get_version", protocol=m.PROTOCOL)
    await there.ask("follow_events", session="*", after=0)
    task_status.started()


async def _half_close(there: Line, *, task_status: TaskStatus[None]) -> None:
    """Close one direction, as a forwarder does when the process behind it dies."""
    await there.ask("get_version", protocol=m.PROTOCOL)
    there.sock.shutdown(socket.SHUT_WR)
    task_status.started()


@pytest.mark.parametrize(
    "manner",
    [_say_nothing, _drip, _drip_at_once, _half_a_frame, _never_answer, _half_close],
    ids=lambda one: one.__name__,
)
async def test_a_misbehaving_connection_is_closed_at_its_deadline(strict: Host, manner: Any) -> None:
    """Each misbehaviour has its deadline; an idle follower that answers pings stays connected."""
    async with strict.client() as hutch:
        session = await strict.script(hutch, [{"text": "heard"}])
        async with log_of(hutch, session) as idle:
            follower = idle.follow._peer
            with line(strict) as there, anyio.fail_after(DEADLINE):
                async with anyio.create_task_group() as group:
                    await group.start(manner, there)
                    await there.closed()
                    group.cancel_scope.cancel()
            end = await idle.play(session, "go")

        assert end.state == "completed"
        assert idle.follow._peer is follower
        assert without_gaps(idle.events)


async def test_a_frame_over_the_limit_is_refused_and_the_connection_stays(strict: Host) -> None:
    """The error names the size of the frame."""
    with line(strict) as there, anyio.fail_after(DEADLINE):
        before = await there.ask("get_version", protocol=m.PROTOCOL)
        await there.stream.send(_frame("get_version", {"protocol": m.PROTOCOL, "client": "x" * 65536}))
        while "error" not in (refused := await there.next()):
            pass
        after = await there.ask("get_version", protocol=m.PROTOCOL)

    assert refused["error"]["data"]["reason"] == "frame_too_large"
    assert after == before


async def test_an_idle_follower_outlives_many_pings(strict: Host) -> None:
    """It keeps its connection for several times the ping timeout."""
    async with strict.client() as hutch:
        session = await strict.script(hutch, [{"text": "heard"}])
        async with log_of(hutch, session) as idle:
            follower = idle.follow._peer
            for _ in range(3):
                with line(strict) as silent, anyio.fail_after(DEADLINE):
                    await silent.closed()
            end = await idle.play(session, "go")

        assert end.state == "completed"
        assert idle.follow._peer is follower


async def test_a_hundred_stalled_followers_cost_bounded_memory_and_delay_no_one() -> None:
    """They fall far behind; neither the executor nor a follower that reads waits for them."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    lines: list[dict[str, Any]] = [{"wait_file": "go"}, {"repeat": {"times": 2000, "line": {"text": "s" * 5000}}}]
    async with host(STALLED) as made, made.client() as hutch:
        session = await made.script(hutch, lines)
        async with log_of(hutch, session) as log:
            turn = await hutch.submit_prompt(session.id, "go")
            await log.until(lambda log: log.events)
            with ExitStack() as stack:
                stalled = [stack.enter_context(line(made, buffer=4096)) for _ in range(100)]
                for one in stalled:
                    await one.ask("get_version", protocol=m.PROTOCOL)
                    await one.ask("follow_events", session=session.id, after=0)
                before = _resident(made.pid)
                Path(session.cwd, "go").touch()
                end = await log.ended(turn)
                status = await hutch.get_status()
                after = _resident(made.pid)
                laggard = await _everything(stalled[0], head=log.events[-1].seq)

        assert end.state == "completed"
        assert status.clients >= 100
        assert without_gaps(log.events)
        assert len(log.of("text")) == 2000
        assert after - before < 100 * MEMORY_OF_ONE
        assert laggard == [event.seq for event in log.events]


async def test_a_stalled_follower_is_closed_and_continues_from_its_cursor() -> None:
    """After the deadline it reconnects and gets the remaining events, each once."""
    settings = STALLED.replace("unread_timeout = 3600", "unread_timeout = 1")
    lines = [{"repeat": {"times": 1000, "line": {"text": "r" * 5000}}}]
    async with host(settings) as made, made.client() as hutch:
        session = await made.script(hutch, lines)
        with line(made, buffer=4096) as there:
            await there.ask("get_version", protocol=m.PROTOCOL)
            await there.ask("follow_events", session=session.id, after=0)
            async with log_of(hutch, session) as log:
                await log.play(session, "go")
                with anyio.fail_after(DEADLINE):
                    while (await hutch.get_status()).clients > 2:
                        await anyio.sleep(0.05)
            seen = await _what_is_left(there)
        async with log_of(hutch, session, after=seen[-1]) as rest:
            await rest.until(lambda rest: bool(rest.events) and rest.events[-1].seq == log.events[-1].seq)

        assert 0 < len(seen) < len(log.events)
        assert seen + [event.seq for event in rest.events] == [event.seq for event in log.events]


async def test_a_follower_whose_events_were_removed_gets_its_cursor() -> None:
    """`follow_ended` has its cursor; the error names the oldest remaining event."""
    lines = [{"repeat": {"times": 1500, "line": {"text": "q" * 5000}}}]
    async with host(STALLED) as made, made.client() as hutch:
        session = await made.script(hutch, lines)
        with line(made, buffer=4096) as there:
            await there.ask("get_version", protocol=m.PROTOCOL)
            await there.ask("follow_events", session=session.id, after=0)
            async with log_of(hutch, session) as log:
                await log.play(session, "go")
            made.settings += "[store]\nkeep_bytes = 1000000\n"
            made.write_settings()
            made.signal(signal.SIGHUP)
            await wait_for(lambda: "old events removed" in made.log_text())
            seen: list[int] = []
            while (message := await there.next())["method"] == "event":
                seen.append(message["params"]["seq"])
        kept = await made.hutch("logs", session.id, "--since", str(seen[-1]), "-o", "jsonl")
        left = [json.loads(line)["seq"] for line in kept.out.splitlines()]

        assert message["method"] == "follow_ended"
        assert (message["params"]["reason"], message["params"]["after"]) == ("too_slow", seen[-1])
        assert seen == list(range(1, seen[-1] + 1))
        assert f"Events before {left[0]} are no longer kept" in kept.err
        assert left == list(range(left[0], log.events[-1].seq + 1))
        assert left[0] > seen[-1] + 1


async def _everything(there: Line, *, head: int) -> list[int]:
    """Read events up to `head`; return their numbers."""
    seqs: list[int] = []
    with anyio.fail_after(DEADLINE):
        while not seqs or seqs[-1] < head:
            seqs.append((await there.next())["params"]["seq"])
    return seqs


async def _what_is_left(there: Line) -> list[int]:
    """Read the remaining data of a connection that hutchd closed. Return the numbers of whole events."""
    seqs: list[int] = []
    with anyio.fail_after(DEADLINE):
        while True:
            try:
                seqs.append((await there.next())["params"]["seq"])
            except (anyio.EndOfStream, anyio.BrokenResourceError):
                return seqs


def _resident(pid: int) -> int:
    """Return the resident memory of a process in bytes."""
    (text,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS:")]
    return int(text.split()[1]) * 1024
