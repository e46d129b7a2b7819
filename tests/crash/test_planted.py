"""The harness is checked itself: each mistake that can be planted is noticed, and nothing is where there is none."""

from __future__ import annotations

import pytest

from tests.crash.harness.places import FAULTS
from tests.crash.harness.run import directed

pytestmark = [pytest.mark.system, pytest.mark.timeout(280)]

SETTLE = 5.0
"""Seconds after which a run whose mistake makes it hang is judged as it is."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if fault.in_ci else pytest.mark.full) for name, fault in FAULTS.items()],
)
async def test_a_planted_mistake_is_caught(name: str) -> None:
    """The kills that bring it out leave a violation that tells of it."""
    fault = FAULTS[name]

    report = await directed(*fault.actions, planted=name, settle=SETTLE)

    assert report.words & fault.caught_as, report.summary()


@pytest.mark.full
async def test_without_a_mistake_the_same_kills_break_no_promise() -> None:
    """All that brings the mistakes out, on sound code."""
    actions = {action for fault in FAULTS.values() for action in fault.actions} - {"old hutchd", "hold question"}

    report = await directed(*sorted(actions), "hold question", "hutchd")

    assert report.violations == []


@pytest.mark.full
async def test_an_executor_does_not_obey_an_older_hutchd() -> None:
    """Without the mistake of that name."""
    report = await directed("old hutchd")

    assert "obeyed" not in report.words
