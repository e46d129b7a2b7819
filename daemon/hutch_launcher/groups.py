"""The processes of executors: each executor has a cgroup named `hutch-<executor id>` in every hierarchy in use.

| host | killed by | limited by |
|---|---|---|
| version 2, delegated | cgroup.kill | its controllers |
| both versions | cgroup.kill of the version 2 tree, if it has that file | version 1: memory, pids, cpu |
| version 1 | freezer: a frozen process cannot fork faster than it is killed | version 1: memory, pids, cpu |
| none | descent from the executor | – |

Nothing here waits: one round of killing sends the signals and returns the number of processes left.
"""

from __future__ import annotations

import ctypes
import os
import signal
import struct
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

__all__ = ["GroupProcess", "Groups", "KillRound", "enter", "find_groups", "fork_into", "kill", "kill_descendants"]
__all__ += ["moved_directories", "processes"]

_PREFIX: Final = "hutch-"
_LEAF: Final = "launcher"
_TOP: Final = "hutch-launcher"
_LARGEST_PAGE: Final = 64 * 1024
_CONTROLLERS: Final = ("memory", "pids", "cpu")
_OOM_COUNTERS: Final = ("memory.events", "memory.oom_control")
_FREEZERS: Final = (("freezer.state", "FROZEN", "THAWED"), ("cgroup.freeze", "1", "0"))


@dataclass(frozen=True)
class KillRound:
    """The result of one round of killing: processes left, and how often the executor reached each limit."""

    left: int
    oom_kills: int = 0
    pids_refused: int = 0


@dataclass(frozen=True)
class GroupProcess:
    """One process of the machine. `uids` holds its real, effective, saved and file system uid."""

    pid: int
    parent: int
    session: int
    start: int
    uids: frozenset[int]


