"""The back-off, on a clock and with random numbers that the test gives."""

from __future__ import annotations

import pytest

from hutch_shared.backoff import Backoff


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_pauses_double_up_to_a_bound() -> None:
    """Pauses go from the first to the longest and never beyond it."""
    backoff = Backoff(1, 6, jitter=0)

    assert [backoff.next() for _ in range(5)] == [1, 2, 4, 6, 6]
    assert repr(backoff) == "<Backoff next 6 s of 1 to 6 s>"


def test_a_success_starts_over() -> None:
    """After `reset` the first pause comes again."""
    backoff = Backoff(1, 6, jitter=0)
    backoff.next()
    backoff.next()
    backoff.reset()

    assert backoff.next() == 1


@pytest.mark.parametrize(("rand", "pause"), [(0.0, 8.0), (0.5, 6.0), (0.999, 4.004)])
def test_jitter_takes_a_random_part_off(rand: float, pause: float) -> None:
    """A pause is shortened by at most the given part."""
    assert Backoff(8, 8, jitter=0.5, rand=lambda: rand).next() == pytest.approx(pause)


def test_a_failure_long_after_the_last_one_starts_over() -> None:
    """The time counts from the end of the last pause."""
    clock = Clock()
    backoff = Backoff(1, 8, jitter=0, steady=10, clock=clock)
    backoff.next()
    clock.now = 1 + 9
    second = backoff.next()
    clock.now += 2 + 10
    third = backoff.next()

    assert (second, third) == (2, 1)


@pytest.mark.parametrize(("first", "longest", "jitter"), [(0, 1, 0.5), (2, 1, 0.5), (1, 2, 1.5), (1, 2, -0.1)])
def test_bounds_that_make_no_sense_are_refused(first: float, longest: float, jitter: float) -> None:
    """A back-off without a pause, or with shrinking pauses, is a bug of the caller."""
    with pytest.raises(ValueError, match="back-off"):
        Backoff(first, longest, jitter=jitter)
