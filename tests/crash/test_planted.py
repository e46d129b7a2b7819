"""The harness itself is tested: it notices each planted fault, and reports nothing without one."""

from __future__ import annotations

import inspect

import pytest

from tests.crash.harness.faults import FAULTS, Target
from tests.crash.harness.planted import ENVIRONMENT
from tests.crash.harness.run import directed
from tests.sampling import sample

SETTLE = 5.0
"""Seconds after which a run is judged even if its fault still blocks it."""
IN_CI = 1


def _shape(function: object) -> list[tuple[str, object]]:
    """Return a function's signature: the kind of each parameter, and the names of those passed by keyword."""
    found = inspect.signature(function).parameters.values()  # type: ignore[arg-type]
    return [(one.name if one.kind is one.KEYWORD_ONLY else "", one.kind) for one in found]


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_replaces_what_the_product_has(name: str) -> None:
    """Each function that a fault replaces exists and has the same parameters as its replacement."""
    for target, make in FAULTS[name].replaces.items():
        _, _, original = target.find()

        assert _shape(make(original)) == _shape(original), target


def test_the_environment_takes_the_command_of_an_executor() -> None:
    """The command is the parameter `argv`, so that an executor can be started with a fault."""
    _, _, init = ENVIRONMENT.find()

    assert "argv" in inspect.signature(init).parameters


def test_a_target_that_is_gone_is_an_error() -> None:
    """A renamed function raises an error instead of being skipped."""
    with pytest.raises(AttributeError):
        Target("hutch_daemon.store.turns", "no_such_function").find()


@pytest.mark.system
@pytest.mark.timeout(280)
@sample(IN_CI)
@pytest.mark.parametrize("name", FAULTS)
async def test_a_planted_fault_is_caught(name: str) -> None:
    """The kills that make the fault visible cause one of its violations."""
    fault = FAULTS[name]

    report = await directed(*fault.actions, fault=name, settle=SETTLE)

    assert report.words & fault.caught_as, report.summary()


@pytest.mark.full
@pytest.mark.system
@pytest.mark.timeout(280)
async def test_without_a_fault_the_same_kills_break_no_promise() -> None:
    """On sound code, the kills of all faults cause no violation."""
    actions = {action for fault in FAULTS.values() for action in fault.actions} - {"old hutchd", "hold question"}

    report = await directed(*sorted(actions), "hold question", "hutchd")

    assert report.violations == []


@pytest.mark.full
@pytest.mark.system
@pytest.mark.timeout(280)
async def test_an_executor_does_not_obey_an_older_hutchd() -> None:
    """The kills of the fault of that name cause no violation without it."""
    report = await directed("old hutchd")

    assert "obeyed" not in report.words
