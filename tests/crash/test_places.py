"""The tables name every failpoint of the code and enough faults, and the page shows them."""

from __future__ import annotations

import re
from pathlib import Path

from tests.crash.harness import page
from tests.crash.harness.faults import FAULTS
from tests.crash.harness.places import FAILPOINTS

TOP = Path(__file__).parents[2]
CODE = [path.read_text() for root in ("daemon", "executor", "shared") for path in (TOP / root).rglob("*.py")]


def named(function: str) -> set[str]:
    """Return the names that the code calls a function of the failpoints with."""
    return {name for text in CODE for name in re.findall(rf'\b{function}\("([^"]+)"\)', text)}


def test_every_failpoint_is_in_the_table() -> None:
    """And nothing else: a place that is gone takes its row with it."""
    assert named("failpoint") == set(FAILPOINTS)


def test_the_product_knows_no_faults() -> None:
    """Nothing of the product tells a test build from another; there are enough faults to trust the harness."""
    assert not [text for text in CODE if re.search(r"planted|TEST_BUILD", text)]
    assert len(FAULTS) >= 15


def test_the_page_is_current() -> None:
    """docs/crash.md is what `python -m tests.crash.harness.page` writes."""
    assert page.FILE.read_text() == page.page()
