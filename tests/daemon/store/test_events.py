"""The table of events: numbers, receipts, pages, retention."""

from __future__ import annotations

from functools import partial

import msgspec
import pytest

from hutch_daemon.store import events, executors
from hutch_daemon.store.store import Store
from hutch_shared.errors import HutchError, Reason
from hutch_shared.events import Notice, ReportedEvent, Text, TurnStarted
from tests.daemon.store.examples import AT, report, reported, with_session


@pytest.fixture
async def opened(store: Store) -> Store:
    await with_session(store)
    return store


async def test_events_are_numbered_without_gaps_whoever_appends_them(opened: Store) -> None:
    """An executor's and hutchd's own events share the numbers of their session."""
    first = await report(opened, 1, 2)
    own = await opened.write(
        partial(events.append, session="s-aaaa", turn=None, kind="notice", data=Notice("word", "Said."))
    )
    last = await report(opened, 3)

    assert [(e.seq, e.position) for e in (*first, own, *last)] == [(1, 1), (2, 2), (3, 3), (4, 4)]


async def test_an_event_of_hutchds_own_is_stored_with_its_data(opened: Store) -> None:
    """The event is stored in the transaction of the change that it reports."""
    started = TurnStarted(prompt="go", number=1)
    await opened.write(partial(events.append, session="s-aaaa", turn="t-1", kind="turn_started", data=started))

    page = await opened.read(partial(events.read, session="s-aaaa", after=0))
    assert [(event.kind, event.body) for event in page.events] == [
        ("turn_started", b'"data":{"prompt":"go","number":1}')
    ]


async def test_data_of_another_kind_is_a_bug(opened: Store) -> None:
    """The kind decides the type of the data."""
    with pytest.raises(AssertionError, match="Text is not the data of notice"):
        await opened.write(partial(events.append, session="s-aaaa", turn=None, kind="notice", data=Text("x")))

    assert (await opened.read(partial(events.seq_range, session="s-aaaa"))).head == 0


async def test_no_event_goes_to_a_session_that_is_not_there(store: Store) -> None:
    """An event cannot be appended without its session."""
    with pytest.raises(HutchError) as caught:
        await store.write(partial(events.append, session="s-none", turn=None, kind="notice", data=Notice("w", "m")))

    assert caught.value.reason is Reason.NOT_FOUND


async def test_seqs_are_of_a_session_and_positions_of_all(opened: Store) -> None:
    """Each session counts from 1; positions rise over all of them in the order of commits."""
    await with_session(opened, "s-bbbb", "x-2")
    await report(opened, 1)
    (other,) = await report(opened, 1, session="s-bbbb", executor="x-2")
    (mine,) = await report(opened, 2)

    assert [(e.seq, e.position) for e in (other, mine)] == [(1, 2), (2, 3)]


async def test_payloads_are_stored_byte_for_byte(opened: Store) -> None:
    """Spaces, escapes, key order and native are unchanged."""
    raw = b'{"b" : 1.50,\t"a":"\\u00e9\xc3\xa9"}'
    event = ReportedEvent(
        n=1, at="2026-01-31T13:00:00.123+01:00", kind="text", data=msgspec.Raw(raw), native=msgspec.Raw(b" [1 ] ")
    )
    await opened.write(partial(events.append_reported, executor="x-1", session="s-aaaa", events=[event]))

    page = await opened.read(partial(events.read, session="s-aaaa", after=0))

    assert page.events[0].body == b'"data":' + raw + b',"native": [1 ] '
    assert (page.events[0].at, page.events[0].turn) == (1_769_860_800_123, None)


async def test_a_repeated_event_is_acknowledged_and_not_stored(opened: Store) -> None:
    """Events numbered at or below the receipt are dropped; later ones are stored."""
    await report(opened, 1, 2, 3)
    again, acked = await opened.write(
        partial(events.append_reported, executor="x-1", session="s-aaaa", events=reported(2, 3))
    )
    overlap, acked_then = await opened.write(
        partial(events.append_reported, executor="x-1", session="s-aaaa", events=reported(3, 4))
    )

    row = await opened.read(partial(executors.get, executor="x-1"))
    assert (again, acked) == ([], 3)
    assert ([event.seq for event in overlap], acked_then) == ([4], 4)
    assert row is not None
    assert row.acked_n == 4


@pytest.mark.parametrize("numbers", [(2,), (1, 3), (1, 1), (2, 1)])
async def test_a_gap_in_an_executors_numbers_is_refused_whole(opened: Store, numbers: tuple[int, ...]) -> None:
    """Nothing of a report with a gap is stored."""
    with pytest.raises(HutchError) as caught:
        await report(opened, *numbers)

    assert caught.value.reason is Reason.INVALID_REQUEST
    assert await opened.read(partial(events.seq_range, session="s-aaaa")) == events.SeqRange(head=0, oldest=1)


async def test_an_invalid_time_refuses_the_report(opened: Store) -> None:
    """The error blames the executor, and nothing of the report is stored."""
    bad = msgspec.structs.replace(reported(2)[0], at="yesterday")
    with pytest.raises(HutchError) as caught:
        await opened.write(
            partial(events.append_reported, executor="x-1", session="s-aaaa", events=[*reported(1), bad])
        )

    assert caught.value.reason is Reason.INVALID_PARAMS
    assert (await opened.read(partial(events.seq_range, session="s-aaaa"))).head == 0


