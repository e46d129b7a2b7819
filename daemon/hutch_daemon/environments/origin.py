"""Finds the executor that a process belongs to, if any. This distinguishes agents from users at the client socket."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from hutch_daemon.environments.cgroups import PREFIX
from hutch_daemon.environments.port import MARK
from hutch_shared.errors import HutchError, Reason
from hutch_shared.unix import ancestors

__all__ = ["InsiderLookup", "environ_mark", "insider_of"]


def environ_mark(pid: int, name: str) -> str | None:
    """Return a variable of the environment that `pid` was started with; None if it is missing or cannot be read."""
    try:
        environ = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return None
    prefix = os.fsencode(name) + b"="
    for item in environ.split(b"\0"):
        if item.startswith(prefix):
            return os.fsdecode(item[len(prefix) :])
    return None


def _cgroups_of(pid: int) -> tuple[str, ...]:
    """Return the executors whose cgroups `pid` is in: several for a hutchd that runs in a session of another one."""
    try:
        text = Path(f"/proc/{pid}/cgroup").read_text()
    except OSError:
        return ()
    parts = (part for line in text.splitlines() for part in line.split(":", 2)[-1].split("/"))
    return tuple(part.removeprefix(PREFIX) for part in parts if part.startswith(f"{PREFIX}x-"))


def insider_of(
    pid: int,
    executors: Mapping[int, str],
    *,
    line: Callable[[int], list[int]] = ancestors,
    mark: Callable[[int, str], str | None] = environ_mark,
    group: Callable[[int], tuple[str, ...]] = _cgroups_of,
) -> str | None:
    """Return the executor that `pid` belongs to, or None.

    `executors` maps the pids of live executors to their ids; without any there is nothing to look up. The look-up uses,
    in this order: the cgroup, which is the hardest to leave; the ancestors; the mark in the environment of the process
    or of an ancestor.

    `not_allowed` if the ancestors of `pid` cannot be found, for example because it has ended: it may have passed its
    connection to another process in order to hide it. The caller checks afterwards that `pid` still lives.
    """
    if not executors:
        return None
    known = frozenset(executors.values())
    for executor in group(pid):
        if executor in known:
            return executor
    descent = line(pid)
    if not descent and line(os.getpid()):  # if even hutchd's own ancestors cannot be found, the system has no look-up
        raise HutchError(Reason.NOT_ALLOWED, "The ancestors of the process that made this connection cannot be found.")
    for one in descent:
        if one in executors:
            return executors[one]
    marks = (mark(one, MARK) for one in descent)
    return next((executor for executor in marks if executor in known), None)


class InsiderLookup:
    """Finds the executor that a process belongs to."""

    def __init__(self, pids: Callable[[], Mapping[int, str]]) -> None:
        """`pids` returns the pids of live executors with their ids."""
        self._pids = pids

    def insider_of(self, pid: int) -> str | None:
        """Return the executor that `pid` belongs to, or None; see the function `insider_of`."""
        return insider_of(pid, self._pids())
