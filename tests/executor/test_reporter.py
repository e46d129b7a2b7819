"""The reporter: order, acknowledgements, outages, limits, and events that the wire does not accept."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
from anyio.lowlevel import checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st

from hutch_executor.events.encoding import EVENT_LIMIT
from hutch_executor.events.outbox import BATCH_COUNT, Outbox
from hutch_executor.events.reporter import Reporter
from hutch_executor.events.spool import DiskSpace, Spool
from hutch_executor.events.spool_files import read_spool
from hutch_shared import messages as m
from hutch_shared.errors import HutchError
from hutch_shared.events import ReportedEvent, Text, ToolCallSeen, TurnEnded
from hutch_shared.latch import Latch
from hutch_shared.rpc import envelope
from tests.executor.fake_hutchd import WAIT


class Receiver:
    """The other end of a connection. It receives frames as hutchd does."""

    def __init__(self) -> None:
        self.events: list[ReportedEvent] = []
        self.frames = 0
        self._changed = Latch()

    @property
    def stored(self) -> int:
        return len(self.events)

    async def write(self, frame: bytes) -> None:
        """Store new events. A gap or an invalid frame fails the test."""
        message = envelope.parse(frame.removesuffix(b"\n"))
        assert isinstance(message, envelope.Notification), message
        assert message.params is not None
        for event in msgspec.json.decode(message.params, type=m.ReportMessage).events:
            assert event.n <= self.stored + 1, "a gap"
            if event.n == self.stored + 1:
                self.events.append(event)
        self.frames += 1
        self._changed.notify()
        await checkpoint()

    async def has(self, count: int) -> None:
        """Return when this number of events is stored."""
        with anyio.fail_after(WAIT):
            while self.stored < count:
                await self._changed.wait()

    def texts(self) -> list[str]:
        return [msgspec.json.decode(event.data)["text"] for event in self.events]


def new_reporter(directory: Path, limit: int = 1 << 20, **limits: int) -> Reporter:
    """Return a reporter with a session and a spool."""
    reporter = Reporter(Outbox(**limits))
    reporter.begin("s-1", Spool(directory, "x-1", "s-1", limit))
    return reporter


def patient_reporter(directory: Path) -> Reporter:
    """Return a reporter whose events gather for the longest time."""
    reporter = Reporter(Outbox(), gather=(0.0, 100 * WAIT))
    reporter.begin("s-1", Spool(directory, "x-1", "s-1", 1 << 20))
    return reporter


@asynccontextmanager
async def sending(reporter: Reporter, receiver: Receiver) -> AsyncIterator[None]:
    """Keep a connection to a receiver that acknowledges nothing."""
    reporter.connect(0)
    async with anyio.create_task_group() as group:
        group.start_soon(reporter.send, receiver.write)
        yield
        group.cancel_scope.cancel()
    await reporter.close()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    made = tmp_path / "spool"
    made.mkdir(mode=0o700)
    return made


async def sent(reporter: Reporter, receiver: Receiver) -> None:
    """Connect, and return when all events are received and acknowledged."""
    reporter.connect(receiver.stored)
    async with anyio.create_task_group() as group:
        group.start_soon(reporter.send, receiver.write)
        await receiver.has(reporter.outbox.last)
        group.cancel_scope.cancel()
    reporter.acknowledge(receiver.stored)


async def test_events_arrive_in_the_order_of_the_calls(directory: Path) -> None:
    """Each event has the next number, its turn and its unchanged bytes."""
    reporter, receiver = new_reporter(directory), Receiver()
    reporter.turn = "t-1"

    await reporter.report("text", Text("a"), b'{"mine": [1, 2]}')
    await reporter.report("text", Text("b"))
    await sent(reporter, receiver)

    assert receiver.texts() == ["a", "b"]
    assert [(event.n, event.turn, event.kind) for event in receiver.events] == [(1, "t-1", "text"), (2, "t-1", "text")]
    assert receiver.events[0].native == msgspec.Raw(b'{"mine": [1, 2]}')
    assert reporter.outbox.unacked == 0
    await reporter.close()


async def test_events_reported_before_an_acknowledgement_are_sent_together(directory: Path) -> None:
    """A lone event is sent at once; events reported before its acknowledgement share a frame, and so a commit."""
    reporter, receiver = patient_reporter(directory), Receiver()
    async with sending(reporter, receiver):
        await reporter.report("text", Text("0"))
        await receiver.has(1)
        for number in range(1, 11):
            await reporter.report("text", Text(str(number)))
            await checkpoint()
        before = receiver.stored
        reporter.acknowledge(1)
        await receiver.has(11)

        assert (before, receiver.frames) == (1, 2)
        assert receiver.texts() == [str(number) for number in range(11)]


async def test_awaited_events_do_not_gather(directory: Path) -> None:
    """A permission request must follow its events at once, acknowledged or not."""
    reporter, receiver = patient_reporter(directory), Receiver()
    async with sending(reporter, receiver):
        await reporter.report("text", Text("a"))
        await receiver.has(1)
        with anyio.fail_after(WAIT):
            await reporter.wait_sent(await reporter.report("text", Text("b")))
        await receiver.has(2)

        assert reporter.outbox.acked == 0


async def test_a_full_batch_does_not_gather(directory: Path) -> None:
    """The batch is sent before the last one is acknowledged, since waiting would not make it larger."""
    reporter, receiver = patient_reporter(directory), Receiver()
    async with sending(reporter, receiver):
        await reporter.report("text", Text("0"))
        await receiver.has(1)
        for number in range(1, BATCH_COUNT + 1):
            await reporter.report("text", Text(str(number)))
        await receiver.has(BATCH_COUNT + 1)

        assert receiver.frames == 2
        assert reporter.outbox.acked == 0


async def test_an_outage_goes_through_the_spool(directory: Path) -> None:
    """Events reported during an outage are on the disk, and are sent first after the reconnect."""
    reporter, receiver = new_reporter(directory), Receiver()
    async with anyio.create_task_group() as group:
        group.start_soon(reporter.keep_spool)
        for number in range(1000):
            await reporter.report("text", Text(str(number)))
        with anyio.fail_after(WAIT):
            await reporter.wait_safe()
        assert reporter.outbox.in_memory == 0
        assert reporter.spooled_bytes > 0

        reporter.connect(0)
        await reporter.report("text", Text("back"))
        await sent(reporter, receiver)
        group.cancel_scope.cancel()

    assert receiver.texts() == [*map(str, range(1000)), "back"]
    assert reporter.outbox.unacked == 0
    await reporter.close()
    assert list(directory.iterdir()) == []


async def test_unacknowledged_events_stay_in_the_spool_at_the_end(directory: Path) -> None:
    """The account's next executor finds exactly the unacknowledged events."""
    reporter, receiver = new_reporter(directory), Receiver()
    await reporter.report("text", Text("a"))
    await sent(reporter, receiver)
    reporter.detach()
    async with anyio.create_task_group() as group:
        group.start_soon(reporter.keep_spool)
        await reporter.report("text", Text("b"))
        with anyio.fail_after(WAIT):
            await reporter.wait_safe()
        group.cancel_scope.cancel()
    await reporter.close()

    _, records = read_spool(directory / "x-1.spool")

    assert [n for n, _ in records] == [2]


