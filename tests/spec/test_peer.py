"""Two ends of a socket pair in one loop: calls, order, limits, and how connections end."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
from anyio.abc import ByteStream
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from hutch_shared.errors import HutchError, Reason
from hutch_shared.rpc.dispatch import Dispatcher
from hutch_shared.rpc.heartbeat import Timeouts
from hutch_shared.rpc.peer import Peer, PeerLimits
from hutch_shared.rpc.stream import SocketStream
from tests.spec.words import ASKED, ASKING, Text, ask, reason_of, tell

BOUND = 30.0
"""Seconds after which a test has failed; nothing waits for them otherwise."""


USUAL = PeerLimits()
PATIENT = Timeouts()


class Here:
    """The context of the side under test; it records what its handlers received."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.gate = anyio.Event()
        self.entered = anyio.Event()
        self.cancelled = anyio.Event()


async def echo(here: Here, params: Text) -> Text:
    here.seen.append(params.text)
    return params


async def wait(here: Here, params: Text) -> Text:
    here.entered.set()
    try:
        await here.gate.wait()
    except BaseException:
        here.cancelled.set()
        raise
    return Text("waited")


async def stream(here: Here, params: Text) -> None:
    here.seen.append(params.text)


def pair() -> tuple[SocketStream, SocketStream]:
    ours, theirs = socket.socketpair()
    return SocketStream(ours), SocketStream(theirs)


def serve(
    ours: ByteStream, here: Here, limits: PeerLimits = USUAL, timeouts: Timeouts = PATIENT, **more: Any
) -> Peer[Here]:
    handlers = {"echo": echo, "get_data": wait, "stream": stream} | more
    return Peer(ours, serves=Dispatcher(ASKED, handlers), sends=ASKING, context=here, limits=limits, timeouts=timeouts)


def client(theirs: ByteStream, **handlers: Any) -> Peer[None]:
    return Peer(theirs, serves=Dispatcher(ASKING, handlers), sends=ASKED, context=None)


@asynccontextmanager
async def both(
    limits: PeerLimits = USUAL,
    theirs: dict[str, Any] | None = None,
    **more: Any,
) -> AsyncIterator[tuple[Peer[Here], Peer[None], Here]]:
    """Yield a serving side and a calling side, both running."""
    here = Here()
    our_stream, their_stream = pair()
    with anyio.fail_after(BOUND):
        async with (
            serve(our_stream, here, limits, **more).serving() as we,
            client(their_stream, **(theirs or {})).serving() as they,
        ):
            yield we, they, here


@asynccontextmanager
async def raw(
    limits: PeerLimits = USUAL,
    timeouts: Timeouts = PATIENT,
    **more: Any,
) -> AsyncIterator[tuple[Peer[Here], SocketStream, Here]]:
    """Yield a serving side, and a bare stream to it."""
    here = Here()
    ours, theirs = pair()
    with anyio.fail_after(BOUND):
        async with serve(ours, here, limits, timeouts, **more).serving() as we:
            try:
                yield we, theirs, here
            finally:
                await theirs.aclose()


async def read_lines(theirs: ByteStream, count: int) -> list[Any]:
    text = b""
    while text.count(b"\n") < count:
        text += await theirs.receive()
    return [json.loads(one) for one in text.splitlines()]


async def read_to_end(theirs: ByteStream) -> bytes:
    text = b""
    try:
        while True:
            text += await theirs.receive()
    except anyio.EndOfStream:
        return text


# ---------------------------------------------------------------- calls


async def test_both_sides_ask_and_answer_on_one_connection() -> None:
    """They may do so at the same time, and with the same ids."""

    async def back(_: None, params: Text) -> Text:
        return Text(params.text + "!")

    async with both(theirs={"echo": back}) as (we, they, _):
        assert await they.call("echo", Text("a"), timeout=BOUND) == Text("a")
        assert await we.call("echo", Text("b")) == Text("b!")
        await they.call("ping")
        await we.call("ping")


