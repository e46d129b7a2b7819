"""Arbitrary bytes in arbitrary chunks: one answer for each valid id, no crash, no growth."""

from __future__ import annotations

import gc
import json
import random
import tracemalloc
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from hutch_shared.rpc.conversation import Conversation, RequestReceived, SendFrame
from hutch_shared.rpc.stream import FrameSplitter
from tests.spec.words import ASKED, ASKING, Text, ask, line, tell

IDS = st.integers(0, 30) | st.sampled_from(["a", "b", "é", "1", ""])
GOOD = st.builds(ask, st.sampled_from(["echo", "sum", "nonsense"]), IDS, st.none() | st.just({"text": "x"}))
OTHER = st.one_of(
    st.binary(max_size=40).map(lambda junk: junk.replace(b"\n", b"")),
    st.builds(tell, st.sampled_from(["update", "stream", "nonsense"]), st.none() | st.just({"text": "x"})),
    st.sampled_from(
        [
            b"[]",
            b"[1]",
            b"{}",
            b"null",
            b'{"jsonrpc":"2.0","method":"echo","id":null}',
            b'{"jsonrpc":"2.0","method":"echo","id":1.5}',
            b'{"jsonrpc":"2.0","result":{},"id":1}',
            b'{"jsonrpc":"2.0","method":"stream","params":{"text":"\\ud800"}}',
            b'{"jsonrpc":"2.0","method":"echo","id":"x","id":"y"}',
            b"[" * 300,
            b"9" * 600,
        ]
    ),
)


class Wire:
    """One end of a connection. It sends the answers in the order that the test chooses."""

    def __init__(self, limit: int = 1 << 12, *, at_once: bool = False) -> None:
        self.at_once = at_once
        self.splitter = FrameSplitter(limit)
        self.conversation = Conversation(ASKED, ASKING)
        self.answers: list[Any] = []
        self.asked: list[RequestReceived] = []

    def feed(self, chunk: bytes) -> None:
        for frame in self.splitter.feed(chunk):
            for event in self.conversation.receive(frame):
                if isinstance(event, RequestReceived):
                    self.asked.append(event)
                elif isinstance(event, SendFrame):
                    self.take(event.frame)
            if self.at_once:
                self.answer_all()

    def answer_all(self) -> None:
        for asked in self.asked:
            frame = self.conversation.answer(asked.ticket, Text("done"))
            if frame is not None:
                self.take(frame)
        self.asked.clear()

    def take(self, frame: bytes) -> None:
        assert frame.count(b"\n") == 1
        answer = json.loads(frame)
        self.answers += answer if isinstance(answer, list) else [answer]


def cut(text: bytes, seed: int) -> list[bytes]:
    dice = random.Random(seed)
    chunks = []
    while text:
        size = dice.choice([1, 2, 3, 7, 50, 1000])
        chunks.append(text[:size])
        text = text[size:]
    return chunks


@settings(max_examples=150)
@given(st.lists(st.tuples(st.booleans(), GOOD, OTHER), max_size=25), st.integers(0, 2**16), st.booleans())
def test_each_valid_id_is_answered_once_whatever_comes_between(
    talk: list[tuple[bool, bytes, bytes]], seed: int, at_once: bool
) -> None:
    """An id that is in flight again is refused without an id, so that each has exactly one answer."""
    wire = Wire(at_once=at_once)
    lines = [good if is_good else other for is_good, good, other in talk]
    good = [json.loads(good)["id"] for is_good, good, _ in talk if is_good]

    for chunk in cut(b"".join(one + b"\n" for one in lines), seed):
        wire.feed(chunk)
    wire.answer_all()

    answered = [answer["id"] for answer in wire.answers if answer["id"] is not None]
    expected = good if at_once else list({json.dumps(number): number for number in good}.values())
    assert sorted(map(json.dumps, answered)) == sorted(map(json.dumps, expected))
    assert wire.conversation.in_flight == 0


@settings(max_examples=150)
@given(st.binary(max_size=600), st.integers(0, 2**16))
def test_bytes_that_mean_nothing_crash_nothing(junk: bytes, seed: int) -> None:
    """The next good request is answered."""
    wire = Wire(limit=300)

    for chunk in cut(junk + b"\n" + ask("echo", "after", {}) + b"\n", seed):
        wire.feed(chunk)
    wire.answer_all()

    assert wire.answers[-1] == {"jsonrpc": "2.0", "result": {"text": "done"}, "id": "after"}


def test_a_long_stream_of_garbage_leaves_nothing_behind() -> None:
    """Memory does not grow."""
    wire = Wire()
    dice = random.Random(7)
    lines = [
        dice.randbytes(60).replace(b"\n", b""),
        line({"jsonrpc": "2.0", "result": 1, "id": 5}),
        line([json.loads(tell("update")), 7]),
        b"[" * 200,
        b"x" * 5000,
        ask("echo", 1),
    ]
    chunk = b"".join(one + b"\n" for one in lines)

    def run(times: int) -> int:
        for _ in range(times):
            wire.feed(chunk)
            wire.answer_all()
            wire.answers.clear()
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        first = run(20)
        last = run(200)
    finally:
        tracemalloc.stop()

    assert last - first < 20_000