async def test_the_spool_shrinks_as_its_events_are_acknowledged(directory: Path) -> None:
    """hutchd may need the space to store the other events."""
    spool = Spool(directory, "x-1", "s-1", 1 << 20, disk=lambda _: DiskSpace(64 * 10_000, 64 * 10_000))
    reporter, receiver = Reporter(), Receiver()
    reporter.begin("s-1", spool)
    async with anyio.create_task_group() as group:
        group.start_soon(reporter.keep_spool)
        for number in range(1000):
            await reporter.report("text", Text(str(number)))
        with anyio.fail_after(WAIT):
            await reporter.wait_safe()
        whole = reporter.spooled_bytes
        reporter.connect(0)
        group.start_soon(reporter.send, receiver.write)
        await receiver.has(1000)
        reporter.acknowledge(700)
        with anyio.fail_after(WAIT):
            while reporter.spooled_bytes > whole / 2:
                await checkpoint()
        group.cancel_scope.cancel()
    await reporter.close()

    _, records = read_spool(directory / "x-1.spool")
    assert [n for n, _ in records][-300:] == list(range(701, 1001))


async def test_an_ending_executor_may_use_the_last_of_the_disk(directory: Path) -> None:
    """The spool leaves space for hutchd only while the events are safe in memory."""
    spool = Spool(directory, "x-1", "s-1", 1 << 20, disk=lambda _: DiskSpace(1 << 20, 1000))
    reporter = Reporter()
    reporter.begin("s-1", spool)
    async with anyio.create_task_group() as group:
        group.start_soon(reporter.keep_spool)
        await reporter.report("text", Text("a"))
        await anyio.wait_all_tasks_blocked()
        before = reporter.outbox.spooled
        with anyio.fail_after(WAIT):
            await reporter.wait_safe()
        group.cancel_scope.cancel()
    await reporter.close()

    _, records = read_spool(directory / "x-1.spool")
    assert (before, [n for n, _ in records]) == (0, [1])


