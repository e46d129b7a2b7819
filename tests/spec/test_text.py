"""Text from outside as valid Unicode, and JSON from a lax writer."""

from __future__ import annotations

import json
import math
from random import Random

import msgspec
import pytest

from hutch_shared.text import is_valid_text, read_lax_json, split_surrogate, valid_text, valid_value
from tests.sampling import seed


@pytest.mark.parametrize(
    ("text", "valid"),
    [
        ("plain é 😀", "plain é 😀"),
        ("half \ud83d and rest", "half \ufffd and rest"),
        ("\ud83d", "\ufffd"),
        ("\ude00\ud83d", "\ufffd\ufffd"),
        ("\ud83d\ude00", "😀"),
        ("\ud83d\ud83d\ude00x", "\ufffd😀x"),
        ("caf\udce9", "caf\ufffd"),
    ],
)
def test_a_lone_surrogate_becomes_a_replacement_character(text: str, valid: str) -> None:
    """Two halves that meet are one character; each other half is replaced by itself."""
    assert valid_text(text) == valid
    assert is_valid_text(text) == (text == valid)


def test_the_text_around_a_lone_surrogate_is_kept() -> None:
    """Random texts: the result has a UTF-8 form, and everything that had one is unchanged."""
    random = Random(seed())
    for _ in range(2000):
        text = "".join(random.choice("aé€😀\ud83d\ude00\udce9\x00\n") for _ in range(random.randrange(12)))
        valid = valid_text(text)

        assert valid.encode().decode() == valid
        assert [c for c in valid if c in "aé€\x00\n"] == [c for c in text if c in "aé€\x00\n"]
        assert valid_text(valid) == valid


@pytest.mark.parametrize(
    ("text", "split"),
    [("", ("", "")), ("a", ("a", "")), ("a\ud83d", ("a", "\ud83d")), ("a\ude00", ("a\ude00", "")), ("😀", ("😀", ""))],
)
def test_a_high_surrogate_at_the_end_can_wait_for_its_other_half(text: str, split: tuple[str, str]) -> None:
    """A low surrogate at the end waits for nothing."""
    assert split_surrogate(text) == split


def test_every_part_of_a_value_becomes_valid() -> None:
    """Keys and nested texts are replaced; numbers without a JSON form become null."""
    value = {"a\ud83d": ["\ude00", {"x": math.nan, "y": -math.inf, "z": 10**400, "n": 1.5, "i": -3, "b": True}]}

    valid = valid_value(value)

    assert valid == {"a\ufffd": ["\ufffd", {"x": None, "y": None, "z": None, "n": 1.5, "i": -3, "b": True}]}
    assert msgspec.json.decode(msgspec.json.encode(valid)) == valid


@pytest.mark.parametrize(
    ("line", "value"),
    [
        (rb'{"x":"\ud83d"}', {"x": "\ud83d"}),
        (rb'{"x":"\ud83d\ude00"}', {"x": "😀"}),
        (b'{"x":"\xff\x01"}', {"x": "\ufffd\x01"}),
        (b"[" + b"9" * 5000 + b",1e999,-3]", [math.inf, math.inf, -3]),
    ],
)
def test_json_of_a_lax_writer_is_read(line: bytes, value: object) -> None:
    """Lone surrogates, bytes that are not UTF-8, control characters and numbers of any length are no error."""
    assert read_lax_json(line) == value


@pytest.mark.parametrize("line", [b"", b"{", b'{"x":}', b"nonsense", b'{"x":1} x'])
def test_what_is_not_json_is_an_error(line: bytes) -> None:
    """The error is a ValueError, as of every JSON reader."""
    with pytest.raises(ValueError, match=r"."):
        read_lax_json(line)


def test_a_value_that_is_nested_too_deeply_is_an_error() -> None:
    """It is a RecursionError, from the reader or from the replacement."""
    with pytest.raises(RecursionError):
        valid_value(read_lax_json(b"[" * 100_000 + b"]" * 100_000))


def test_valid_json_reads_the_same_in_both_readers() -> None:
    """The lax reader changes nothing of a sound line."""
    line = json.dumps({"a": [1, -2.5, True, None, "é😀\u2028"], "b": {}}).encode()

    assert valid_value(read_lax_json(line)) == msgspec.json.decode(line)
