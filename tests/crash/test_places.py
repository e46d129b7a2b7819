"""The tables have every failpoint of the code and enough faults, and the page shows them."""

from __future__ import annotations

import re
from pathlib import Path

from tests.crash.harness import page
from tests.crash.harness.faults import FAULTS
from tests.crash.harness.places import FAILPOINTS

TOP = Path(__file__).parents[2]
CODE = [path.read_text() for root in ("daemon", "executor", "shared") for path in (TOP / root).rglob("*.py")]


def named(function: str) -> set[str]:
    """Return the names with which the code calls a function of the failpoints."""
    return {name for text in CODE for name in re.findall(rf'\b{function}\("([^"]+)"\)', text)}


def test_every_failpoint_is_in_the_table() -> None:
    """The table has no other rows: a removed failpoint also loses its row."""
    assert named("failpoint") == set(FAILPOINTS)


def test_the_product_knows_no_faults() -> None:
    """No code of the product distinguishes a test build, and there are enough faults to trust the harness."""
    assert not [text for text in CODE if re.search(r"planted|TEST_BUILD", text)]
    assert len(FAULTS) >= 15


def test_the_page_is_current() -> None:
    """docs/crash.md is what `python -m tests.crash.harness.page` writes."""
    assert page.FILE.read_text() == page.page()
