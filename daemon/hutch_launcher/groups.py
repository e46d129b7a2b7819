"""The processes of executors: a cgroup for each, named `hutch-<executor id>`, in each hierarchy that is of use.

| host | killed by | limits by |
|---|---|---|
| version 2, delegated | cgroup.kill | its controllers |
| both | cgroup.kill of the version 2 tree, where it has it | version 1: memory, pids, cpu |
| version 1 | freezer: what is frozen cannot outrun its killer | likewise |
| none | descent from the executor | – |

Nothing here waits: a round of killing does what can be done now, and says what is left.
"""

from __future__ import annotations

import ctypes
import os
import signal
import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

__all__ = ["Groups", "Left", "Process", "enter", "find_groups", "fork_into", "kill", "kill_family", "processes"]

_PREFIX: Final = "hutch-"
_LEAF: Final = "launcher"
_LARGEST_PAGE: Final = 64 * 1024
_TOP: Final = "hutch-launcher"
_LIMITS: Final = ("memory", "pids", "cpu")


@dataclass(frozen=True)
class Left:
    """What a round of killing left, and how often the limits were met until then."""

    left: int
    oom: int = 0
    full: int = 0


@dataclass(frozen=True)
class Process:
    """One line of the table of processes; `uids` are the real, effective, saved and file system one."""

    pid: int
    parent: int
    session: int
    start: int
    uids: frozenset[int]