async def test_requests_run_side_by_side() -> None:
    """A slow request does not delay a quick one."""
    async with both() as (_, they, here), anyio.create_task_group() as tasks:
        tasks.start_soon(they.call, "get_data")
        await here.entered.wait()

        assert await they.call("echo", Text("quick")) == Text("quick")
        here.gate.set()


async def test_frames_of_10_mb_pass_whole_both_ways() -> None:
    """A large frame is sent in slices, and no other frame gets between them."""
    text = "é" * 5_000_000
    async with both(limits=PeerLimits(frame=16 << 20)) as (_, they, here):
        they._splitter._limit = 16 << 20

        answer = await they.call("echo", Text(text))

        assert answer.text == text
        assert here.seen == [text]


async def test_an_error_is_raised_at_the_caller() -> None:
    """The caller gets the reason of the other side's error."""

    async def refuse(here: Here, params: Text) -> Text:
        raise HutchError(Reason.NOT_ALLOWED, "Not today.")

    async with both(echo=refuse) as (_, they, _):
        with pytest.raises(HutchError, match="Not today") as caught:
            await they.call("echo", Text())

        assert caught.value.reason is Reason.NOT_ALLOWED


@pytest.mark.parametrize("result", [object(), 2**70], ids=["object", "huge"])
async def test_a_result_without_a_json_form_is_an_internal_error(result: Any) -> None:
    """The request is still answered."""

    async def wrong(here: Here, params: Text) -> Any:
        return result

    async with both(echo=wrong) as (_, they, _):
        with pytest.raises(HutchError) as caught:
            await they.call("echo", Text())

        assert caught.value.reason is Reason.INTERNAL


async def test_a_plain_function_answers_at_once() -> None:
    """Plain functions answer in the order of the requests."""

    def now(here: Here, params: Text) -> Text:
        return Text(params.text.upper())

    async with both(echo=now) as (_, they, _):
        assert await they.call("echo", Text("a")) == Text("A")


async def test_a_call_that_takes_too_long_is_given_up_and_its_late_answer_dropped() -> None:
    """The connection goes on."""
    async with both() as (_, they, here):
        with pytest.raises(HutchError) as caught:
            await they.call("get_data", timeout=0.01)
        here.gate.set()

        assert caught.value.reason is Reason.TIMED_OUT
        assert await they.call("echo", Text("on")) == Text("on")


async def test_a_caller_cancelled_in_mid_write_tears_no_line() -> None:
    """Its frame is sent whole, and so is the next one."""
    async with raw() as (we, theirs, _), anyio.create_task_group() as tasks:
        tasks.start_soon(we.call, "echo", Text("x" * 3_000_000))
        await anyio.wait_all_tasks_blocked()
        assert we.backlog > 0
        tasks.cancel_scope.cancel()
        with anyio.CancelScope(shield=True):
            await we.notify("stream", Text("next"))
            first, second = await read_lines(theirs, 2)

    assert len(first["params"]["text"]) == 3_000_000
    assert second["params"]["text"] == "next"


async def test_too_many_requests_in_flight_are_overloaded() -> None:
    """The requests in flight are answered."""
    async with raw(limits=PeerLimits(pending=2)) as (_, theirs, here):
        await theirs.send(b"".join(ask("get_data", number) + b"\n" for number in (1, 2, 3)))
        [refusal] = await read_lines(theirs, 1)
        here.gate.set()
        answers = await read_lines(theirs, 2)

    assert (refusal["id"], reason_of(refusal)) == (3, "overloaded")
    assert sorted(answer["id"] for answer in answers) == [1, 2]


# ---------------------------------------------------------------- order and back-pressure


async def test_notifications_are_delivered_in_order_one_after_the_other() -> None:
    """A request after notifications is handled after them."""
    running: list[str] = []

    async def slow(here: Here, params: Text) -> None:
        assert not running
        running.append(params.text)
        await anyio.lowlevel.checkpoint()
        here.seen.append(running.pop())

    async with both(stream=slow) as (_, they, here):
        for number in range(200):
            await they.notify("stream", Text(str(number)))
        await they.call("echo", Text("end"))

        assert here.seen == [*map(str, range(200)), "end"]


