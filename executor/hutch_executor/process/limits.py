"""Whether the session went over a limit of its cgroup: how many processes memory cost, how often a fork was refused.

The executor stands in its session's cgroup and reads the group's own counters, a few small files: version 2
(`memory.events`, `pids.events`), version 1 (`memory.oom_control`, `pids.events`), or each where it is when a host has
both. Where there is no group, or it is the root, there is nothing to read and no limit to go over.

That memory killed something tells not yet whose limit it was: a machine without memory kills too. It was the
session's own where the group has one and was at it (`oom` of version 2, `memory.failcnt` of version 1).
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final, Literal

from hutch_shared.events import Notice

__all__ = ["OVER_LIMIT", "Group", "Watch", "agent_first", "find_choom", "own_groups"]

OVER_LIMIT: Final = "over_limit"
_NO_LIMIT: Final = 1 << 60
"""Version 1 says "no limit" with a number of this size."""
_AGENT_GOES_FIRST: Final = 800
_TRIAL_DEADLINE: Final = 5.0
Controller = Literal["memory", "pids"]


@dataclass(frozen=True, slots=True)
class Group:
    """A directory of one hierarchy, and that hierarchy's version."""

    path: Path
    version: Literal[1, 2]


@dataclass(frozen=True, slots=True)
class Counters:
    """What a group's files say; they only grow."""

    killed: int = 0
    """Processes that were killed for want of memory."""
    full: int = 0
    """How often the group was at its own memory limit."""
    refused: int = 0
    """Forks that were refused."""


class Watch:
    """Tells what has happened since it was last asked. Reading takes a few microseconds; it may be done in a task."""

    def __init__(self, groups: dict[Controller, Group] | None = None) -> None:
        """Watch `groups`, else those of this process, from now on."""
        self._groups = own_groups() if groups is None else groups
        self._seen = self._read(Counters())

    def __repr__(self) -> str:
        return f"<Watch {', '.join(f'{name} {group.path}' for name, group in self._groups.items()) or 'nothing'}>"

    def news(self) -> list[Notice]:
        """Return what happened since the last call (or the start), `over_limit` first."""
        seen = self._seen
        now = self._seen = self._read(seen)
        found: list[Notice] = []
        if killed := now.killed - seen.killed:
            limit = self._memory_limit()
            were = "1 process was" if killed == 1 else f"{killed} processes were"
            if limit is not None and now.full > seen.full:
                message = f"The session went over its memory limit of {_bytes(limit)}: {were} killed."
                found.append(Notice(OVER_LIMIT, message, {"limit": "memory", "value": limit, "killed": killed}))
            else:
                message = f"The machine ran out of memory: {were} killed in this session."
                found.append(Notice("out_of_memory", message, {"killed": killed}))
        if refused := now.refused - seen.refused:
            limit = self._pids_limit()
            its = "the machine's limit of processes" if limit is None else f"its limit of {limit} processes and threads"
            message = f"The session went over {its}: {refused} more could not be started."
            found.append(Notice(OVER_LIMIT, message, {"limit": "pids", "value": limit, "refused": refused}))
        return sorted(found, key=lambda notice: notice.word != OVER_LIMIT)

    def _read(self, least: Counters) -> Counters:
        """Return what the files say; what cannot be read is as it was."""
        memory, pids = self._groups.get("memory"), self._groups.get("pids")
        killed = full = refused = 0
        if memory is not None and memory.version == 2:
            killed = _field(memory.path / "memory.events", "oom_kill")
            local = memory.path / "memory.events.local"
            full = _field(local if local.exists() else memory.path / "memory.events", "oom")
        elif memory is not None:
            killed = _field(memory.path / "memory.oom_control", "oom_kill")
            full = _number(memory.path / "memory.failcnt") or 0
        if pids is not None:
            refused = _field(pids.path / "pids.events", "max")
        return Counters(max(killed, least.killed), max(full, least.full), max(refused, least.refused))

    def _memory_limit(self) -> int | None:
        group = self._groups["memory"]
        name = "memory.max" if group.version == 2 else "memory.limit_in_bytes"
        found = _number(group.path / name)
        return found if found is not None and found < _NO_LIMIT else None

    def _pids_limit(self) -> int | None:
        return _number(self._groups["pids"].path / "pids.max")


def own_groups(proc: Path = Path("/proc/self")) -> dict[Controller, Group]:
    """Return where this process's memory and pids are counted, as `proc` tells; what is not to be found is left out."""
    found: dict[Controller, Group] = {}
    with suppress(OSError, ValueError):
        places = {}
        for line in (proc / "cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            places.update(dict.fromkeys(controllers.split(","), path))
        mounts = _mounts((proc / "mountinfo").read_text())
        names: tuple[Controller, ...] = ("memory", "pids")
        for name in names:
            version: Literal[1, 2] = 1 if name in places else 2
            controller = name if version == 1 else ""
            group = _below(places.get(controller), mounts.get(controller))
            counted = "memory.oom_control" if (name, version) == ("memory", 1) else f"{name}.events"
            if group is not None and (group / counted).exists():
                found[name] = Group(group, version)
    return found


def _mounts(text: str) -> dict[str, tuple[str, str]]:
    """Return (root, mount point) of each controller's hierarchy; that of version 2 has the empty name. (proc(5))"""
    found: dict[str, tuple[str, str]] = {}
    for line in text.splitlines():
        before, _, after = line.partition(" - ")
        _, _, _, root, point, *_ = before.split(" ")
        kind, _, options = after.split(" ", 2)
        if kind == "cgroup2":
            found.setdefault("", (root, point))
        elif kind == "cgroup":
            for option in options.split(","):
                found.setdefault(option, (root, point))
    return found


def _below(path: str | None, mount: tuple[str, str] | None) -> Path | None:
    """Return the directory of group `path` below a mount of (part of) its hierarchy."""
    if path is None or mount is None:
        return None
    root, point = mount
    if root != "/":
        if path != root and not path.startswith(f"{root}/"):
            return None
        path = path.removeprefix(root)
    return None if "/../" in f"{path}/" else Path(point, path.lstrip("/"))


def _field(path: Path, name: str) -> int:
    """Return the number behind `name` in a file of such lines; 0 where there is none."""
    with suppress(OSError, ValueError):
        for line in path.read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == name:
                return int(value)
    return 0


def _number(path: Path) -> int | None:
    with suppress(OSError, ValueError):
        return int(path.read_text())
    return None


def _bytes(count: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.4g} {unit}"
    return f"{count} bytes"


@cache
def find_choom() -> str | None:
    """Return choom(1) where it can raise a score here; None where not, or where the score is that high already.

    Tries it once in a process, for a few milliseconds: call it in a thread first.
    """
    choom = shutil.which("choom")
    with suppress(OSError, subprocess.TimeoutExpired):
        if choom is not None and (_number(Path("/proc/self/oom_score_adj")) or 0) < _AGENT_GOES_FIRST:
            words = [choom, "-n", str(_AGENT_GOES_FIRST), "--", "true"]
            if subprocess.run(words, capture_output=True, timeout=_TRIAL_DEADLINE, check=False).returncode == 0:
                return choom
    return None


def agent_first(argv: Sequence[str]) -> tuple[str, ...]:
    """Return `argv` so started that, when memory runs out, what it starts is killed rather than the executor."""
    choom = find_choom()
    return (*argv,) if choom is None else (choom, "-n", str(_AGENT_GOES_FIRST), "--", *argv)
