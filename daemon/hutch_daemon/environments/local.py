"""The common part of both environments, whose executors are processes of this host."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import anyio

from hutch_daemon.environments.cgroups import PREFIX
from hutch_daemon.environments.kernel_limits import gids_of, limits_of
from hutch_daemon.environments.port import Alive, Exited, InForce, Launched
from hutch_daemon.environments.processes import ProcessEntry, look_up
from hutch_shared import messages as m
from hutch_shared.errors import HutchError, Reason
from hutch_shared.processes import boot_id

__all__ = ["NO_PLACES", "Local", "Places", "open_output", "refused_start"]


Places = tuple[Sequence[str], Sequence[str]]
"""Two lists: paths that no agent may see, and programs of Hutch that no agent may change."""
NO_PLACES: Final[Places] = ((), ())


class Local:
    """The base of environments whose executors are processes of this host."""

    def __init__(self, output: int) -> None:
        """`output` limits an executor's log file, in bytes."""
        self._output = output
        self._boot = boot_id()
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        """The executors that are children of hutchd, by pid."""

    async def poll(self, launched: Launched) -> Alive | Exited:
        """Return whether the process lives, and reap it if it is a child of hutchd that ended."""
        process = self._executor(launched)
        if process is not None and not process.dead:
            return Alive()
        child = self._children.pop(launched.pid, None)
        return Exited(None if child is None else child.wait())

    async def wait(self, launched: Launched) -> Exited:
        """Wait until the process ends, using a pidfd."""
        try:
            handle = os.pidfd_open(launched.pid)
        except ProcessLookupError:
            handle = None
        try:
            while isinstance(result := await self.poll(launched), Alive):
                assert handle is not None, "a living process has a pidfd"
                await anyio.wait_readable(handle)
            return result
        finally:
            if handle is not None:
                os.close(handle)

    def adopt(self, state: Mapping[str, Any]) -> Launched | None:
        """Return the executor of a launch record if its process lives, or None."""
        try:
            launched = Launched(
                str(state["executor"]),
                int(state["pid"]),
                int(state["start_time"]),
                str(state["boot_id"]),
                int(state["uid"]),
                dict(state),
            )
        except (KeyError, TypeError, ValueError):
            return None
        process = self._executor(launched)
        return launched if process is not None and not process.dead else None

    def in_force(self, launched: Launched) -> InForce:
        """Return the limits and groups that /proc and the cgroup's files show."""
        try:
            limits = limits_of(launched.pid, f"{PREFIX}{launched.executor}")
        except (OSError, ValueError):
            limits = m.ResourceLimits()
        try:
            return InForce(limits, gids_of(launched.pid))
        except (OSError, ValueError):
            return InForce(limits, None)

    def trim_output(self, launched: Launched) -> None:
        """Shorten a log that exceeds its limit to the newest half. The executor can go on appending meanwhile."""
        path = launched.state.get("log")
        with contextlib.suppress(OSError):
            handle = os.open(str(path), os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC)
            with os.fdopen(handle, "r+b") as log:
                if (size := os.fstat(handle).st_size) > self._output:
                    log.seek(size - self._output // 2)
                    tail = log.read(self._output // 2)
                    log.truncate(0)
                    log.write(tail)

    def _executor(self, launched: Launched) -> ProcessEntry | None:
        """Return the process of `launched`, even a zombie; None if the pid is free or belongs to another process."""
        if launched.boot_id != self._boot:
            return None
        process = look_up(launched.pid)
        return process if process is not None and process.start_time == launched.start_time else None


def open_output(path: Path) -> int:
    """Return a descriptor that appends to an executor's log, which is created if it is missing. OSError on failure."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def refused_start(error: OSError) -> HutchError:
    """Return the error for an executor that cannot be started."""
    return HutchError(
        Reason.AGENT_UNAVAILABLE, f"The executor cannot be started: {error.strerror or type(error).__name__}."
    )
