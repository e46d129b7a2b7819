"""Which processes there are, whose they are; and ending them without a mix-up.

A bare pid names nobody: it is reused. A process here is a pid with its start time, and a signal goes through a pidfd
that was opened before the start time was looked at again. A zombie is dead: only its parent can take it away.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ProcessEntry", "descendants", "end_all", "environ_mark", "look_up", "scan", "signal_it"]

_PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class ProcessEntry:
    """One process as it was when it was looked at."""

    pid: int
    parent: int
    start_time: int
    """Kernel ticks since boot."""
    state: str

    @property
    def dead(self) -> bool:
        """A zombie, or about to be none any more."""
        return self.state in "ZXx"


def look_up(pid: int) -> ProcessEntry | None:
    """Return the process, a zombie too; None when there is none."""
    try:
        stat = (_PROC / str(pid) / "stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat[stat.rindex(b")") + 2 :].split()  # the name before it may hold anything
    return ProcessEntry(pid, int(fields[1]), int(fields[19]), fields[0].decode())


def scan() -> dict[int, ProcessEntry]:
    """Return every process that lives, by pid."""
    found = (look_up(int(name)) for name in os.listdir(_PROC) if name.isdigit())
    return {one.pid: one for one in found if one is not None and not one.dead}


def descendants(processes: dict[int, ProcessEntry], roots: Iterable[int]) -> set[int]:
    """Return the pids in `processes` whose line of parents leads to one of `roots`, without the roots themselves."""
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


def environ_mark(pid: int, name: str) -> str | None:
    """Return a variable of the environment that `pid` was started with; None when it cannot be read or is not there."""
    try:
        environ = (_PROC / str(pid) / "environ").read_bytes()
    except OSError:
        return None
    prefix = os.fsencode(name) + b"="
    for item in environ.split(b"\0"):
        if item.startswith(prefix):
            return os.fsdecode(item[len(prefix) :])
    return None


def signal_it(process: ProcessEntry, number: signal.Signals) -> None:
    """Signal exactly this process; one that is gone, or whose pid is another's by now, is left alone."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        handle = os.pidfd_open(process.pid)
        try:
            now = look_up(process.pid)
            if now is not None and now.start_time == process.start_time:
                signal.pidfd_send_signal(handle, number)
        finally:
            os.close(handle)


def end_all(find: Callable[[], Iterable[ProcessEntry]], deadline: float) -> tuple[int, ...]:
    """Kill what `find` finds until two looks in a row find nothing; return the pids left at `deadline` (monotonic).

    Blocks: it belongs into a worker thread.
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
