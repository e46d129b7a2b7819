"""Deadlines, on a clock that the test moves."""

from __future__ import annotations

from math import inf

import pytest

from hutch_shared.rpc.heartbeat import Deadlines, Expired, Timeouts

PATIENT = Timeouts(first_frame=2, frame=30, quiet=30, pong=20, unread=60)


def test_a_connection_without_a_first_frame_is_overdue() -> None:
    """Half a frame does not count as a frame."""
    deadlines = Deadlines(PATIENT, 100)
    deadlines.received(101, completed=False, in_frame=True)

    assert deadlines.expired(101.9) is None
    assert deadlines.expired(102) is Expired.FIRST_FRAME


def test_a_frame_must_end_in_time_however_it_trickles() -> None:
    """The deadline runs from the frame's first byte."""
    deadlines = Deadlines(PATIENT, 0)
    deadlines.received(1, completed=True, in_frame=True)
    for now in range(2, 31):
        deadlines.received(now, completed=False, in_frame=True)
        assert deadlines.expired(now) is None

    assert deadlines.expired(31) is Expired.FRAME


def test_the_next_frame_has_its_own_deadline() -> None:
    """A chunk may end one frame and begin another."""
    deadlines = Deadlines(Timeouts(frame=30), 0)
    deadlines.received(1, completed=True, in_frame=True)
    deadlines.received(20, completed=True, in_frame=True)

    assert deadlines.expired(49) is None
    assert deadlines.expired(50) is Expired.FRAME


def test_a_quiet_side_is_asked_and_then_given_up() -> None:
    """Any byte counts as an answer to the ping."""
    deadlines = Deadlines(PATIENT, 0)
    deadlines.received(1, completed=True, in_frame=False)

    assert deadlines.expired(31) is Expired.QUIET
    deadlines.ping_sent(31)
    assert deadlines.expired(50) is None
    assert deadlines.expired(51) is Expired.PONG
    deadlines.received(51, completed=True, in_frame=False)
    assert deadlines.expired(80) is None


def test_deadlines_stand_still_while_this_side_does_not_read() -> None:
    """Their remaining time is the same afterwards; the deadline for the peer's reading goes on."""
    deadlines = Deadlines(PATIENT, 0)
    deadlines.received(1, completed=True, in_frame=True)
    deadlines.pause(11)
    deadlines.queue_full(20)

    assert deadlines.expired(79) is None
    assert deadlines.expired(80) is Expired.UNREAD
    deadlines.queue_has_room()
    deadlines.resume(100)
    assert deadlines.expired(119) is None
    assert deadlines.expired(120) is Expired.QUIET
    assert repr(deadlines) == "<Deadlines quiet at 120, frame at 120>"


def test_a_side_that_takes_a_little_is_reading() -> None:
    """Each write from the full queue restarts the deadline for reading."""
    deadlines = Deadlines(Timeouts(unread=60), 0)
    deadlines.queue_full(0)
    deadlines.queue_full(50)

    assert deadlines.expired(109) is None
    assert deadlines.expired(110) is Expired.UNREAD


@pytest.mark.parametrize("start", [0.0, 5.0, 29.0])
def test_the_next_check_comes_before_any_deadline(start: float) -> None:
    """A deadline that is set after `next_check` does not pass before the time that it returned."""
    deadlines = Deadlines(PATIENT, 0)
    deadlines.received(0.5, completed=True, in_frame=False)
    wait = deadlines.next_check(start)

    deadlines.received(start, completed=True, in_frame=True)

    assert start + wait <= start + 30
    assert deadlines.expired(start + wait - 0.001) is None


def test_without_timeouts_there_is_no_next_check() -> None:
    """Without timeouts, `next_check` returns infinity."""
    deadlines = Deadlines(Timeouts(frame=None, unread=None), 0)

    assert deadlines.next_check(0) == inf
    assert deadlines.expired(10**9) is None
