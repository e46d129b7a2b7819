"""Detects that the session exceeded a limit of its cgroup: processes killed for memory, forks refused.

The executor runs in its session's cgroup and reads the group's own counters from a few small files. Without a cgroup,
or in the root cgroup, there is nothing to read and no limit to exceed.

The kernel also kills processes when the whole machine is out of memory. So a kill counts as the session's own limit
only if the group has a limit and reached it (`oom` in version 2, `memory.failcnt` in version 1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from hutch_executor.process.cgroups import Controller, LimitGroup, own_groups, read_field, read_number
from hutch_shared.events import Notice

__all__ = ["OVER_LIMIT", "LimitWatch"]

OVER_LIMIT: Final = "over_limit"
_NO_LIMIT: Final = 1 << 60
"""Version 1 reports "no limit" as a number above this one."""


@dataclass(frozen=True, slots=True)
class _Counters:
    """The group's counters; they only grow."""

    killed: int = 0
    """Processes killed because memory ran out."""
    full: int = 0
    """Times that the group reached its own memory limit."""
    refused: int = 0
    """Forks that were refused."""


class LimitWatch:
    """Reports limits exceeded since the last look. A look takes a few microseconds and may be made from any task."""

    def __init__(self, groups: dict[Controller, LimitGroup] | None = None) -> None:
        """Watch `groups` from now on; by default those of this process."""
        self._groups = own_groups() if groups is None else groups
        self._seen = self._read(_Counters())

    def __repr__(self) -> str:
        return f"<LimitWatch {', '.join(f'{name} {group.path}' for name, group in self._groups.items()) or 'nothing'}>"

    def take_notices(self) -> list[Notice]:
        """Return a notice for each limit exceeded since the last call, or since the start; `over_limit` first."""
        seen = self._seen
        now = self._seen = self._read(seen)
        found: list[Notice] = []
        if killed := now.killed - seen.killed:
            limit = self._memory_limit()
            were = "1 process was" if killed == 1 else f"{killed} processes were"
            if limit is not None and now.full > seen.full:
                message = f"The session exceeded its memory limit of {_bytes(limit)}: {were} killed."
                found.append(Notice(OVER_LIMIT, message, {"limit": "memory", "value": limit, "killed": killed}))
            else:
                message = f"The machine ran out of memory: {were} killed in this session."
                found.append(Notice("out_of_memory", message, {"killed": killed}))
        if refused := now.refused - seen.refused:
            limit = self._pids_limit()
            its = "the machine's limit of processes" if limit is None else f"its limit of {limit} processes and threads"
            message = f"The session exceeded {its}: {refused} more could not be started."
            found.append(Notice(OVER_LIMIT, message, {"limit": "pids", "value": limit, "refused": refused}))
        return sorted(found, key=lambda notice: notice.word != OVER_LIMIT)

    def _read(self, least: _Counters) -> _Counters:
        """Return the counters now. A counter that cannot be read keeps its value in `least`."""
        memory, pids = self._groups.get("memory"), self._groups.get("pids")
        killed = full = refused = 0
        if memory is not None and memory.version == 2:
            killed = read_field(memory.path / "memory.events", "oom_kill")
            local = memory.path / "memory.events.local"
            full = read_field(local if local.exists() else memory.path / "memory.events", "oom")
        elif memory is not None:
            killed = read_field(memory.path / "memory.oom_control", "oom_kill")
            full = read_number(memory.path / "memory.failcnt") or 0
        if pids is not None:
            refused = read_field(pids.path / "pids.events", "max")
        return _Counters(max(killed, least.killed), max(full, least.full), max(refused, least.refused))

    def _memory_limit(self) -> int | None:
        group = self._groups["memory"]
        name = "memory.max" if group.version == 2 else "memory.limit_in_bytes"
        found = read_number(group.path / name)
        return found if found is not None and found < _NO_LIMIT else None

    def _pids_limit(self) -> int | None:
        return read_number(self._groups["pids"].path / "pids.max")


def _bytes(count: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.4g} {unit}"
    return f"{count} bytes"