def processes() -> Iterator[Process]:
    """Look at each process there is, without zombies."""
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError, ValueError, IndexError):
                fields = Path("/proc", name, "stat").read_bytes().rpartition(b")")[2].split()
                status = Path("/proc", name, "status").read_bytes()
                uids = frozenset(map(int, status.partition(b"\nUid:")[2].split(b"\n", 1)[0].split()))
                if fields[0] not in (b"Z", b"X"):
                    yield Process(int(name), int(fields[1]), int(fields[3]), int(fields[19]), uids)


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    """Signal a process, unless it has gone."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def kill_family(pid: int, start: int, uid: int) -> int:
    """Do a round without a cgroup: kill what descends from an executor or is in its session; return how many.

    Orphans come back to the executor, so it is stopped first and killed when it has no descendants any more.
    """
    table = {one.pid: one for one in processes()}
    root = table.get(pid)
    if root is not None and root.start != start:
        return 0
    family = {one.pid for one in table.values() if uid in one.uids and (one.session == pid or one.pid == pid)}
    while more := {one.pid for one in table.values() if one.parent in family} - family:
        family |= more
    if root is not None:
        kill(pid, signal.SIGSTOP if len(family) > 1 else signal.SIGKILL)
    for one in family - {pid}:
        kill(one)
    return len(family)


# ---------------------------------------------------------------- finding the place


@dataclass
class Groups:
    """Where groups are made: `tree` is what kills, `limits` the directory in which each limit is set."""

    version: str = ""
    tree: Path | None = None
    limits: dict[str, Path] = field(default_factory=dict)
    why: str = ""

    def places(self, executor: str) -> list[Path]:
        """Return the executor's directory in each hierarchy, the one that kills first."""
        trees = [tree for tree in (self.tree, *self.limits.values()) if tree is not None]
        return [tree / f"{_PREFIX}{executor}" for tree in dict.fromkeys(trees)]

    # ------------------------------------------------------------ making

    def make(self, executor: str, memory: int, pids: int, cpu_weight: int) -> list[Path]:
        """Make the group with its limits; return its directories. OSError when it cannot be, and then none is left."""
        made: list[Path] = []
        try:
            for place in self.places(executor):
                with suppress(OSError):
                    place.rmdir()  # an empty one, of an executor that has ended
                place.mkdir()
                place.chmod(0o755)  # an executor reads its counters there, hutchd who is in it
                made.append(place)
            if memory and "memory" in self.limits:
                _bound_memory(self.limits["memory"] / f"{_PREFIX}{executor}", memory)
            if pids and "pids" in self.limits:
                _write(self.limits["pids"] / f"{_PREFIX}{executor}" / "pids.max", pids)
            if cpu_weight and "cpu" in self.limits:
                cpu = self.limits["cpu"] / f"{_PREFIX}{executor}"
                if (cpu / "cpu.weight").exists():
                    _write(cpu / "cpu.weight", cpu_weight)
                else:
                    _write(cpu / "cpu.shares", max(2, cpu_weight * 1024 // 100))
        except OSError:
            for place in made:
                with suppress(OSError):
                    place.rmdir()
            raise
        return made

    # ------------------------------------------------------------ killing

    def kill(self, executor: str) -> Left:
        """Kill all that is in the executor's group and remove it, as far as that can be done at once."""
        places = [place for place in self.places(executor) if place.exists()]
        if not places:
            places = _elsewhere(executor)
        left = 0
        for place in places:
            left = max(left, _kill(place))
        oom = sum(_counter(place / name, b"oom_kill") for place in places for name in _OOM)
        full = sum(_counter(place / "pids.events", b"max") for place in places)
        for place in places:
            try:
                place.rmdir()
            except FileNotFoundError:
                continue
            except OSError:
                left = max(left, 1)  # some are on their way out
        return Left(left, oom, full)

    def holds(self, uid: int) -> bool:
        """Tell whether a process of this uid is in the group of any executor."""
        return any(
            part.startswith(f"{_PREFIX}x-")
            for process in processes()
            if uid in process.uids
            for path in _own(f"/proc/{process.pid}/cgroup").values()
            for part in path.split("/")
        )


_OOM: Final = ("memory.events", "memory.oom_control")
_FREEZERS: Final = (("freezer.state", "FROZEN", "THAWED"), ("cgroup.freeze", "1", "0"))


def _kill(place: Path) -> int:
    """Kill all in one directory, where its hierarchy is one that kills; return how many there were."""
    if (place / "cgroup.kill").exists():
        _try(place / "cgroup.kill", "1")
        return len(_pids(place))
    for name, on, off in _FREEZERS:
        if (place / name).exists():
            _try(place / name, on)
            for pid in _pids(place):
                kill(pid)
            _try(place / name, off)
    return len(_pids(place))


def _elsewhere(executor: str) -> list[Path]:
    """Return the executor's directories below other places, where a launcher that ran elsewhere has made them."""
    found: dict[Path, None] = {}
    mounts = _mounts()
    for process in processes():
        for controller, path in _own(f"/proc/{process.pid}/cgroup").items():
            head, mark, _ = f"{path}/".partition(f"/{_PREFIX}{executor}/")
            if mark and controller in mounts and ".." not in head.split("/"):  # it is in another's view of the tree
                found[_below(mounts[controller], f"{head}{mark}")] = None
    return list(found)


def _pids(place: Path) -> list[int]:
    with suppress(OSError):
        return [int(line) for line in (place / "cgroup.procs").read_bytes().split() if line != b"0"]
    return []


def enter(place: Path) -> None:
    """Go into a group; the caller is its process's one thread, and to move a thread costs less than a process."""
    file = place / "tasks"
    (file if file.exists() else place / "cgroup.procs").write_text("0")


def fork_into(groups: Groups, places: list[Path]) -> tuple[int, Path | None]:
    """Fork; returns the pid, 0 in the child, and the group that the child is born in, if that is possible.

    That is one of version 2, by clone3(2) (Linux 5.7), which Python has no call for. To write into its `cgroup.procs`
    instead would wait for a moment in which no process of the machine forks or ends, tens of milliseconds.
    """
    if groups.version == "v2" and places:
        api, libc = ctypes.pythonapi, ctypes.PyDLL(None)
        place = os.open(places[0], os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        call = struct.pack("=11Q", 1 << 33, 0, 0, 0, signal.SIGCHLD, 0, 0, 0, 0, 0, place)  # CLONE_INTO_CGROUP
        api.PyOS_BeforeFork()
        pid = int(libc.syscall(ctypes.c_long(435), call, ctypes.c_size_t(len(call))))
        api.PyOS_AfterFork_Child() if pid == 0 else api.PyOS_AfterFork_Parent()
        os.close(place)
        if pid >= 0:
            return pid, places[0]
    return os.fork(), None


def _counter(path: Path, name: bytes) -> int:
    with suppress(OSError, ValueError):
        for line in path.read_bytes().splitlines():
            key, _, value = line.partition(b" ")
            if key == name:
                return int(value)
    return 0


def _bound_memory(place: Path, size: int) -> None:
    if (place / "memory.max").exists():
        _write(place / "memory.max", size)
        _try(place / "memory.swap.max", "0")
    else:
        _write(place / "memory.limit_in_bytes", size)
        # a page more, or memory.failcnt would count nothing: with one bound for both, that of swap is met first
        _try(place / "memory.memsw.limit_in_bytes", str(size + _LARGEST_PAGE))


def _write(path: Path, value: int) -> None:
    with path.open("w") as file:  # never makes a file: a cgroup directory takes none
        file.write(str(value))


def _try(path: Path, value: str) -> None:
    with suppress(OSError):
        if path.exists():
            path.write_text(value)


# ---------------------------------------------------------------- looking for the hierarchies


def find_groups() -> Groups:
    """Look where groups can be made now, by making one; in version 2 this may move the launcher into a leaf."""
    own, mounts = _own("/proc/self/cgroup"), _mounts()
    found = Groups()
    if "" in own and "" in mounts:
        base, given = _version_2(_below(mounts[""], own[""]), Path(mounts[""][1]))
        if given or _usable(base, "cgroup.kill"):
            found.version, found.tree, found.limits = "v2", base, dict.fromkeys(given, base)
    for controller in (*_LIMITS, "freezer"):
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
    elif missing := [name for name in _LIMITS if name not in found.limits]:
        found.why = f"Not limited here: {', '.join(missing)}. The cgroup controller is not given to the launcher."
    return found


def _version_2(own: Path, top: Path) -> tuple[Path, list[str]]:
    """Return where groups can have controllers, and which; our own place and none where they cannot.

    A group that hands controllers on must hold no process itself: not our own, but where systemd put us into a leaf of
    it (DelegateSubgroup), or we can go into one. Else a group of its own at the top, if we are root: beside systemd's,
    which it leaves alone, and out of the way of a unit that is started again while executors live.
    """
    if own.name == _LEAF and (given := _controllers(own.parent)):
        return own.parent, given
    with suppress(OSError):
        (top / _TOP).mkdir(exist_ok=True)
        (top / _TOP).chmod(0o755)
        if _controllers(top) and (given := _controllers(top / _TOP)):
            return top / _TOP, given
        (top / _TOP).rmdir()
    if _pids(own) == [os.getpid()] and _usable(own, "cgroup.procs"):
        (own / _LEAF).mkdir(exist_ok=True)
        _try(own / _LEAF / "cgroup.procs", "0")
    return own, _controllers(own)


def _controllers(base: Path) -> list[str]:
    """Have `base` hand on the controllers of limits that it has; return those that groups below it have then."""
    with suppress(OSError):
        for name in _LIMITS:
            if name in (base / "cgroup.controllers").read_text().split():
                _try(base / "cgroup.subtree_control", f"+{name}")
        given = (base / "cgroup.subtree_control").read_text().split()
        return [name for name in _LIMITS if name in given]
    return []


def _usable(base: Path, file: str) -> bool:
    """Tell whether a group can be made in `base` and has this file."""
    trial = base / f"{_PREFIX}trial-{os.getpid()}"
    try:
        trial.mkdir()
        try:
            return os.access(trial / file, os.W_OK)
        finally:
            trial.rmdir()
    except OSError:
        return False


def _own(file: str) -> dict[str, str]:
    """Return the path in each hierarchy by controller; version 2 has the empty name."""
    found: dict[str, str] = {}
    with suppress(OSError, ValueError):
        for line in Path(file).read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            found.update(dict.fromkeys(controllers.split(","), path))
    return found


def _mounts() -> dict[str, tuple[str, str]]:
    """Return (its root, where it is mounted) of each hierarchy by controller. (proc(5), mountinfo)"""
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
