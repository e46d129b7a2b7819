"""Which session a process belongs to, if any: this tells agents from users at the client socket."""

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

    `not_allowed` when the parents of `pid` cannot be found, as when it has ended: it may have passed its connection on
    to a process that hides behind it. The caller checks afterwards that `pid` still lives.

    `executors` maps the pids of live executors to their ids. The traces are tried from the one that is hardest to get
    rid of: the cgroup, the line of parents, the mark in the environment of a process in that line.
    """
    known = frozenset(executors.values())
    for executor in group(pid):
        if executor in known:
            return executor
    descent = line(pid)
    if not descent and line(os.getpid()):  # a system that does not even tell our own parents has no such look-up
        raise HutchError(Reason.NOT_ALLOWED, "Nobody can tell whose process made this connection.")
    for one in descent:
        if one in executors:
            return executors[one]
    marks = (mark(one, MARK) for one in descent)
    return next((executor for executor in marks if executor in known), None)
