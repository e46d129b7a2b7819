"""The processes of this host: lists them, finds descendants, and signals exactly the intended process.

The kernel reuses pids, so a process is identified by its pid and start time. A signal is sent through a pidfd, which is
opened before the start time is compared again. A zombie is treated as dead: only its parent can reap it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ProcessEntry", "descendants", "end_all", "look_up", "scan", "signal_it"]

_PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class ProcessEntry:
    """One process, as it was when /proc was read."""

    pid: int
    parent: int
    start_time: int
    """The start time in kernel ticks since boot."""
    state: str

    @property
    def dead(self) -> bool:
        """True if the process is a zombie or about to disappear."""
        return self.state in "ZXx"


def look_up(pid: int) -> ProcessEntry | None:
    """Return the process with this pid, even if it is a zombie; None if there is none."""
    try:
        stat = (_PROC / str(pid) / "stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat[stat.rindex(b")") + 2 :].split()  # the name before it may contain any character
    return ProcessEntry(pid, int(fields[1]), int(fields[19]), fields[0].decode())


def scan() -> dict[int, ProcessEntry]:
    """Return all processes that are not dead, by pid."""
    found = (look_up(int(name)) for name in os.listdir(_PROC) if name.isdigit())
    return {one.pid: one for one in found if one is not None and not one.dead}


def descendants(processes: dict[int, ProcessEntry], roots: Iterable[int]) -> set[int]:
    """Return the pids in `processes` that descend from one of `roots`, without the roots."""
    children: dict[int, list[int]] = {}
    for one in processes.values():
        children.setdefault(one.parent, []).append(one.pid)
    todo, found = list(roots), set[int]()
    start = set(todo)
    while todo:
        for pid in children.get(todo.pop(), ()):
            if pid not in found and pid not in start:
                found.add(pid)
                todo.append(pid)
    return found


def signal_it(process: ProcessEntry, number: signal.Signals) -> None:
    """Signal exactly this process. Does nothing if it is gone or its pid was reused."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        handle = os.pidfd_open(process.pid)
        try:
            now = look_up(process.pid)
            if now is not None and now.start_time == process.start_time:
                signal.pidfd_send_signal(handle, number)
        finally:
            os.close(handle)


def end_all(find: Callable[[], Iterable[ProcessEntry]], deadline: float) -> tuple[int, ...]:
    """Kill the processes that `find` returns until it returns none twice in a row, or until `deadline` (monotonic).

    Return the pids that are left. Blocks: call it in a worker thread.
    """
    empty = 0
    pause = 0.001
    while True:
        found = [one for one in find() if not one.dead]
        if not found:
            empty += 1
            if empty == 2:
                return ()
        else:
            empty = 0
            for one in found:
                signal_it(one, signal.SIGKILL)
        if found and time.monotonic() >= deadline:
            return tuple(sorted(one.pid for one in found))
        time.sleep(pause)
        pause = min(pause * 1.5, 0.05)
