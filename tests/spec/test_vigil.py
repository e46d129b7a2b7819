"""Deadlines, on a clock that the test turns."""

from __future__ import annotations

from math import inf

import pytest

from hutch_shared.rpc.vigil import Overdue, Patience, Vigil

PATIENT = Patience(first_frame=2, frame=30, quiet=30, pong=20, unread=60)


def test_a_connection_that_says_nothing_is_overdue() -> None:
    """Half a frame is nothing yet."""
    vigil = Vigil(PATIENT, 100)
    vigil.heard(101, completed=False, in_frame=True)

    assert vigil.overdue(101.9) is None
    assert vigil.overdue(102) is Overdue.FIRST_FRAME


def test_a_frame_must_end_in_time_however_it_trickles() -> None:
    """The deadline is of the frame's first byte."""
    vigil = Vigil(PATIENT, 0)
    vigil.heard(1, completed=True, in_frame=True)
    for now in range(2, 31):
        vigil.heard(now, completed=False, in_frame=True)
        assert vigil.overdue(now) is None

    assert vigil.overdue(31) is Overdue.FRAME


def test_the_next_frame_has_its_own_deadline() -> None:
    """A chunk may end one frame and begin another."""
    vigil = Vigil(Patience(frame=30), 0)
    vigil.heard(1, completed=True, in_frame=True)
    vigil.heard(20, completed=True, in_frame=True)

    assert vigil.overdue(49) is None
    assert vigil.overdue(50) is Overdue.FRAME


def test_a_quiet_side_is_asked_and_then_given_up() -> None:
    """Any byte is an answer."""
    vigil = Vigil(PATIENT, 0)
    vigil.heard(1, completed=True, in_frame=False)

    assert vigil.overdue(31) is Overdue.QUIET
    vigil.pinged(31)
    assert vigil.overdue(50) is None
    assert vigil.overdue(51) is Overdue.PONG
    vigil.heard(51, completed=True, in_frame=False)
    assert vigil.overdue(80) is None


def test_deadlines_stand_still_while_this_side_does_not_read() -> None:
    """What was left of them is left after it; the deadline for reading goes on."""
    vigil = Vigil(PATIENT, 0)
    vigil.heard(1, completed=True, in_frame=True)
    vigil.pause(11)
    vigil.full(20)

    assert vigil.overdue(79) is None
    assert vigil.overdue(80) is Overdue.UNREAD
    vigil.roomy()
    vigil.resume(100)
    assert vigil.overdue(119) is None
    assert vigil.overdue(120) is Overdue.QUIET
    assert repr(vigil) == "<Vigil quiet at 120, frame at 120>"


def test_a_side_that_takes_a_little_is_reading() -> None:
    """Each time something leaves the full queue the wait begins anew."""
    vigil = Vigil(Patience(unread=60), 0)
    vigil.full(0)
    vigil.full(50)

    assert vigil.overdue(109) is None
    assert vigil.overdue(110) is Overdue.UNREAD


@pytest.mark.parametrize("start", [0.0, 5.0, 29.0])
def test_whoever_looks_again_when_told_misses_nothing(start: float) -> None:
    """A deadline that is set after the look is not before the next one."""
    vigil = Vigil(PATIENT, 0)
    vigil.heard(0.5, completed=True, in_frame=False)
    wait = vigil.look_again(start)

    vigil.heard(start, completed=True, in_frame=True)

    assert start + wait <= start + 30
    assert vigil.overdue(start + wait - 0.001) is None


def test_without_patience_to_lose_there_is_nothing_to_look_for() -> None:
    """A client may wait for ever."""
    vigil = Vigil(Patience(frame=None, unread=None), 0)

    assert vigil.look_again(0) == inf
    assert vigil.overdue(10**9) is None
