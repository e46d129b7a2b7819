"""A cgroup per executor, where the host allows it: a process cannot leave its cgroup by forking.

hutchd uses cgroup version 2 with `cgroup.kill` if it can make a child of its own cgroup (in a delegated tree, or as
root). Otherwise it uses the version 1 `freezer` hierarchy, where the processes of a frozen group cannot fork faster
than they are killed. If neither works, `find_root` returns None, and processes are found by descent and by the mark in
their environment.
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
    """The cgroup of one executor."""

    path: Path
    version: Version

    def enter(self, pid: int) -> None:
        """Move a process in; what it starts from then on starts there too."""
        (self.path / "cgroup.procs").write_text(str(pid))

    def pids(self) -> set[int]:
        """Return its processes without zombies; the empty set when the group is gone."""
        try:
            return {int(line) for line in (self.path / "cgroup.procs").read_text().split()} - {0}
        except (FileNotFoundError, OSError):
            return set()

    def kill(self, deadline: float) -> bool:
        """End all its processes and remove it; return False if some are left at `deadline` (monotonic). Blocks."""
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
    """The directory in which the cgroups of executors are made."""

    path: Path
    version: Version

    def make(
        self, executor: str, memory: int | None = None, pids: int | None = None, cpu_weight: int | None = None
    ) -> Cgroup | None:
        """Make an executor's cgroup with those limits that the host can enforce; None if the host refuses."""
        group = self.of(executor)
        try:
            group.path.mkdir()
        except OSError:
            return None
        if self.version == 2:
            for name, value in (("memory.max", memory), ("pids.max", pids), ("cpu.weight", cpu_weight)):
                if value is not None:
                    with contextlib.suppress(OSError):  # this controller is not delegated to us
                        (group.path / name).write_text(str(value))
        return group

    def of(self, executor: str) -> Cgroup:
        """Return an executor's cgroup here, which may not exist."""
        return Cgroup(self.path / f"{_PREFIX}{executor}", self.version)

    def find(self, path: str) -> Cgroup:
        """Return the cgroup that a launch record names."""
        return Cgroup(Path(path), self.version)


def find_root() -> CgroupRoot | None:
    """Return a directory in which cgroups can be made: hutchd's own cgroup, version 2 first. Makes one to try it."""
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
    """Return the executors whose cgroups `pid` is in: several for a hutchd that runs in a session of another one."""
    try:
        text = Path(f"/proc/{pid}/cgroup").read_text()
    except OSError:
        return ()
    parts = (part for line in text.splitlines() for part in line.split(":", 2)[-1].split("/"))
    return tuple(part.removeprefix(_PREFIX) for part in parts if part.startswith(f"{_PREFIX}x-"))


def _own_groups() -> dict[str, str]:
    """Return hutchd's path in each hierarchy by controller; version 2 has the empty name."""
    groups: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            groups.update(dict.fromkeys(controllers.split(","), path))
    return groups


def _mounts() -> list[tuple[Version, Path]]:
    """Return where version 2 and the version 1 freezer are mounted, version 2 first."""
    found: list[tuple[Version, Path]] = []
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mounts").read_text().splitlines():
            _, where, kind, options, *_ = line.split(" ")
            if kind == "cgroup2":
                found.append((2, Path(where)))
            elif kind == "cgroup" and "freezer" in options.split(","):
                found.append((1, Path(where)))
    return sorted(found, reverse=True)
