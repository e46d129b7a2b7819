"""Samples: of several cases of one test, CI runs a few that a seed chooses, and `scripts/test full` runs all.

The seed is that of the whole run; its header prints it, and `HUTCH_TEST_SEED` repeats it.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable
from random import Random
from typing import Any

import pytest

__all__ = ["SEED", "sampled", "seed"]

SEED = "HUTCH_TEST_SEED"


def seed() -> int:
    """Return the run's seed; the first call chooses one for this process and all that it starts."""
    return int(os.environ.setdefault(SEED, str(secrets.randbelow(1 << 32))))


def sampled(cases: Iterable[str], count: int, *, name: str) -> list[Any]:
    """Return parameters of a test: `count` of `cases` as they are, the others marked `full`; `name` is the test's."""
    all_cases = list(cases)
    chosen = Random(f"{seed()} {name}").sample(all_cases, count)
    return [pytest.param(case, marks=() if case in chosen else pytest.mark.full) for case in all_cases]
