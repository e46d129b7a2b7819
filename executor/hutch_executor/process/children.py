"""Finds, kills and reaps the processes below this one. The executor is a subreaper, so it inherits their orphans.

Linux only; on other platforms no process is found. A process that forks faster than it is found can escape a sweep;
hutchd's own check makes their end certain, and so does the cgroup if there is one.
"""

from __future__ import annotations

import os
import signal
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Final

import anyio

__all__ = ["Zombies", "descendants", "kill_descendants"]

_PROC: Final = Path("/proc")
_PAUSE: Final = 0.01


def descendants() -> list[int]:
    """Return the pids of all live processes below this one, parents first."""
    below: dict[int, list[int]] = defaultdict(list)
    for pid, parent, state in _processes():
        if state != "Z" or pid == os.getpid():
            below[parent].append(pid)
    found: list[int] = []
    frontier = [os.getpid()]
    while frontier:
        frontier = [pid for parent in frontier for pid in below[parent]]
        found += frontier
    return found


async def kill_descendants(deadline: float) -> list[int]:
    """Kill and reap every process below this one, repeatedly, until none is left or `deadline` seconds have passed.

    Returns the pids that are left. Only for the executor's end: it also reaps children that other code waits for.
    """
    with anyio.move_on_after(deadline):
        while left := descendants():
            for pid in left:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            _reap_all()
            await anyio.sleep(_PAUSE)
    return descendants()


class Zombies:
    """Reaps inherited children that have ended. The code that starts a child of the executor reaps it sooner."""

    def __init__(self) -> None:
        """Start without having seen an ended child."""
        self._seen: set[int] = set()

    def __repr__(self) -> str:
        return f"<Zombies {sorted(self._seen)}>"

    def reap(self) -> None:
        """Reap the children that had ended both in the previous call and in this one."""
        ended = {pid for pid, parent, state in _processes() if parent == os.getpid() and state == "Z"}
        for pid in ended & self._seen:
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        self._seen = ended


def _reap_all() -> None:
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _processes() -> list[tuple[int, int, str]]:
    """Return (pid, parent, state) of every process in /proc."""
    found = []
    with suppress(OSError):
        for name in os.listdir(_PROC):
            if name.isdigit():
                with suppress(OSError):
                    state, parent, _ = (_PROC / name / "stat").read_bytes().rpartition(b")")[2].split(None, 2)
                    found.append((int(name), int(parent), state.decode()))
    return found