async def test_what_follows_a_notification_waits_until_it_is_done_with() -> None:
    """The next notification is decoded meanwhile, but no message is handled before it."""

    async def slow(here: Here, params: Text) -> None:
        here.entered.set()
        await here.gate.wait()
        here.seen.append(params.text)

    async def tell_all(_: None, params: Text) -> Text:
        for number in range(3):
            await they.notify("stream", Text(str(number)))
        return Text("answered")

    async with both(theirs={"echo": tell_all}, stream=slow) as (we, they, here), anyio.create_task_group() as tasks:

        async def ask_back() -> None:
            answer: Text = await we.call("echo", Text())
            here.seen.append(answer.text)

        tasks.start_soon(ask_back)
        await here.entered.wait()
        tasks.start_soon(they.call, "echo", Text("asked"))
        await anyio.wait_all_tasks_blocked()
        assert here.seen == []
        here.gate.set()
        await they.call("echo", Text("end"))

    assert here.seen[:3] == ["0", "1", "2"]
    assert sorted(here.seen[3:]) == ["answered", "asked", "end"]


async def test_what_came_before_the_other_side_closed_is_taken() -> None:
    """All of it is handled, however long that takes; then the connection ends."""

    async def slow(here: Here, params: Text) -> None:
        await anyio.wait_all_tasks_blocked()
        here.seen.append(params.text)

    async with raw(stream=slow) as (we, theirs, here):
        await theirs.send(b"".join(tell("stream", {"text": str(number)}) + b"\n" for number in range(5)))
        await theirs.aclose()
        await we.wait_closed()

        assert here.seen == ["0", "1", "2", "3", "4"]


async def test_a_consumer_that_is_full_stops_the_reading() -> None:
    """The sender's queue fills up, and the sender waits."""

    async def full(here: Here, params: Text) -> None:
        here.entered.set()
        await here.gate.wait()
        here.seen.append(params.text[:3])

    frame = tell("stream", {"text": "x" * 100_000}) + b"\n"
    async with both(stream=full) as (_, they, here), anyio.create_task_group() as tasks:

        async def flood() -> None:
            for _ in range(100):
                await they.notify_raw(frame)

        tasks.start_soon(flood)
        await here.entered.wait()
        await anyio.wait_all_tasks_blocked()
        assert they.backlog >= they._limits.queue_bytes
        assert here.seen == []
        here.gate.set()
        await they.call("echo", Text("end"))

        assert len(here.seen) == 101


async def test_a_side_that_does_not_read_is_not_read() -> None:
    """While its outgoing queue is full, a side accepts no request, so that the queue stays bounded."""
    limits = PeerLimits(queue_bytes=100_000)
    request = ask("echo", 1, {"text": "y" * 50_000}) + b"\n"
    async with raw(limits=limits) as (we, theirs, here), anyio.create_task_group() as tasks:

        async def flood() -> None:
            for number in range(100):
                await theirs.send(request.replace(b'"id": 1', b'"id": %d' % number))

        tasks.start_soon(flood)
        await anyio.wait_all_tasks_blocked()
        assert len(here.seen) < 100
        assert we.backlog < limits.queue_bytes + len(request)
        answers = await read_lines(theirs, 100)

    assert [answer["id"] for answer in answers] == list(range(100))


async def test_garbage_between_good_frames_costs_only_itself() -> None:
    """Each bad frame gets its error, and each good one its answer."""
    bad = [b"nonsense", b"\xff\xfe", b"[]", b'{"jsonrpc":"2.0","method":"echo","id":{}}', b"z" * 2000]
    async with raw(limits=PeerLimits(frame=1000)) as (_, theirs, _):
        for number, junk in enumerate(bad):
            await theirs.send(junk + b"\n" + ask("echo", number, {"text": "t"}) + b"\n")
        answers = await read_lines(theirs, 10)

    assert sorted(answer["id"] for answer in answers if answer["id"] is not None) == [0, 1, 2, 3, 4]
    assert [reason_of(answer) for answer in answers if answer["id"] is None] == [
        "parse_error",
        "parse_error",
        "invalid_request",
        "invalid_request",
        "frame_too_large",
    ]


