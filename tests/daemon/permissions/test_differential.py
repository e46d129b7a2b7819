"""bash starts only programs that the policy judged."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from tests.daemon.permissions.differential import Bash, compare, was_judged

SEED = random.SystemRandom().randrange(2**32)

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash to compare with")


def test_bash_starts_nothing_that_was_not_judged() -> None:
    """For every allowed line, the policy had judged each program that bash starts."""
    print(f"seed {SEED}")

    found = compare(200, SEED)

    assert found.surprises == (), f"seed {SEED}"
    assert found.started > 200


def test_the_comparison_sees_what_bash_starts(tmp_path: Path) -> None:
    """The comparison reports an unjudged program, also in the background or inside nested substitutions."""
    bash = Bash(tmp_path)

    first, second = bash.started(["(git a 'b c' &); echo $(rm x)", "exit; ls"])

    assert sorted(first.programs) == [("git", "a", "b c"), ("rm", "x")]
    assert second.programs == ()
    assert was_judged(("git", "a", "b c"), frozenset({("git", "a", "b c")}), first.work)
    assert not was_judged(("rm", "x"), frozenset({("git", "a", "b c"), ("echo", "$(rm x)")}), first.work)


def test_lines_do_not_affect_each_other(tmp_path: Path) -> None:
    """The next line does not see the files, variables or directory of the last one."""
    bash = Bash(tmp_path)

    found = bash.started(["cd /; X=1; touch new", "ls $X n*", "cat ~/x"])

    assert [one.programs for one in found] == [
        (("touch", "new"),),
        (("ls", "n*"),),
        (("cat", f"{found[2].work}/x"),),
    ]


def test_the_comparison_accepts_the_value_of_the_exit_status(tmp_path: Path) -> None:
    """The value of `$?` matches the judged word; a name in its place does not."""
    judged = frozenset({("ls", "a $? b $?")})

    assert was_judged(("ls", "a $? b 127"), judged, tmp_path)
    assert not was_judged(("ls", "a x b 0"), judged, tmp_path)
