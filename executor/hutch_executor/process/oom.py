"""Makes the kernel kill the agent's processes before the executor when memory runs out."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Final

from hutch_executor.process.cgroups import read_number
from hutch_executor.process.tools import find_tool

__all__ = ["agent_first", "find_choom"]

_AGENT_SCORE: Final = 800
_TRIAL_DEADLINE: Final = 5.0


@cache
def find_choom() -> str | None:
    """Return the path of choom(1); None if it cannot raise a score here, or the score is high enough already.

    The first call tries choom, which blocks for a few milliseconds: make it from a thread.
    """
    choom = find_tool("choom")
    with suppress(OSError, subprocess.TimeoutExpired):
        if choom is not None and (read_number(Path("/proc/self/oom_score_adj")) or 0) < _AGENT_SCORE:
            trial = [choom, "-n", str(_AGENT_SCORE), "--", "true"]
            if (
                subprocess.run(trial, capture_output=True, timeout=_TRIAL_DEADLINE, check=False, cwd="/").returncode
                == 0
            ):
                return choom
    return None


def agent_first(argv: Sequence[str]) -> tuple[str, ...]:
    """Return `argv` as a command that the kernel kills before the executor when memory runs out."""
    choom = find_choom()
    return (*argv,) if choom is None else (choom, "-n", str(_AGENT_SCORE), "--", *argv)
