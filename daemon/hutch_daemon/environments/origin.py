"""Finds the executor that a process belongs to, if any. This distinguishes agents from users at the client socket."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from hutch_daemon.environments import cgroups
from hutch_daemon.environments.port import MARK
from hutch_daemon.environments.processes import environ_mark
from hutch_shared.errors import HutchError, Reason
from hutch_shared.unix import ancestors

__all__ = ["insider_of"]


def insider_of(
    pid: int,
    executors: Mapping[int, str],
    *,
    line: Callable[[int], list[int]] = ancestors,
    mark: Callable[[int, str], str | None] = environ_mark,
    group: Callable[[int], tuple[str, ...]] = cgroups.of_process,
) -> str | None:
    """Return the executor that `pid` belongs to, or None.

    `executors` maps the pids of live executors to their ids. The look-up uses, in this order: the cgroup, which is the
    hardest to leave; the ancestors; the mark in the environment of the process or of an ancestor.

    `not_allowed` if the ancestors of `pid` cannot be found, for example because it has ended: it may have passed its
    connection to another process in order to hide it. The caller checks afterwards that `pid` still lives.
    """
    known = frozenset(executors.values())
    for executor in group(pid):
        if executor in known:
            return executor
    descent = line(pid)
    if not descent and line(os.getpid()):  # if even hutchd's own ancestors cannot be found, the system has no look-up
        raise HutchError(Reason.NOT_ALLOWED, "Nobody can tell whose process made this connection.")
    for one in descent:
        if one in executors:
            return executors[one]
    marks = (mark(one, MARK) for one in descent)
    return next((executor for executor in marks if executor in known), None)