@pytest.mark.parametrize(("executor", "session"), [("x-none", "s-aaaa"), ("x-1", "s-none")])
async def test_reports_without_executor_or_session_are_refused(opened: Store, executor: str, session: str) -> None:
    """Both the executor and the session must exist."""
    with pytest.raises(HutchError) as caught:
        await report(opened, 1, executor=executor, session=session)

    assert caught.value.reason is Reason.NOT_FOUND


async def test_pages_cover_history_once(opened: Store) -> None:
    """Paging by cursor returns each event once and in order; the last page says that it is the last."""
    await report(opened, *range(1, 8))
    seen: list[int] = []
    after, pages, more = 0, 0, True
    while more:
        page = await opened.read(partial(events.read, session="s-aaaa", after=after, limit=3))
        seen += [event.seq for event in page.events]
        after, more, pages = page.cursor, page.more, pages + 1

    assert (seen, pages) == ([1, 2, 3, 4, 5, 6, 7], 3)


async def test_a_page_ends_with_the_event_that_fills_it(opened: Store) -> None:
    """A page is bounded in bytes, but a single larger event still passes."""
    await report(opened, 1, 2, 3, size=1000)

    page = await opened.read(partial(events.read, session="s-aaaa", after=0, max_bytes=1500))
    small = await opened.read(partial(events.read, session="s-aaaa", after=0, max_bytes=1))

    assert ([event.seq for event in page.events], page.cursor, page.more) == ([1, 2], 2, True)
    assert ([event.seq for event in small.events], small.more) == ([1], True)


async def test_skipped_kinds_move_the_cursor(opened: Store) -> None:
    """A page that contains only skipped events is empty, and its cursor is after them."""
    await report(opened, 1, 2, kind="text_delta")
    await report(opened, 3)

    first = await opened.read(partial(events.read, session="s-aaaa", after=0, limit=2, skip=["text_delta"]))
    rest = await opened.read(partial(events.read, session="s-aaaa", after=2, limit=2, skip=["text_delta"]))

    assert first == events.Page((), cursor=2, more=True)
    assert ([event.seq for event in rest.events], rest.cursor, rest.more) == ([3], 3, False)


async def test_all_sessions_are_read_by_position_and_owner(opened: Store) -> None:
    """`"*"` returns the events of all users or, if an owner is given, of that owner."""
    await with_session(opened, "s-bbbb", "x-2", owner=2000)
    await report(opened, 1)
    await report(opened, 1, session="s-bbbb", executor="x-2")
    await report(opened, 2)

    every = await opened.read(partial(events.read, session="*", after=0))
    mine = await opened.read(partial(events.read, session="*", after=1, owner=1000))

    assert [event.position for event in every.events] == [1, 2, 3]
    assert ([event.position for event in mine.events], mine.cursor) == ([3], 3)


async def test_a_foreign_session_looks_missing(opened: Store) -> None:
    """Reading with an owner finds only that owner's sessions."""
    with pytest.raises(HutchError) as caught:
        await opened.read(partial(events.read, session="s-aaaa", after=0, owner=2000))

    assert caught.value.reason is Reason.NOT_FOUND


async def test_pruning_by_age_keeps_recent_events_and_refuses_old_cursors(opened: Store) -> None:
    """A cursor before the oldest kept event gets `compacted` with that event's number, by seq and by position."""
    await with_session(opened, "s-bbbb", "x-2")
    await report(opened, 1, 2)
    await report(opened, 1, session="s-bbbb", executor="x-2")
    await report(opened, 3, 4)

    pruned = await opened.write(partial(events.prune, before=AT + 3))
    none = await opened.write(partial(events.prune, before=AT + 3))

    details = {}
    for session in ("s-aaaa", "*"):
        with pytest.raises(HutchError) as caught:
            await opened.read(partial(events.read, session=session, after=1))
        details[session] = (caught.value.reason, caught.value.details)
    page = await opened.read(partial(events.read, session="s-aaaa", after=2))
    assert (pruned, none) == (3, 0)
    assert details == {"s-aaaa": (Reason.COMPACTED, {"oldest": 3}), "*": (Reason.COMPACTED, {"oldest": 4})}
    assert [event.seq for event in page.events] == [3, 4]
    assert await opened.read(partial(events.seq_range, session="s-bbbb")) == events.SeqRange(head=1, oldest=2)


async def test_pruning_by_size_goes_from_the_oldest(opened: Store) -> None:
    """Events are removed until the database fits its bound; their pages are reused."""
    await report(opened, *range(1, 101), size=20_000)

    total = 0
    while count := await opened.write(partial(events.prune, max_bytes=1_000_000)):
        total += count

    bounds = await opened.read(partial(events.seq_range, session="s-aaaa"))
    assert 50 <= total < 100
    assert bounds == events.SeqRange(head=100, oldest=total + 1)
    before = opened.status().bytes
    await report(opened, *range(101, 111), size=20_000)
    assert opened.status().bytes == before


async def test_numbers_continue_after_everything_was_pruned(opened: Store) -> None:
    """Numbers continue after all events were removed."""
    await report(opened, 1, 2)
    await opened.write(partial(events.prune, before=AT * 2))

    (event,) = await report(opened, 3)

    assert (event.seq, event.position) == (3, 3)