# ---------------------------------------------------------------- the end


async def test_a_side_that_half_closes_still_gets_the_answers() -> None:
    """Running requests are answered before the connection ends."""
    async with raw() as (we, theirs, here):
        await theirs.send(ask("get_data", 1) + b"\n" + ask("echo", 2) + b"\n")
        await theirs.send_eof()
        await here.entered.wait()
        here.gate.set()
        text = await read_to_end(theirs)
        await we.wait_closed()

    assert sorted(json.loads(one)["id"] for one in text.splitlines()) == [1, 2]
    assert we.why == "the other side closed"


async def test_a_request_that_outlives_the_connection_is_cancelled() -> None:
    """It is cancelled after the deadline for closing."""
    async with raw(limits=PeerLimits(close=0.01)) as (we, theirs, here):
        await theirs.send(ask("get_data", 1) + b"\n")
        await here.entered.wait()
        await theirs.aclose()
        await here.cancelled.wait()
        await we.wait_closed()


async def test_closing_sends_what_is_queued_and_waits_for_the_other_side() -> None:
    """Then this side has closed too, and can send nothing more."""
    async with raw() as (we, theirs, _):
        for _ in range(10):
            await we.notify("stream", Text("x" * 100_000))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(we.aclose)
            text = await read_to_end(theirs)
            await theirs.aclose()
        with pytest.raises(HutchError) as caught:
            await we.notify("stream", Text())

    assert text.count(b"\n") == 10
    assert caught.value.reason is Reason.CONNECTION_LOST


async def test_closing_does_not_wait_for_ever() -> None:
    """The deadline for closing ends a connection whose peer neither reads nor closes."""
    async with raw(limits=PeerLimits(close=0.01)) as (we, _, _):
        await we.notify("stream", Text("x" * 3_000_000))
        await we.aclose()

    assert repr(we) == "<Peer closing: closed here, serves 0, calls 0, backlog 0>"


async def test_callers_learn_that_the_connection_was_lost() -> None:
    """Waiting calls get `connection_lost`, and so do later ones."""
    async with raw() as (we, theirs, _):
        async with anyio.create_task_group() as tasks:

            async def call() -> None:
                with pytest.raises(HutchError) as caught:
                    await we.call("echo", Text())
                assert caught.value.reason is Reason.CONNECTION_LOST

            tasks.start_soon(call)
            await read_lines(theirs, 1)
            await theirs.aclose()
        await call()


@pytest.mark.parametrize("when", range(6))
async def test_a_cancel_may_meet_the_end_of_the_stream(when: int) -> None:
    """In either order nothing is raised, and no task is left."""
    here = Here()
    ours, theirs = pair()
    we = serve(ours, here)
    with anyio.fail_after(BOUND):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(we.run)
            await theirs.send(ask("get_data", 1) + b"\n")
            await here.entered.wait()
            await theirs.aclose()
            for _ in range(when):
                await anyio.lowlevel.checkpoint()
            tasks.cancel_scope.cancel()
    await we.wait_closed()

    assert here.cancelled.is_set()


async def test_a_notification_that_could_not_be_taken_ends_the_connection() -> None:
    """A notification has no answer that could contain the error, and skipping it would lose data."""

    async def fail(here: Here, params: Text) -> None:
        here.seen.append(params.text)
        raise ValueError("disk")

    async with raw(stream=fail) as (we, theirs, here):
        await theirs.send(tell("stream", {"text": "1"}) + b"\n" + tell("stream", {"text": "2"}) + b"\n")
        assert await read_to_end(theirs) == b""
        await theirs.aclose()
        await we.wait_closed()

    assert here.seen == ["1"]
    assert isinstance(we.why, HutchError)
    assert "disk" not in str(we.why)


async def test_an_unfinished_frame_is_cut_off() -> None:
    """A peer that sends nothing before the first-frame deadline is closed too."""
    for sent, timeouts in ((b"{", Timeouts(frame=0.01)), (b"", Timeouts(first_frame=0.01))):
        async with raw(timeouts=timeouts) as (we, theirs, _):
            await theirs.send(sent)
            assert await read_to_end(theirs) == b""
            await we.wait_closed()

            assert "message" in str(we.why)


