"""A cgroup per executor, where the host lets us have one: membership that a process cannot shed by forking.

Version 2 where a child of our own group can be made (a delegated tree, or root), with `cgroup.kill`; else the version 1
`freezer` hierarchy, where a frozen group cannot outrun its killer. Neither: `find_root` returns None, and ancestry and
the mark in the environment must do.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hutch_daemon.environments.processes import look_up, signal_it

__all__ = ["Cgroup", "CgroupRoot", "find_root", "of_process"]

Version = Literal[1, 2]
_PREFIX = "hutch-"


@dataclass(frozen=True, slots=True)
class Cgroup:
    """One executor's own group."""

    path: Path
    version: Version

    def enter(self, pid: int) -> None:
        """Move a process in; what it starts from then on is born there."""
        (self.path / "cgroup.procs").write_text(str(pid))

    def pids(self) -> set[int]:
        """Return its processes, zombies left out by the kernel; the empty set when the group is gone."""
        try:
            return {int(line) for line in (self.path / "cgroup.procs").read_text().split()} - {0}
        except (FileNotFoundError, OSError):
            return set()

    def kill(self, deadline: float) -> bool:
        """End all processes in it and remove it; False when some are left at `deadline` (monotonic). Blocks."""
        pause = 0.001
        while self.path.exists():
            self._kill_once()
            with contextlib.suppress(OSError):
                self.path.rmdir()
                return True
            if time.monotonic() >= deadline:
                return False
            time.sleep(pause)
            pause = min(pause * 1.5, 0.05)
        return True

    def _kill_once(self) -> None:
        if self.version == 2:
            with contextlib.suppress(OSError):
                (self.path / "cgroup.kill").write_text("1")
            return
        with contextlib.suppress(OSError):
            (self.path / "freezer.state").write_text("FROZEN")
        for pid in self.pids():
            if (process := look_up(pid)) is not None:
                signal_it(process, signal.SIGKILL)
        with contextlib.suppress(OSError):
            (self.path / "freezer.state").write_text("THAWED")


@dataclass(frozen=True, slots=True)
class CgroupRoot:
    """Where groups of executors are made."""

    path: Path
    version: Version

    def make(
        self, executor: str, memory: int | None = None, pids: int | None = None, cpu_weight: int | None = None
    ) -> Cgroup | None:
        """Make the group of an executor; None when the host refuses it now. Limits are held where they can be."""
        group = self.of(executor)
        try:
            group.path.mkdir()
        except OSError:
            return None
        if self.version == 2:
            for name, value in (("memory.max", memory), ("pids.max", pids), ("cpu.weight", cpu_weight)):
                if value is not None:
                    with contextlib.suppress(OSError):  # that controller is not delegated to us
                        (group.path / name).write_text(str(value))
        return group

    def of(self, executor: str) -> Cgroup:
        """Return the group that an executor has here, if it has one."""
        return Cgroup(self.path / f"{_PREFIX}{executor}", self.version)

    def find(self, path: str) -> Cgroup:
        """Return the group that a launch record names."""
        return Cgroup(Path(path), self.version)


def find_root() -> CgroupRoot | None:
    """Look for a place where groups can be made: our own group, in version 2 first. Tries it and cleans up."""
    own = _own_groups()
    for version, mount in _mounts():
        path = own.get("" if version == 2 else "freezer")
        if path is None:
            continue
        root = CgroupRoot(mount / path.lstrip("/"), version)
        probe = root.make(f"probe-{os.getpid()}")
        if probe is None:
            continue
        usable = (probe.path / ("cgroup.kill" if version == 2 else "freezer.state")).exists()
        writable = os.access(probe.path / "cgroup.procs", os.W_OK) and os.access(root.path / "cgroup.procs", os.W_OK)
        with contextlib.suppress(OSError):
            probe.path.rmdir()
        if usable and writable:
            return root
    return None


def of_process(pid: int) -> tuple[str, ...]:
    """Return the executors in whose groups `pid` is. A hutchd inside a session of another has more than one."""
    try:
        text = Path(f"/proc/{pid}/cgroup").read_text()
    except OSError:
        return ()
    parts = (part for line in text.splitlines() for part in line.split(":", 2)[-1].split("/"))
    return tuple(part.removeprefix(_PREFIX) for part in parts if part.startswith(f"{_PREFIX}x-"))


def _own_groups() -> dict[str, str]:
    """Return our path in each hierarchy, by controller; version 2 has the empty name."""
    groups: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            groups.update(dict.fromkeys(controllers.split(","), path))
    return groups


def _mounts() -> list[tuple[Version, Path]]:
    """Return where version 2 and the version 1 freezer are mounted, in the order in which they are wanted."""
    found: list[tuple[Version, Path]] = []
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mounts").read_text().splitlines():
            _, where, kind, options, *_ = line.split(" ")
            if kind == "cgroup2":
                found.append((2, Path(where)))
            elif kind == "cgroup" and "freezer" in options.split(","):
                found.append((1, Path(where)))
    return sorted(found, reverse=True)
