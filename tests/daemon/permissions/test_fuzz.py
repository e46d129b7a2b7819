"""No line breaks the parser or the matcher."""

from __future__ import annotations

import random

from tests.daemon.permissions.fuzz import fuzz

SEED = random.SystemRandom().randrange(2**32)


def test_random_lines_neither_raise_nor_take_long() -> None:
    """For any line the policy answers, and soon."""
    print(f"seed {SEED}")

    slowest = fuzz(3_000, SEED)

    assert slowest.seconds < 1.0, f"seed {SEED}: {slowest.line!r}"