async def test_a_quiet_side_is_pinged_and_cut_off_when_it_does_not_answer() -> None:
    """The ping is an ordinary request."""
    async with raw(timeouts=Timeouts(quiet=0.01, pong=0.01)) as (we, theirs, _):
        text = await read_to_end(theirs)
        await we.wait_closed()

    assert json.loads(text)["method"] == "ping"
    assert we.why == "no answer to a ping"


async def test_pings_that_are_never_answered_do_not_pile_up() -> None:
    """Any received byte counts as life, and a new ping replaces the unanswered one."""
    async with raw(timeouts=Timeouts(quiet=0.001)) as (we, theirs, _):
        for _ in range(20):
            await theirs.receive()
            await theirs.send(b"\n")

        assert repr(we._conversation) == "<Conversation received 0, calls 1>"


async def test_a_side_that_does_not_read_is_cut_off_when_the_queue_is_full() -> None:
    """Callers that wait for space get `connection_lost`."""
    async with raw(limits=PeerLimits(queue_bytes=1000), timeouts=Timeouts(unread=0.01)) as (we, _, _):
        for _ in range(3):
            with contextlib.suppress(HutchError):
                await we.notify("stream", Text("x" * 1_000_000))
        with pytest.raises(HutchError):
            await we.notify("stream", Text())
        await we.wait_closed()

    assert we.why == "the other side does not read"


async def test_what_the_body_raises_comes_out_of_serving_as_it_is() -> None:
    """It is not wrapped in an exception group."""
    ours, theirs = pair()
    with anyio.fail_after(BOUND):
        async with client(theirs).serving():
            with pytest.raises(KeyError):
                async with serve(ours, Here()).serving():
                    raise KeyError("mine")


def test_a_side_that_serves_no_requests_starts_quickly() -> None:
    """It does not import jsonrpcserver, so a client starts quickly."""
    script = (
        "import anyio, socket, sys; from hutch_shared.methods import CLIENT, TO_CLIENT;"
        "from hutch_shared.rpc.dispatch import Dispatcher; from hutch_shared.rpc.peer import Peer\n"
        "from hutch_shared.rpc.stream import SocketStream\n"
        "async def main():\n"
        "    stream = SocketStream(socket.socketpair()[0])\n"
        "    handlers = {'event': lambda context, event: None}\n"
        "    await Peer(stream, serves=Dispatcher(TO_CLIENT, handlers), sends=CLIENT, context=None).aclose()\n"
        "anyio.run(main); print([m for m in ('jsonrpcserver', 'jsonschema', 'structlog') if m in sys.modules])"
    )

    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)

    assert found.stdout == "[]\n"


async def test_any_byte_stream_works() -> None:
    """The peer needs no socket."""
    to_us: tuple[MemoryObjectSendStream[bytes], MemoryObjectReceiveStream[bytes]] = anyio.create_memory_object_stream(4)
    to_them: tuple[MemoryObjectSendStream[bytes], MemoryObjectReceiveStream[bytes]] = anyio.create_memory_object_stream(
        4
    )
    ours = InMemory(to_them[0], to_us[1])
    theirs = InMemory(to_us[0], to_them[1])
    with anyio.fail_after(BOUND):
        async with serve(ours, Here()).serving(), client(theirs).serving() as they:
            assert await they.call("echo", Text("x" * 1_000_000)) == Text("x" * 1_000_000)


class InMemory(ByteStream):
    """Two object streams of bytes as one byte stream."""

    def __init__(self, out: MemoryObjectSendStream[bytes], into: MemoryObjectReceiveStream[bytes]) -> None:
        self.out = out
        self.into = into

    async def receive(self, max_bytes: int = 65536) -> bytes:
        return await self.into.receive()

    async def send(self, item: bytes) -> None:
        await self.out.send(item)

    async def send_eof(self) -> None:
        await self.out.aclose()

    async def aclose(self) -> None:
        await self.out.aclose()
        await self.into.aclose()
