"""The common part of both environments, whose executors are processes of this host."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import anyio

from hutch_daemon.environments.cgroups import PREFIX
from hutch_daemon.environments.kernel_limits import gids_of, limits_of
from hutch_daemon.environments.port import Alive, Exited, InForce, Launched
from hutch_daemon.environments.processes import ProcessEntry, look_up
from hutch_daemon.environments.sandbox_probe import Places
from hutch_shared import messages as m
from hutch_shared.errors import HutchError, Reason
from hutch_shared.processes import boot_id

__all__ = ["NO_PLACES", "Local", "open_output", "reaper_record", "refused_start"]

NO_PLACES: Final[Places] = ((), ())
_REAPER_DEADLINE: Final = 0.2
"""Seconds that `wait` gives a reaper to say how its executor ended. `kill` may have work that the reaper cannot do."""
_UNKNOWN_CODE: Final = 255
"""The exit code of a reaper that has not seen how its executor ended."""


class Local:
    """The base of environments whose executors are processes of this host."""

    def __init__(self, output: int) -> None:
        """`output` limits an executor's log file, in bytes."""
        self._output = output
        self._boot = boot_id()
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        """The children of hutchd, by the pid of the executor: executors themselves, or their reapers."""
        self._ending: list[subprocess.Popen[bytes]] = []
        """Reapers whose executor has ended, but which have not ended themselves."""

    async def poll(self, launched: Launched) -> Alive | Exited:
        """Return whether the process lives, and reap it, or its reaper, if that is a child of hutchd that ended.

        The exit code is unknown while the reaper still ends what the executor left.
        """
        self._ending = [child for child in self._ending if child.poll() is None]
        process = self._executor(launched)
        if process is not None and not process.dead:
            return Alive()
        child = self._children.pop(launched.pid, None)
        if child is None:
            return Exited(None)
        code = child.poll()
        if code is None:
            self._ending.append(child)
        return Exited(_own_code(code) if child.pid != launched.pid else code)

    async def wait(self, launched: Launched) -> Exited:
        """Wait until the process ends, using a pidfd, and then a moment for its reaper to end what is left."""
        executor, reaper = _opened(launched.pid), None
        try:
            reaper = _opened(one.pid) if (one := self._reaper(launched)) is not None else None
            process = self._executor(launched)
            if process is not None and not process.dead:
                assert executor is not None, "a living process has a pidfd"
                await anyio.wait_readable(executor)
            if reaper is not None:
                with anyio.move_on_after(_REAPER_DEADLINE):
                    await anyio.wait_readable(reaper)
            result = await self.poll(launched)
            assert isinstance(result, Exited), "its pidfd says that it has ended"
            return result
        finally:
            for handle in (executor, reaper):
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

    def _reaper(self, launched: Launched) -> ProcessEntry | None:
        """Return the reaper of `launched`; None if it has ended, or the executor has none."""
        record = launched.state.get("reaper")
        if launched.boot_id != self._boot or not isinstance(record, dict):
            return None
        process = look_up(int(record["pid"]))
        is_same = process is not None and not process.dead and process.start_time == record["start_time"]
        return process if is_same else None

    def _wait_child(self, launched: Launched, deadline: float) -> None:
        """Reap the executor, or its reaper, if it is a child of hutchd. Blocks until `deadline` (monotonic)."""
        child = self._children.pop(launched.pid, None)
        if child is not None:
            try:
                child.wait(timeout=max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                self._ending.append(child)


def reaper_record(executor: ProcessEntry, started: int) -> dict[str, int] | None:
    """Return what a launch record says of the reaper: the process `started`, if that is not the executor itself."""
    reaper = look_up(started) if started != executor.pid else None
    return None if reaper is None else {"pid": reaper.pid, "start_time": reaper.start_time}


def _own_code(code: int | None) -> int | None:
    """Return how the executor ended, as `Popen.returncode`, from its reaper's; None if the reaper does not say."""
    if code is None or code < 0 or code == _UNKNOWN_CODE:
        return None
    return 128 - code if code > 128 else code


def _opened(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return None


def open_output(path: Path) -> int:
    """Return a descriptor that appends to an executor's log, which is created if it is missing. OSError on failure."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def refused_start(error: OSError) -> HutchError:
    """Return the error for an executor that cannot be started."""
    return HutchError(
        Reason.AGENT_UNAVAILABLE, f"The executor cannot be started: {error.strerror or type(error).__name__}."
    )
