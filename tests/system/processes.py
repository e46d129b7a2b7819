"""The processes that a test left behind: those with its mark in their environment, and their descendants."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import anyio


@dataclass(frozen=True, slots=True)
class Process:
    """A living process, not a zombie."""

    pid: int
    parent: int
    command: str


def table() -> dict[int, Process]:
    """Return every living process, read from /proc."""
    found: dict[int, Process] = {}
    with os.scandir("/proc") as entries:
        pids = [int(entry.name) for entry in entries if entry.name.isdigit()]
    for pid in pids:
        try:
            stat = Path(f"/proc/{pid}/stat").read_bytes()
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:
            continue
        state, parent = stat[stat.rindex(b")") + 2 :].split()[:2]
        if state not in (b"Z", b"X"):
            found[pid] = Process(pid, int(parent), command)
    return found


def marked(mark: str) -> list[Process]:
    """Return the living processes whose environment contains `mark`, and their descendants."""
    processes = table()
    return _with_descendants(processes, {pid for pid in processes if _has_mark(pid, mark.encode())})


def family(pid: int) -> list[Process]:
    """Return the living process `pid` and its descendants."""
    processes = table()
    return _with_descendants(processes, {pid} & processes.keys())


def _with_descendants(processes: dict[int, Process], wanted: set[int]) -> list[Process]:
    while more := {pid for pid, process in processes.items() if process.parent in wanted} - wanted:
        wanted |= more
    return [processes[pid] for pid in sorted(wanted)]


def _has_mark(pid: int, mark: bytes) -> bool:
    try:
        return pid != os.getpid() and mark in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False


def kill(processes: Iterable[Process]) -> None:
    """Send SIGKILL to each."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)


def alive(pid: int) -> bool:
    """Return whether `pid` is a living process, not a zombie."""
    return pid in table()


def running(command: str) -> list[Process]:
    """Return the living processes with exactly this command line; a sandbox has other pids."""
    return [process for process in table().values() if process.command == command]


async def gone(mark: str, *, within: float = 20.0) -> list[Process]:
    """Wait until no marked process lives; return those left after `within` seconds."""
    with anyio.move_on_after(within):
        while marked(mark):
            await anyio.sleep(0.05)
    return marked(mark)


def marked_by(pid: int, mark: str) -> bool:
    """Return whether the environment of `pid` contains `mark`."""
    return _has_mark(pid, mark.encode())
