"""The outbox: which events are kept and sent, for any order of events, acknowledgements and connections."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hutch_executor.events.outbox import BATCH_BYTES, BATCH_COUNT, Outbox


def filled(count: int, **limits: int) -> Outbox:
    """Return an outbox with events b"1", b"2", …"""
    outbox = Outbox(**limits)
    for n in range(1, count + 1):
        outbox.put(b"%d" % n)
    return outbox


def test_unacknowledged_events_are_sent_again_on_a_new_connection() -> None:
    """A connection starts at the first event that hutchd does not have."""
    outbox = filled(5)
    outbox.rewind(0)
    outbox.sent = 5

    outbox.rewind(2)

    stretch = outbox.to_send()
    assert stretch is not None
    assert (stretch.first, stretch.events) == (3, (b"3", b"4", b"5"))
    assert repr(outbox) == "<Outbox acked 2, spooled to 2, sent 2, last 5>"


def test_an_acknowledgement_covers_only_sent_events() -> None:
    """An acknowledgement cannot drop an event that was never sent."""
    outbox = filled(5)
    outbox.rewind(0)
    outbox.sent = 3

    outbox.ack(5)

    assert outbox.unacked == 2


def test_a_hutchd_with_more_events_than_were_made_is_refused() -> None:
    """A hutchd that claims events that were never made is not this executor's."""
    assert not filled(5).rewind(6)


def test_an_event_of_any_size_has_room_in_an_empty_memory() -> None:
    """The limit of bytes never blocks a large event for good."""
    outbox = Outbox(bytes_limit=10)
    assert outbox.has_room(1000)

    outbox.put(bytes(1000))

    assert not outbox.has_room(1)


def test_memory_is_bounded_by_count() -> None:
    """A full memory has no room until something is acknowledged or spooled."""
    outbox = filled(3, count_limit=3)
    assert not outbox.has_room(1)

    stretch = outbox.to_spool()
    assert stretch is not None
    outbox.moved_to_spool(stretch)

    assert outbox.has_room(1)
    assert outbox.unsent_in_spool()


def test_a_batch_is_bounded_by_count() -> None:
    """No frame holds more than a batch of events."""
    stretch = filled(BATCH_COUNT + 1).to_send()

    assert stretch is not None
    assert stretch.last == BATCH_COUNT


def test_an_event_acknowledged_while_being_spooled_is_forgotten_once() -> None:
    """Writing to the spool and an acknowledgement may overlap."""
    outbox = filled(4)
    outbox.rewind(0)
    outbox.sent = 4
    stretch = outbox.to_spool()
    assert stretch is not None

    outbox.ack(2)
    outbox.moved_to_spool(stretch)

    assert repr(outbox) == "<Outbox acked 2, spooled to 4, sent 4, last 4>"
    assert outbox.in_memory == 0


def test_a_batch_is_full_by_count_or_by_bytes() -> None:
    """Unsent events fill a batch when no more fit into it, or when they lie in the spool."""
    by_count, by_bytes, spooled = filled(BATCH_COUNT - 1), Outbox(), filled(2)
    full = [by_count.fills_batch()]
    by_count.put(b"one more")
    by_bytes.put(b"x" * BATCH_BYTES)
    stretch = spooled.to_spool()
    assert stretch is not None
    spooled.moved_to_spool(stretch)
    full += [by_count.fills_batch(), by_bytes.fills_batch(), spooled.fills_batch()]
    by_bytes.sent = 1

    assert full == [False, True, True, True]
    assert not by_bytes.fills_batch()


@given(st.lists(st.tuples(st.sampled_from(["put", "send", "ack", "spool", "reconnect"]), st.integers(0, 5))))
def test_the_parts_always_make_up_the_whole(steps: list[tuple[str, int]]) -> None:
    """The acknowledged, the spooled and the remembered events follow each other without gap or overlap."""
    outbox = Outbox()
    outbox.rewind(0)

    for step, by in steps:
        if step == "put":
            outbox.put(b"%d" % (outbox.last + 1))
        elif step == "send" and not outbox.unsent_in_spool() and (stretch := outbox.to_send()):
            outbox.sent = min(stretch.first + by, stretch.last)
        elif step == "ack":
            outbox.ack(outbox.acked + by)
        elif step == "spool" and (stretch := outbox.to_spool()):
            outbox.moved_to_spool(stretch)
        elif step == "reconnect":
            outbox.rewind(min(outbox.acked + by, outbox.last))

        assert outbox.acked <= outbox.spooled <= outbox.last
        assert outbox.acked <= outbox.sent <= outbox.last
        assert outbox.in_memory == outbox.last - outbox.spooled
        stretch = outbox.to_spool()
        assert stretch is None or stretch.events[0] == b"%d" % (outbox.spooled + 1)
