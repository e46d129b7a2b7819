"""The cgroups that count this process's memory and processes: version 1, version 2, or a mix of both.

Their files are described in the kernel's documentation (cgroup-v1/memory, cgroup-v2); mounts in proc(5).
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

__all__ = ["Controller", "LimitGroup", "own_groups", "read_field", "read_number"]

Controller = Literal["memory", "pids"]


@dataclass(frozen=True, slots=True)
class LimitGroup:
    """A cgroup's directory, and the version of its hierarchy."""

    path: Path
    version: Literal[1, 2]


def own_groups(proc: Path = Path("/proc/self")) -> dict[Controller, LimitGroup]:
    """Return the cgroup of each controller, as `proc` names them. A controller without a group is left out."""
    found: dict[Controller, LimitGroup] = {}
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
            group = _directory_of(places.get(controller), mounts.get(controller))
            counted = "memory.oom_control" if (name, version) == ("memory", 1) else f"{name}.events"
            if group is not None and (group / counted).exists():
                found[name] = LimitGroup(group, version)
    return found


def _mounts(mountinfo: str) -> dict[str, tuple[str, str]]:
    """Return (root, mount point) of each controller's hierarchy. The hierarchy of version 2 has the empty name."""
    found: dict[str, tuple[str, str]] = {}
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        _, _, _, root, point, *_ = before.split(" ")
        kind, _, options = after.split(" ", 2)
        if kind == "cgroup2":
            found.setdefault("", (root, point))
        elif kind == "cgroup":
            for option in options.split(","):
                found.setdefault(option, (root, point))
    return found


def _directory_of(path: str | None, mount: tuple[str, str] | None) -> Path | None:
    """Return the directory of cgroup `path`; None if the mount does not show that part of the hierarchy."""
    if path is None or mount is None:
        return None
    root, point = mount
    if root != "/":
        if path != root and not path.startswith(f"{root}/"):
            return None
        path = path.removeprefix(root)
    return None if "/../" in f"{path}/" else Path(point, path.lstrip("/"))


def read_field(path: Path, name: str) -> int:
    """Return the value of `name` in a file of `key value` lines, or 0."""
    with suppress(OSError, ValueError):
        for line in path.read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == name:
                return int(value)
    return 0


def read_number(path: Path) -> int | None:
    """Return the number in a file; None if it has none."""
    with suppress(OSError, ValueError):
        return int(path.read_text())
    return None
