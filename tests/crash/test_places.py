"""The tables name every failpoint and every mistake that is in the code, and the page shows them."""

from __future__ import annotations

import re
from pathlib import Path

from tests.crash.harness import page
from tests.crash.harness.places import FAILPOINTS, FAULTS

TOP = Path(__file__).parents[2]
CODE = [path.read_text() for root in ("daemon", "executor", "shared") for path in (TOP / root).rglob("*.py")]


def named(function: str) -> set[str]:
    """Return the names that the code calls a function of the failpoints with."""
    return {name for text in CODE for name in re.findall(rf'\b{function}\("([^"]+)"\)', text)}


def test_every_failpoint_is_in_the_table() -> None:
    """And nothing else: a place that is gone takes its row with it."""
    assert named("failpoint") == set(FAILPOINTS)


def test_every_mistake_is_in_the_table() -> None:
    """There are enough of them to trust the harness, and each is caught by a test."""
    assert named("planted") == set(FAULTS)
    assert len(FAULTS) >= 15
    assert sum(fault.in_ci for fault in FAULTS.values()) >= 8


def test_the_page_is_current() -> None:
    """docs/crash.md is what `python -m tests.crash.harness.page` writes."""
    assert page.FILE.read_text() == page.page()
