"""One cgroup per executor, if the host allows it. A process cannot leave its cgroup by forking.

hutchd uses cgroup version 2 with `cgroup.kill` if it can make a child of its own cgroup (in a delegated tree, or as
root). Otherwise it uses the version 1 `freezer` hierarchy: the processes of a frozen group cannot fork while they are
killed. If neither works, `find_root` returns None, and processes are found by descent and by the mark in their
environment.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from hutch_daemon.environments.processes import look_up, signal_it

__all__ = ["PREFIX", "Cgroup", "CgroupRoot", "find_root"]

Version = Literal[1, 2]
PREFIX: Final = "hutch-"
"""Before an executor's id, in the name of its cgroup."""


@dataclass(frozen=True, slots=True)
class Cgroup:
    """The cgroup of one executor."""

    path: Path
    version: Version

    def enter(self, pid: int) -> None:
        """Move a process into the cgroup. Processes that it starts later are in the cgroup too."""
        (self.path / "cgroup.procs").write_text(str(pid))

    def pids(self) -> set[int]:
        """Return the pids in the cgroup and in those below it, without zombies; the empty set if it does not exist.

        OSError if it cannot be read.
        """
        return {pid for directory in self._directories() for pid in _pids_in(directory)}

    def kill(self, deadline: float) -> bool:
        """Kill all processes in the cgroup and remove it, with those below it that its processes made.

        Blocks until `deadline` (monotonic) at most. Return False if some processes are left.
        """
        pause = 0.001
        while self.path.exists():
            self._kill_once()
            with contextlib.suppress(OSError):
                for directory in self._directories():
                    directory.rmdir()
                return True
            if time.monotonic() >= deadline:
                return False
            time.sleep(pause)
            pause = min(pause * 1.5, 0.05)
        return True

    def _directories(self) -> list[Path]:
        """Return the directories below the cgroup's own, the lowest first, and that."""
        return [*(Path(path) for path, _, _ in os.walk(self.path, topdown=False) if path != str(self.path)), self.path]

    def _kill_once(self) -> None:
        if self.version == 2:
            with contextlib.suppress(OSError):
                (self.path / "cgroup.kill").write_text("1")
            return
        with contextlib.suppress(OSError):
            (self.path / "freezer.state").write_text("FROZEN")
        try:
            for pid in self.pids():
                if (process := look_up(pid)) is not None:
                    signal_it(process, signal.SIGKILL)
        finally:  # frozen processes end only once they are thawed
            with contextlib.suppress(OSError):
                (self.path / "freezer.state").write_text("THAWED")


def _pids_in(directory: Path) -> set[int]:
    try:
        return {int(line) for line in (directory / "cgroup.procs").read_text().split()} - {0}
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENODEV):  # ENODEV: it was removed after it was opened
            return set()
        raise


@dataclass(frozen=True, slots=True)
class CgroupRoot:
    """The directory in which the cgroups of executors are made."""

    path: Path
    version: Version

    def make(
        self, executor: str, memory: int | None = None, pids: int | None = None, cpu_weight: int | None = None
    ) -> Cgroup | None:
        """Make an executor's cgroup, with the limits that the host can enforce; None if the host refuses.

        `memory` is in bytes, `cpu_weight` from 1 to 10,000.
        """
        group = self.of(executor)
        try:
            group.path.mkdir()
        except OSError:
            return None
        if self.version == 2:
            for name, value in (("memory.max", memory), ("pids.max", pids), ("cpu.weight", cpu_weight)):
                if value is not None:
                    with contextlib.suppress(OSError):  # the controller is not delegated to hutchd
                        (group.path / name).write_text(str(value))
        return group

    def of(self, executor: str) -> Cgroup:
        """Return an executor's cgroup in this directory. It may not exist."""
        return Cgroup(self.path / f"{PREFIX}{executor}", self.version)

    def find(self, path: str) -> Cgroup:
        """Return the cgroup that a launch record names."""
        return Cgroup(Path(path), self.version)


def find_root() -> CgroupRoot | None:
    """Return hutchd's own cgroup, version 2 first, if a trial shows that cgroups can be made in it; otherwise None."""
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


def _own_groups() -> dict[str, str]:
    """Return the path of hutchd's cgroup for each controller. The key of version 2 is the empty string."""
    groups: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            groups.update(dict.fromkeys(controllers.split(","), path))
    return groups


def _mounts() -> list[tuple[Version, Path]]:
    """Return the mount points of version 2 and of the version 1 freezer, version 2 first."""
    found: list[tuple[Version, Path]] = []
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mounts").read_text().splitlines():
            _, where, kind, options, *_ = line.split(" ")
            if kind == "cgroup2":
                found.append((2, Path(where)))
            elif kind == "cgroup" and "freezer" in options.split(","):
                found.append((1, Path(where)))
    return sorted(found, reverse=True)