async def test_a_full_spool_makes_the_agent_wait_and_loses_nothing(directory: Path) -> None:
    """When disk and memory are full, `report` waits until hutchd takes events again."""
    reporter, receiver = new_reporter(directory, limit=2000, count_limit=5), Receiver()
    done = anyio.Event()

    async def agent() -> None:
        for number in range(200):
            await reporter.report("text", Text(str(number)))
        done.set()

    def is_full() -> bool:
        """Whether memory is full and its events do not fit into the rest of the spool."""
        outbox = reporter.outbox
        per_event = reporter.spooled_bytes / max(1, outbox.spooled)
        return outbox.in_memory == 5 and reporter.spooled_bytes + 5 * per_event > 2000

    async def hutchd() -> None:
        reporter.connect(receiver.stored)
        async with anyio.create_task_group() as sending:
            sending.start_soon(reporter.send, receiver.write)
            while receiver.stored < 200:
                await receiver.has(receiver.stored + 1)
                reporter.acknowledge(receiver.stored)
            sending.cancel_scope.cancel()

    async with anyio.create_task_group() as group:
        group.start_soon(reporter.keep_spool)
        group.start_soon(agent)
        with anyio.fail_after(WAIT):
            while not is_full():
                await anyio.sleep(0.001)

        assert not done.is_set()
        await hutchd()
        group.cancel_scope.cancel()

    assert receiver.texts() == list(map(str, range(200)))
    await reporter.close()


async def test_a_hutchd_with_more_events_than_were_made_is_refused(directory: Path) -> None:
    """The count belongs to another journal or to another executor."""
    reporter = new_reporter(directory)

    with pytest.raises(HutchError):
        reporter.connect(1)

    await reporter.close()


@pytest.mark.parametrize(
    "native",
    [
        b"{",
        b'{"a":1}}',
        b"[" * 70 + b"]" * 70,
        b"[" * 100_000,
        b"",
        b'"' + b"x" * EVENT_LIMIT + b'"',
    ],
    ids=["cut", "two", "deep", "abyss", "empty", "large"],
)
async def test_a_native_message_that_the_wire_refuses_is_left_out(directory: Path, native: bytes) -> None:
    """The event is sent without its native message, and the stream goes on."""
    reporter, receiver = new_reporter(directory), Receiver()

    await reporter.report("text", Text("kept"), native)
    await sent(reporter, receiver)

    assert receiver.texts() == ["kept"]
    assert receiver.events[0].native is msgspec.UNSET
    await reporter.close()


@pytest.mark.parametrize(
    ("native", "mended"),
    [(b'["\xff"]', ["\ufffd"]), (b'{"\\ud83d":"\\ude00"}', {"\ufffd": "\ufffd"}), (b"[NaN,1e999]", [None, None])],
)
async def test_a_native_message_of_a_lax_writer_is_mended(directory: Path, native: bytes, mended: object) -> None:
    """Invalid text becomes U+FFFD, and a number that no reader can hold becomes null."""
    reporter, receiver = new_reporter(directory), Receiver()

    await reporter.report("text", Text("kept"), native)
    await sent(reporter, receiver)

    assert msgspec.json.decode(msgspec.json.encode(receiver.events[0].native)) == mended
    await reporter.close()


