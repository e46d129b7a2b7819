"""How events are encoded for the wire."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from hutch_daemon.events.fanout import event_frame, event_json
from hutch_daemon.store.rows import StoredEvent
from hutch_shared.events import Event

STORED = StoredEvent(
    position=7,
    session="s-aaaa",
    seq=3,
    owner=1000,
    turn="t-1",
    at=1_769_860_800_123,
    kind="text",
    body=b'"data":{"text" : "h\xc3\xa9"},"native":[ 1]',
)


def test_an_event_is_spelled_with_its_payload_as_it_came() -> None:
    """hutchd writes the envelope; data and native are the stored bytes."""
    text = (
        b'{"session":"s-aaaa","seq":3,"position":7,"at":"2026-01-31T12:00:00.123Z","kind":"text","turn":"t-1",'
        b'"data":{"text" : "h\xc3\xa9"},"native":[ 1]}'
    )

    assert event_json(STORED) == text
    assert event_frame(STORED, 5) == (b'{"jsonrpc":"2.0","method":"event","params":{"follow":5,' + text[1:] + b"}\n")


@pytest.mark.parametrize("turn", [None, "t-1", 'a"\\\n\x00é'])
def test_a_spelled_event_reads_back_as_the_wire_type(turn: str | None) -> None:
    """A turn's name from an executor cannot break the line or its JSON."""
    line = event_frame(replace(STORED, turn=turn), 5)

    read = msgspec.json.decode(msgspec.json.decode(line, type=dict[str, msgspec.Raw])["params"], type=Event)
    assert line.count(b"\n") == 1
    assert (read.turn, read.seq, read.position, read.follow, read.kind) == (turn, 3, 7, 5, "text")
    assert bytes(read.data) == b'{"text" : "h\xc3\xa9"}'
