"""The splitter: bytes in any chunks, frames out."""

from __future__ import annotations

import tracemalloc
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from hutch_shared.rpc.stream import OVERSIZED, FrameSplitter


def feed_all(splitter: FrameSplitter, chunks: list[bytes]) -> list[object]:
    return [frame for chunk in chunks for frame in splitter.feed(chunk)]


def test_a_frame_ends_at_a_line_feed_and_nowhere_else() -> None:
    """Other line ends of Unicode stay inside the frame."""
    splitter = FrameSplitter(100)

    assert splitter.feed("a\u2028\x85\x0b\r\nb".encode()) == ["a\u2028\x85\x0b\r".encode()]
    assert splitter.in_frame


def test_blank_lines_are_no_frames() -> None:
    """Blanks between line ends are skipped, also if they arrive in pieces."""
    splitter = FrameSplitter(100)

    assert feed_all(splitter, [b"\n \r\n", b"  ", b"\n", b"\t{}\n"]) == [b"{}"]
    assert not splitter.in_frame


def test_an_oversized_frame_costs_that_frame_only() -> None:
    """It is reported once, as soon as it exceeds the limit.

    The rest of its line is skipped, and the next frame is read.
    """
    splitter = FrameSplitter(4)

    assert splitter.feed(b"abcd\n12345") == [b"abcd", OVERSIZED]
    assert splitter.in_frame
    assert splitter.feed(b"678") == []
    assert splitter.feed(b"9\nok\n") == [b"ok"]
    assert splitter.feed(b"123456\nok\n") == [OVERSIZED, b"ok"]


@given(
    st.lists(st.binary(max_size=12).map(lambda line: line.replace(b"\n", b" ")), max_size=12),
    st.lists(st.integers(0, 160), max_size=12),
)
def test_chunks_make_no_difference(lines: list[bytes], cuts: list[int]) -> None:
    """The frames depend on the bytes alone, not on how they were cut."""
    text = b"\n".join(lines)
    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    chunks = [text[start:end] for start, end in pairwise(edges)]

    whole = feed_all(FrameSplitter(8), [text])

    assert feed_all(FrameSplitter(8), chunks) == whole
    assert feed_all(FrameSplitter(8), [bytes([byte]) for byte in text]) == whole


def test_memory_stays_below_the_limit_and_a_chunk() -> None:
    """A line without an end is dropped at the limit."""
    splitter = FrameSplitter(1 << 16)
    chunk = b"x" * 4096
    tracemalloc.start()
    try:
        for _ in range(2000):
            splitter.feed(chunk)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert peak < 1 << 18
