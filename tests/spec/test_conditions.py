"""Conditions: what the log says about something that lasts."""

from __future__ import annotations

import logging

import pytest

from hutch_shared.conditions import REPEAT, Conditions


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    """A clock at 0."""
    return Clock()


@pytest.fixture
def conditions(clock: Clock, caplog: pytest.LogCaptureFixture) -> Conditions:
    """Conditions that log to `caplog`."""
    caplog.set_level(logging.INFO)
    return Conditions(logging.getLogger("test"), clock=clock)


def test_a_condition_is_logged_when_it_begins_once_a_minute_and_when_it_ends(
    conditions: Conditions, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """Four failures a second for five minutes are seven lines, and no failure is uncounted."""
    for quarter in range(5 * 60 * 4):
        clock.now = quarter / 4
        conditions.begin("full", "the disk is full")
    clock.now = 5 * REPEAT
    conditions.begin("full", "the disk is full")
    conditions.end("full", "the disk has space")
    conditions.end("full", "the disk has space")

    lines = [record.getMessage() for record in caplog.records]
    assert lines[0] == "the disk is full"
    assert lines[1] == "the disk is full (240 more times, for 60 s now)"
    assert lines[-1] == "the disk has space (after 300 s, 1201 times)"
    assert len(lines) == 7


def test_conditions_do_not_hide_each_other(conditions: Conditions, caplog: pytest.LogCaptureFixture) -> None:
    """Each name has its own count."""
    conditions.begin("full", "the disk is full")
    conditions.begin("down", "the broker is gone")
    conditions.end("full", "the disk has space")

    assert [record.getMessage() for record in caplog.records] == [
        "the disk is full",
        "the broker is gone",
        "the disk has space (after 0 s, 1 times)",
    ]
    assert "full" not in conditions
    assert "down" in conditions


def test_a_condition_that_flaps_is_one_condition(
    conditions: Conditions, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """Ten changes a second for five minutes are a line or two a minute; the last line tells what holds."""
    for tenth in range(5 * 60 * 10):
        clock.now = tenth / 10
        conditions.begin("full", "the disk is full")
        conditions.end("full", "the disk has space")
    clock.now += 2 * REPEAT
    conditions.begin("full", "the disk is full")

    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) <= 12
    assert lines[1] == "the disk has space (after 0 s, 1 times)"
    assert lines[-2:] == [lines[-2], "the disk is full"]
    assert "the disk has space" in lines[-2]
