"""Executors that are processes of this host, whoever they run as: looked at, waited for, found again."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import anyio

from hutch_daemon.environments import cgroups
from hutch_daemon.environments.port import MARK, Alive, Exited, Launched
from hutch_daemon.environments.processes import ProcessEntry, environ_mark, look_up
from hutch_shared.errors import HutchError, Reason
from hutch_shared.unix import ancestors, boot_id

__all__ = ["NO_PLACES", "Local", "Places", "open_output", "refused_start"]


Places = tuple[Sequence[str], Sequence[str]]
"""What no agent may see, and programs of Hutch that none may change."""
NO_PLACES: Final[Places] = ((), ())


class Local:
    """What environments of this host share."""

    def __init__(self, output: int) -> None:
        """`output` bounds an executor's log file in bytes."""
        self._output = output
        self._boot = boot_id()
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        """Executors that are children of hutchd itself."""

    async def poll(self, launched: Launched) -> Alive | Exited:
        """Look at the process; a child of ours that ended is taken away."""
        process = self._executor(launched)
        if process is not None and not process.dead:
            return Alive()
        child = self._children.pop(launched.pid, None)
        return Exited(None if child is None else child.wait())

    async def wait(self, launched: Launched) -> Exited:
        """Wait on a pidfd."""
        try:
            handle = os.pidfd_open(launched.pid)
        except ProcessLookupError:
            handle = None
        try:
            while isinstance(result := await self.poll(launched), Alive):
                assert handle is not None, "what lives has a pidfd"
                await anyio.wait_readable(handle)
            return result
        finally:
            if handle is not None:
                os.close(handle)

    def adopt(self, state: Mapping[str, Any]) -> Launched | None:
        """Find the executor of a launch record again."""
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

    def owns(self, launched: Launched, pid: int) -> bool:
        """Look at cgroup, descent and mark."""
        return (
            launched.executor in cgroups.of_process(pid)
            or (self._executor(launched) is not None and launched.pid in ancestors(pid))
            or environ_mark(pid, MARK) == launched.executor
        )

    def trim_output(self, launched: Launched) -> None:
        """Keep the newest half of the bound when the log has outgrown it; the executor appends, so it goes on."""
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
        """Return the process of `launched`, a zombie too; None when that pid is nobody's or another's."""
        if launched.boot_id != self._boot:
            return None
        process = look_up(launched.pid)
        return process if process is not None and process.start_time == launched.start_time else None


def open_output(path: Path) -> int:
    """Return a descriptor that appends to an executor's log, which is made; OSError when it cannot be."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def refused_start(error: OSError) -> HutchError:
    """Return what is said of an executor that cannot be started."""
    return HutchError(
        Reason.AGENT_UNAVAILABLE, f"The executor cannot be started: {error.strerror or type(error).__name__}."
    )
