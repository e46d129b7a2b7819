"""Whose process is that? Tells a process of a session from a person, for the peers of the client socket."""

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
    """Return the executor that `pid` belongs to, else None.

    HutchError(NOT_ALLOWED) when its line of descent cannot be told, or it has ended: it may have handed its connection
    to one that hides behind it. That it lives still, the caller has to see afterwards.

    `executors` maps the pids of live executors to their ids. Asked in the order of what is hardest to shed: the cgroup,
    the line of descent, the mark in the environment of any process of that line.
    """
    known = frozenset(executors.values())
    for executor in group(pid):
        if executor in known:
            return executor
    descent = line(pid)
    if not descent and line(os.getpid()):  # where not even ours is found there is no such look-up to go by
        raise HutchError(Reason.NOT_ALLOWED, "Nobody can tell whose process made this connection.")
    for one in descent:
        if one in executors:
            return executors[one]
    marks = (mark(one, MARK) for one in descent)
    return next((executor for executor in marks if executor in known), None)
