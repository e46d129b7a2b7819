"""Rounds, percentiles, CPU and memory of a process, and the lines that are printed."""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

__all__ = ["EFFORTS", "Effort", "Say", "children_of", "cpu_of", "median", "percentile", "pss_of", "rss_of", "say_line"]

Say = Callable[..., None]
"""`say(bench, case, ratio, aim, **figures)`: one result. `aim` is `("<=", 3.0)` or `(">=", 0.3)`, or None."""

Aim = tuple[Literal["<=", ">="], float]
_PAGE: Final = os.sysconf("SC_PAGE_SIZE")
_TICK: Final = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Effort:
    """How much a bench does: `rounds` of each comparison, and the `share` of each full size."""

    rounds: int
    share: float
    seconds: float
    """Seconds for which an idle process is watched."""

    def of(self, count: int, least: int = 1) -> int:
        """Return this effort's share of `count`, at least `least`."""
        return max(least, round(count * self.share))


EFFORTS: Final = {"tiny": Effort(1, 0.02, 0.5), "quick": Effort(3, 0.25, 10.0), "full": Effort(5, 1.0, 60.0)}


def median(values: Sequence[float]) -> float:
    """Return the median."""
    return statistics.median(values)


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which `share` of all lie (nearest rank)."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def cpu_of(pid: int) -> float:
    """Return the CPU seconds of all threads of a process; of ended threads as far as the kernel counts them."""
    try:
        threads = [entry.joinpath("schedstat").read_text() for entry in Path(f"/proc/{pid}/task").iterdir()]
        return sum(int(text.split()[0]) for text in threads) / 1e9
    except (OSError, IndexError):  # no schedstat in this kernel: user and system time in ticks
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(stat[11]) + int(stat[12])) / _TICK


def rss_of(pid: int) -> int:
    """Return the resident bytes of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE


def pss_of(pid: int) -> int | None:
    """Return the proportional bytes of a process, or None if the kernel does not show them."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), None)


def children_of(pid: int) -> list[int]:
    """Return the child processes of a process, with zombies."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += [int(child) for child in task.joinpath("children").read_text().split()]
    return found


def say_line(bench: str, case: str, ratio: float | None, aim: Aim | None = None, **figures: Any) -> None:
    """Print one result on one line, as JSON."""
    met = None
    if aim is not None and ratio is not None:
        met = ratio <= aim[1] if aim[0] == "<=" else ratio >= aim[1]
    line = {
        "bench": bench,
        "case": case,
        "ratio": None if ratio is None else _short(ratio),
        "aim": None if aim is None else f"{aim[0]} {aim[1]:g}",
        "met": met,
        **{name: _short(value) for name, value in figures.items()},
    }
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def _short(value: Any) -> Any:
    """Round to four significant digits."""
    if isinstance(value, dict):
        return {name: _short(one) for name, one in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value
