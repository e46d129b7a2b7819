"""What bash starts is what was judged."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from tests.daemon.permissions.differential import Bash, compare, was_judged

SEED = random.SystemRandom().randrange(2**32)

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash to compare with")


def test_bash_starts_nothing_that_was_not_judged() -> None:
    """Of any line that is allowed, every program that bash starts was among those that were judged."""
    print(f"seed {SEED}")

    assert compare(200, SEED) == (), f"seed {SEED}"


def test_the_comparison_sees_what_bash_starts(tmp_path: Path) -> None:
    """A program that was not judged is seen, also when it runs in the background or deep in a substitution."""
    bash = Bash(tmp_path)

    started = bash.started("(git a 'b c' &); echo $(rm x)")

    assert sorted(started) == [("git", "a", "b c"), ("rm", "x")]
    assert was_judged(("git", "a", "b c"), frozenset({("git", "a", "b c")}), bash.work)
    assert not was_judged(("rm", "x"), frozenset({("git", "a", "b c"), ("echo", "$(rm x)")}), bash.work)