def processes() -> Iterator[GroupProcess]:
    """Yield every process of the machine except zombies."""
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError, ValueError, IndexError):
                fields = Path("/proc", name, "stat").read_bytes().rpartition(b")")[2].split()
                status = Path("/proc", name, "status").read_bytes()
                uids = frozenset(map(int, status.partition(b"\nUid:")[2].split(b"\n", 1)[0].split()))
                if fields[0] not in (b"Z", b"X"):
                    yield GroupProcess(int(name), int(fields[1]), int(fields[3]), int(fields[19]), uids)


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    """Send a signal; do nothing if the process is gone."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def kill_descendants(pid: int, start: int, uid: int) -> int:
    """Do one round without a cgroup: kill the executor's descendants and its session; return their number.

    Orphans become children of the executor. It is therefore stopped first, and killed once it has no descendants.
    """
    table = {process.pid: process for process in processes()}
    executor = table.get(pid)
    if executor is not None and executor.start != start:
        return 0
    found = {one.pid for one in table.values() if uid in one.uids and (one.session == pid or one.pid == pid)}
    while more := {one.pid for one in table.values() if one.parent in found} - found:
        found |= more
    if executor is not None:
        kill(pid, signal.SIGSTOP if len(found) > 1 else signal.SIGKILL)
    for descendant in found - {pid}:
        kill(descendant)
    return len(found)


# ---------------------------------------------------------------- one executor's group


@dataclass
class Groups:
    """The directories in which groups are made: `tree` for killing processes, `limits` for each controller."""

    version: str = ""
    tree: Path | None = None
    limits: dict[str, Path] = field(default_factory=dict)
    why: str = ""

    def directories(self, executor: str) -> list[Path]:
        """Return the executor's directory in each hierarchy, first the one through which processes are killed."""
        trees = [tree for tree in (self.tree, *self.limits.values()) if tree is not None]
        return [tree / f"{_PREFIX}{executor}" for tree in dict.fromkeys(trees)]

    def make(self, executor: str, memory: int, pids: int, cpu_weight: int) -> list[Path]:
        """Make the group with its limits and return its directories. On an OSError none of them remains."""
        made: list[Path] = []
        try:
            for directory in self.directories(executor):
                with suppress(OSError):
                    directory.rmdir()  # left empty by an executor that has ended
                directory.mkdir()
                directory.chmod(0o755)  # an executor reads its counters there; hutchd reads which processes are in it
                made.append(directory)
            if memory and "memory" in self.limits:
                _limit_memory(self.limits["memory"] / f"{_PREFIX}{executor}", memory)
            if pids and "pids" in self.limits:
                _write(self.limits["pids"] / f"{_PREFIX}{executor}" / "pids.max", pids)
            if cpu_weight and "cpu" in self.limits:
                cpu = self.limits["cpu"] / f"{_PREFIX}{executor}"
                if (cpu / "cpu.weight").exists():
                    _write(cpu / "cpu.weight", cpu_weight)
                else:
                    _write(cpu / "cpu.shares", max(2, cpu_weight * 1024 // 100))
        except OSError:
            for directory in made:
                with suppress(OSError):
                    directory.rmdir()
            raise
        return made

    def kill(self, executor: str) -> KillRound:
        """Do one round: kill all processes in the executor's group, and remove the group once it is empty."""
        directories = [directory for directory in self.directories(executor) if directory.exists()]
        if not directories:
            members = (_cgroups_of(str(process.pid)) for process in processes())
            directories = moved_directories(executor, members, _mounts())
        left = max((_kill_members(directory) for directory in directories), default=0)
        oom_kills = sum(_counter(place / name, b"oom_kill") for place in directories for name in _OOM_COUNTERS)
        pids_refused = sum(_counter(directory / "pids.events", b"max") for directory in directories)
        for directory in directories:
            try:
                directory.rmdir()
            except FileNotFoundError:
                continue
            except OSError:
                left = max(left, 1)  # killed processes that have not exited yet
        return KillRound(left, oom_kills, pids_refused)

    def holds(self, uid: int) -> bool:
        """Return whether any executor's group has a process of this uid."""
        return any(
            part.startswith(f"{_PREFIX}x-")
            for process in processes()
            if uid in process.uids
            for path in _cgroups_of(str(process.pid)).values()
            for part in path.split("/")
        )


def moved_directories(
    executor: str, members: Iterable[dict[str, str]], mounts: dict[str, tuple[str, str]]
) -> list[Path]:
    """Return the executor's directories that an earlier launcher made in another place than this one.

    `members` has, for each process of the machine, its path by controller.
    """
    found: dict[Path, None] = {}
    for paths in members:
        for controller, path in paths.items():
            head, mark, _ = f"{path}/".partition(f"/{_PREFIX}{executor}/")
            if mark and controller in mounts and ".." not in head.split("/"):  # `..` leads outside the tree
                found[_below(mounts[controller], f"{head}{mark}")] = None
    return list(found)


def enter(directory: Path) -> None:
    """Move the calling process, which must have one thread, into a group; where possible, move the thread instead."""
    file = directory / "tasks"
    (file if file.exists() else directory / "cgroup.procs").write_text("0")


def fork_into(groups: Groups, directories: list[Path]) -> tuple[int, Path | None]:
    """Fork. Return the pid (0 in the child) and the group in which the child was created, if any.

    The child is created in a version 2 group by clone3(2) (Linux 5.7), for which Python has no call. Writing to
    `cgroup.procs` instead would wait until no process of the machine forks or exits: tens of milliseconds.
    """
    if groups.version == "v2" and directories:
        api, libc = ctypes.pythonapi, ctypes.PyDLL(None)
        directory = os.open(directories[0], os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        call = struct.pack("=11Q", 1 << 33, 0, 0, 0, signal.SIGCHLD, 0, 0, 0, 0, 0, directory)  # CLONE_INTO_CGROUP
        api.PyOS_BeforeFork()
        pid = int(libc.syscall(ctypes.c_long(435), call, ctypes.c_size_t(len(call))))
        api.PyOS_AfterFork_Child() if pid == 0 else api.PyOS_AfterFork_Parent()
        os.close(directory)
        if pid >= 0:
            return pid, directories[0]
    return os.fork(), None


def _kill_members(directory: Path) -> int:
    """Kill all processes in one directory if its hierarchy can do that; return the number of processes."""
    if (directory / "cgroup.kill").exists():
        _try_write(directory / "cgroup.kill", "1")
        return len(_members(directory))
    for name, frozen, thawed in _FREEZERS:
        if (directory / name).exists():
            _try_write(directory / name, frozen)
            for pid in _members(directory):
                kill(pid)
            _try_write(directory / name, thawed)
    return len(_members(directory))


def _members(directory: Path) -> list[int]:
    with suppress(OSError):
        return [int(line) for line in (directory / "cgroup.procs").read_bytes().split() if line != b"0"]
    return []


def _counter(path: Path, name: bytes) -> int:
    """Return the value of `name` in a `key value` file, or 0."""
    with suppress(OSError, ValueError):
        for line in path.read_bytes().splitlines():
            key, _, value = line.partition(b" ")
            if key == name:
                return int(value)
    return 0


def _limit_memory(directory: Path, size: int) -> None:
    if (directory / "memory.max").exists():
        _write(directory / "memory.max", size)
        _try_write(directory / "memory.swap.max", "0")
    else:
        _write(directory / "memory.limit_in_bytes", size)
        # One page more: otherwise the limit of memory plus swap is reached first, and memory.failcnt stays 0.
        _try_write(directory / "memory.memsw.limit_in_bytes", str(size + _LARGEST_PAGE))


def _write(path: Path, value: int) -> None:
    with path.open("w") as file:  # fails if the file is missing: a cgroup directory lets nobody create one
        file.write(str(value))


def _try_write(path: Path, value: str) -> None:
    with suppress(OSError):
        if path.exists():
            path.write_text(value)


# ---------------------------------------------------------------- finding the hierarchies


def find_groups() -> Groups:
    """Find the places where groups can be made, by making one. In version 2 this may move the launcher into a leaf."""
    own, mounts = _cgroups_of("self"), _mounts()
    found = Groups()
    if "" in own and "" in mounts:
        base, controllers = _version_2(_below(mounts[""], own[""]), Path(mounts[""][1]))
        if controllers or _usable(base, "cgroup.kill"):
            found.version, found.tree, found.limits = "v2", base, dict.fromkeys(controllers, base)
    for controller in (*_CONTROLLERS, "freezer"):
        if controller in found.limits or controller not in own or controller not in mounts:
            continue
        base = _below(mounts[controller], own[controller])
        if not _usable(base, "cgroup.procs"):
            continue
        if controller != "freezer":
            found.limits[controller] = base
        elif found.tree is None:
            found.version, found.tree = "v1", base
    if found.tree is None:
        found.limits = {}
        found.why = "The launcher can make no cgroup here: it needs Delegate=yes in its unit, or to be root."
    elif missing := [name for name in _CONTROLLERS if name not in found.limits]:
        found.why = f"Not limited here: {', '.join(missing)}. The launcher was not given the cgroup controller."
    return found


def _version_2(own: Path, top: Path) -> tuple[Path, list[str]]:
    """Return the directory whose groups can have controllers, and these controllers; otherwise our own group and none.

    A group that gives controllers to its children must not hold processes itself. Our own group qualifies if systemd
    put the launcher into a leaf of it (DelegateSubgroup) or if the launcher can move into one. Otherwise root makes a
    group at the top, beside systemd's groups: a restart of the unit leaves it alone while executors live.
    """
    if own.name == _LEAF and (controllers := _delegate(own.parent)):
        return own.parent, controllers
    with suppress(OSError):
        (top / _TOP).mkdir(exist_ok=True)
        (top / _TOP).chmod(0o755)
        if _delegate(top) and (controllers := _delegate(top / _TOP)):
            return top / _TOP, controllers
        (top / _TOP).rmdir()
    if _members(own) == [os.getpid()] and _usable(own, "cgroup.procs"):
        (own / _LEAF).mkdir(exist_ok=True)
        _try_write(own / _LEAF / "cgroup.procs", "0")
    return own, _delegate(own)


def _delegate(base: Path) -> list[str]:
    """Enable the limits' controllers for the children of `base`; return those that are enabled afterwards."""
    with suppress(OSError):
        for name in _CONTROLLERS:
            if name in (base / "cgroup.controllers").read_text().split():
                _try_write(base / "cgroup.subtree_control", f"+{name}")
        enabled = (base / "cgroup.subtree_control").read_text().split()
        return [name for name in _CONTROLLERS if name in enabled]
    return []


def _usable(base: Path, file: str) -> bool:
    """Return whether a new group in `base` would have this file."""
    trial = base / f"{_PREFIX}trial-{os.getpid()}"
    try:
        trial.mkdir()
        try:
            return os.access(trial / file, os.W_OK)
        finally:
            trial.rmdir()
    except OSError:
        return False


def _cgroups_of(pid: str) -> dict[str, str]:
    """Return a process's path by controller; version 2 has the empty name."""
    found: dict[str, str] = {}
    with suppress(OSError, ValueError):
        for line in Path("/proc", pid, "cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            found.update(dict.fromkeys(controllers.split(","), path))
    return found


def _mounts() -> dict[str, tuple[str, str]]:
    """Return (root, mount point) by controller. (proc(5), mountinfo)"""
    found: dict[str, tuple[str, str]] = {}
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        root, point = before.split(" ")[3:5]
        kind, _, options = after.split(" ", 2)
        if kind in ("cgroup", "cgroup2"):
            for name in [""] if kind == "cgroup2" else options.split(","):
                found.setdefault(name, (root, point))
    return found


def _below(mount: tuple[str, str], path: str) -> Path:
    root, point = mount
    return Path(point, path.removeprefix("" if root == "/" else root).strip("/"))
