"""Asks the kernel for the limits and the groups of a process: they may differ from those that were asked for.

Files: /proc/PID/limits and /proc/PID/status (proc(5)), and the files of the process's own cgroup in each hierarchy.
"""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path
from typing import Final

from hutch_shared import messages as m

__all__ = ["gids_of", "limits_of"]

_PROC: Final = Path("/proc")
_NO_LIMIT: Final = 1 << 60
"""Version 1 reports "no limit" as a number above this one."""
_LINE: Final = r"^{}\s+(\d+)\s"


def gids_of(pid: int) -> tuple[int, ...]:
    """Return the group ids of a process, sorted: the effective one and the supplementary ones. OSError if it is gone.

    ValueError if the system does not list them.
    """
    fields = dict(line.split(":", 1) for line in (_PROC / str(pid) / "status").read_text().splitlines() if ":" in line)
    if "Gid" not in fields or "Groups" not in fields:
        raise ValueError("/proc/PID/status lists no groups")
    return tuple(sorted({int(fields["Gid"].split()[1]), *map(int, fields["Groups"].split())}))


def limits_of(pid: int, group: str) -> m.ResourceLimits:
    """Return the limits of a process whose cgroups are named `group`. OSError if it is gone.

    Where it has no such cgroup with a limit of memory, the limit of each process's private memory is returned instead.
    """
    text = (_PROC / str(pid) / "limits").read_text()
    places = _directories(pid, group)
    memory = _first(places.get("memory"), "memory.max", "memory.limit_in_bytes")
    shares = _first(places.get("cpu"), "cpu.shares")
    return m.ResourceLimits(
        memory=memory if memory is not None else _limit(text, "Max data size"),
        pids=_first(places.get("pids"), "pids.max"),
        cpu_weight=_first(places.get("cpu"), "cpu.weight") if shares is None else round(shares * 100 / 1024),
        open_files=_limit(text, "Max open files"),
    )


def _limit(text: str, name: str) -> int | None:
    """Return the soft limit of that name; None if it is `unlimited`."""
    found = re.search(_LINE.format(name), text, re.MULTILINE)
    return None if found is None else int(found[1])


def _first(directory: Path | None, *names: str) -> int | None:
    """Return the number in the first of these files that has one below the mark of "no limit"."""
    for name in names if directory is not None else ():
        with suppress(OSError, ValueError):
            if (found := int((Path(directory or "") / name).read_text())) < _NO_LIMIT:
                return found
    return None


def _directories(pid: int, group: str) -> dict[str, Path]:
    """Return the directories of the process's cgroups named `group`, by controller."""
    mounts = _mounts()
    found: dict[str, Path] = {}
    for line in (_PROC / str(pid) / "cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if path.rsplit("/", 1)[-1] != group:
            continue
        for controller in controllers.split(","):
            if controller in mounts:
                root, point = mounts[controller]
                directory = Path(point, path.removeprefix("" if root == "/" else root).strip("/"))
                for name in [controller] if controller else ["memory", "pids", "cpu"]:
                    found.setdefault(name, directory)
    return found


def _mounts() -> dict[str, tuple[str, str]]:
    """Return (root, mount point) by controller; version 2 has the empty name. (proc(5), mountinfo)"""
    found: dict[str, tuple[str, str]] = {}
    for line in (_PROC / "self" / "mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        root, point = before.split(" ")[3:5]
        kind, _, options = after.split(" ", 2)
        for name in [""] if kind == "cgroup2" else options.split(",") if kind == "cgroup" else []:
            found.setdefault(name, (root, point))
    return found