async def test_a_native_message_over_several_lines_is_one_line_on_the_wire(directory: Path) -> None:
    """A line break between tokens does not break the frame."""
    reporter, receiver = new_reporter(directory), Receiver()

    await reporter.report("text", Text("kept"), b'{\n  "a": 1\n}')
    await sent(reporter, receiver)

    assert msgspec.json.decode(msgspec.json.encode(receiver.events[0].native)) == {"a": 1}
    await reporter.close()


async def test_an_event_that_the_wire_refuses_becomes_a_notice(directory: Path) -> None:
    """A notice reports an event that is too large or too deep, and the session goes on."""
    reporter, receiver = new_reporter(directory), Receiver()
    deep: Any = "x"
    for _ in range(80):
        deep = [deep]

    await reporter.report("text", Text("x" * (EVENT_LIMIT + 1)))
    await reporter.report("tool_call", ToolCallSeen({"input": deep}))
    await reporter.report("text", Text("goes on"))
    await sent(reporter, receiver)

    assert [event.kind for event in receiver.events] == ["notice", "notice", "text"]
    assert msgspec.json.decode(receiver.events[0].data)["word"] == "event_left_out"
    await reporter.close()


async def test_a_large_result_passes_whole(directory: Path) -> None:
    """10 MB are sent as one event."""
    reporter, receiver = new_reporter(directory), Receiver()
    text = "ü€😀" * 1_100_000

    await reporter.report("text", Text(text), b'{"native":true}')
    await sent(reporter, receiver)

    assert receiver.texts() == [text]
    await reporter.close()


async def test_a_large_result_does_not_replace_the_end_of_a_turn(directory: Path) -> None:
    """A terminal event is never replaced by another kind: its result is cut instead."""
    reporter, receiver = new_reporter(directory), Receiver()

    await reporter.report("turn_ended", TurnEnded("completed", "completed", "Done.", result="x" * (EVENT_LIMIT + 1)))
    await sent(reporter, receiver)

    assert [event.kind for event in receiver.events] == ["turn_ended"]
    await reporter.close()


async def test_text_that_is_not_unicode_is_mended(directory: Path) -> None:
    """A lone surrogate in an agent's text does not stop the stream."""
    reporter, receiver = new_reporter(directory), Receiver()

    await reporter.report("text", Text("a\ud800b"))
    await sent(reporter, receiver)

    assert receiver.texts() == ["a�b"]
    await reporter.close()


@settings(max_examples=15)
@given(st.lists(st.tuples(st.sampled_from(["report", "outage", "send", "lose"]), st.integers(1, 40)), max_size=15))
async def test_every_event_arrives_once_and_in_order_through_any_outages(steps: list[tuple[str, int]]) -> None:
    """For any order of reports, outages, lost acknowledgements and reconnects, hutchd gets 1, 2, 3 …"""
    with tempfile.TemporaryDirectory() as made:
        reporter, receiver = new_reporter(Path(made)), Receiver()
        made_events = 0
        async with anyio.create_task_group() as group:
            group.start_soon(reporter.keep_spool)
            for step, count in steps:
                if step == "report":
                    for _ in range(count):
                        made_events += 1
                        await reporter.report("text", Text(str(made_events)))
                elif step == "outage":
                    reporter.detach()
                    with anyio.fail_after(WAIT):
                        await reporter.wait_safe()
                elif step == "send":
                    await sent(reporter, receiver)
                else:
                    reporter.connect(receiver.stored)
                    with anyio.move_on_after(0):
                        await reporter.send(receiver.write)
                    reporter.detach()
            await sent(reporter, receiver)
            group.cancel_scope.cancel()
        await reporter.close()

        assert receiver.texts() == list(map(str, range(1, made_events + 1)))
