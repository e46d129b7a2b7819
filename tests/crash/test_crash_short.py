"""A short random run with a fresh seed breaks no promise. `scripts/crash` runs longer."""

from __future__ import annotations

import json
import secrets

import pytest

from tests.crash.harness.run import crash

pytestmark = [pytest.mark.system, pytest.mark.timeout(280)]


@pytest.mark.parametrize("seconds", [15, pytest.param(60, marks=pytest.mark.full)])
async def test_no_kill_breaks_a_promise(seconds: int) -> None:
    """No event or prompt is lost, repeated or reordered, and no process is left. `scripts/crash --seed` repeats a run.

    A slow machine kills fewer processes in this time; the run does not take longer.
    """
    seed = secrets.randbelow(1 << 32)

    report = await crash(seed=seed, seconds=seconds)

    print(*map(json.dumps, report.as_json()), sep="\n")
    assert report.violations == [], f"scripts/crash --seed {seed} --seconds {seconds}"
    assert report.kills.get("hutchd")
    assert report.adoption
