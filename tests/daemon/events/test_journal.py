"""The journal: hutchd's own events, and how events are encoded for the wire."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import msgspec
import pytest

from hutch_daemon.events.journal import Journal, event_frame, event_json
from hutch_daemon.store.rows import StoredEvent
from hutch_daemon.store.store import Store
from hutch_shared.errors import HutchError, Reason
from hutch_shared.events import Event, Notice, Text, TurnStarted
from tests.daemon.store.examples import report, with_session

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
    """The envelope is hutchd's; data and native are the stored bytes."""
    text = (
        b'{"session":"s-aaaa","seq":3,"position":7,"at":"2026-01-31T12:00:00.123Z","kind":"text","turn":"t-1",'
        b'"data":{"text" : "h\xc3\xa9"},"native":[ 1]}'
    )

    assert event_json(STORED) == text
    assert event_frame(STORED, 5) == (b'{"jsonrpc":"2.0","method":"event","params":{"follow":5,' + text[1:] + b"}\n")


@pytest.mark.parametrize("turn", [None, "t-1", 'a"\\\n\x00é'])
def test_a_spelled_event_reads_back_as_the_wire_type(turn: str | None) -> None:
    """Whatever an executor calls a turn, the line stays one JSON object on one line."""
    line = event_frame(replace(STORED, turn=turn), 5)

    read = msgspec.json.decode(msgspec.json.decode(line, type=dict[str, msgspec.Raw])["params"], type=Event)
    assert line.count(b"\n") == 1
    assert (read.turn, read.seq, read.position, read.follow, read.kind) == (turn, 3, 7, 5, "text")
    assert bytes(read.data) == b'{"text" : "h\xc3\xa9"}'


async def test_an_event_of_hutchds_own_is_kept_in_the_unit_that_makes_it_true(store: Store) -> None:
    """The event is stored with its data, or not at all if the unit fails."""
    journal = Journal(store)
    await with_session(store)
    started = TurnStarted(prompt="go", number=1)
    await store.write(partial(journal.append, session="s-aaaa", turn="t-1", kind="turn_started", data=started))

    page = await journal.read("s-aaaa", 0)
    assert [(event.kind, event.body) for event in page.events] == [
        ("turn_started", b'"data":{"prompt":"go","number":1}')
    ]
    assert journal.id == store.journal


async def test_data_of_another_kind_is_a_mistake_of_the_code(store: Store) -> None:
    """The kind decides the type of the data."""
    journal = Journal(store)
    await with_session(store)

    with pytest.raises(AssertionError, match="Text is not the data of notice"):
        await store.write(partial(journal.append, session="s-aaaa", turn=None, kind="notice", data=Text("x")))

    assert (await journal.seq_range("s-aaaa")).head == 0


async def test_no_event_goes_to_a_session_that_is_not_there(store: Store) -> None:
    """Appending needs its session."""
    journal = Journal(store)
    with pytest.raises(HutchError) as caught:
        await store.write(partial(journal.append, session="s-none", turn=None, kind="notice", data=Notice("w", "m")))

    assert caught.value.reason is Reason.NOT_FOUND


async def test_a_page_of_history_is_not_empty_while_there_is_more(store: Store) -> None:
    """A client that polls and skips kinds always makes progress."""
    journal = Journal(store)
    await with_session(store)
    await report(store, *range(1, 8), kind="text_delta")
    await report(store, 8)

    page = await journal.read("s-aaaa", 0, limit=2, skip=["text_delta"])
    last = await journal.read("s-aaaa", page.cursor, limit=2, skip=["text_delta"])
    assert [event.seq for event in page.events] == [8]
    assert (last.events, last.more) == ((), False)


async def test_pruning_goes_on_until_it_is_done(store: Store) -> None:
    """All events that are too old are removed, in short steps."""
    journal = Journal(store)
    await with_session(store)
    await report(store, *range(1, 1201))

    pruned = await journal.prune(before=1_700_000_001_100)

    assert pruned == 1099
    assert (await journal.seq_range("s-aaaa")).oldest == 1100
