"""Starts and ends executors without waiting: a pipe reports the result of a start, and an end takes rounds."""

from __future__ import annotations

import os
import signal
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hutch_launcher.child import become_executor
from hutch_launcher.groups import Groups, KillRound, find_groups, fork_into, kill_descendants
from hutch_launcher.packets import TEXT_SIZE, LaunchRequest, Refused
from hutch_launcher.rules import Config, ConfigFile, LaunchAccount
from hutch_launcher.spool import ExecutorRecords, make_account_directory

__all__ = ["ExecutorChild", "LaunchedExecutors", "PendingStart"]

_START_DEADLINE: Final = 5.0
_KILL_DEADLINE: Final = 10.0


@dataclass(frozen=True)
class ExecutorChild:
    """An executor that this launcher forked. `start` is in clock ticks since boot."""

    pid: int
    pidfd: int
    uid: int
    start: int


@dataclass(frozen=True, eq=False)
class PendingStart:
    """An executor that has been forked. The pipe `failure` closes when the program is executed, or gets an error text.

    `stream` is the other end of the executor's standard input, `pidfd` a second descriptor of the child, for hutchd.
    """

    executor: str
    child: ExecutorChild
    stream: socket.socket
    pidfd: int
    failure: int
    cgroup: str
    deadline: float

    def failed(self) -> str:
        """Return why the executor could not be started; "" if it was started. Call this once `failure` is readable."""
        return os.read(self.failure, TEXT_SIZE).decode(errors="replace")

    def close(self) -> None:
        """Close the launcher's descriptors of this start."""
        self.stream.close()
        os.close(self.pidfd)
        os.close(self.failure)


class LaunchedExecutors:
    """The executors of this host: those that this launcher forked, and the recorded ones of earlier launchers."""

    def __init__(self, config: ConfigFile) -> None:
        """Find the places where the launcher can make cgroups."""
        self.groups = find_groups()
        self.children: dict[str, ExecutorChild] = {}
        self._records = ExecutorRecords(config)
        self._ending: dict[str, float] = {}

    def find_groups_again(self) -> Groups:
        """Return the places for cgroups; look again if there were none before."""
        if self.groups.tree is None:
            self.groups = find_groups()
        return self.groups

    def runs_as(self, uid: int) -> bool:
        """Return whether an executor of this account lives."""
        return any(child.uid == uid for child in self.children.values()) or self.groups.holds(uid)

    # ------------------------------------------------------------ start

    def start(self, request: LaunchRequest, account: LaunchAccount, config: Config, output: int) -> PendingStart:
        """Fork an executor into its cgroup. After Refused or OSError `end_round` ends its processes, if any are
        left."""
        executor = request.executor
        make_account_directory(config.spool, account)
        try:
            self._records.create(executor)
            try:
                directories = self.groups.make(executor, request.memory, request.pids, request.cpu_weight)
            except OSError:
                self._records.remove(executor)
                raise
        except FileExistsError:
            raise Refused(f"There is an executor {executor} already.") from None
        deadline = time.monotonic() + _START_DEADLINE
        self._ending[executor] = deadline  # removed below if the start succeeds
        ours, theirs = socket.socketpair()
        failure, failure_in_child = os.pipe()
        try:
            pid, created_in = fork_into(self.groups, directories)
            if pid == 0:
                to_enter = [directory for directory in directories if directory != created_in]
                streams = (theirs.fileno(), output, output)
                become_executor(request, account, config, self.groups, to_enter, streams, failure_in_child)
            child = ExecutorChild(pid, os.pidfd_open(pid), account.uid, _start_time(pid))
            self.children[executor] = child
            self._records.write(executor, child.pid, child.start, child.uid)
            pidfd = os.dup(child.pidfd)
        except OSError:
            os.close(failure)
            raise
        finally:
            theirs.close()
            os.close(failure_in_child)
        del self._ending[executor]
        cgroup = str(directories[0]) if directories else ""
        return PendingStart(executor, child, ours, pidfd, failure, cgroup, deadline)

    # ------------------------------------------------------------ end

    def end(self, executor: str) -> KillRound:
        """Do one round of killing an executor and everything that it started."""
        child = self.children.get(executor)
        recorded = (child.pid, child.start, child.uid) if child else self._records.read(executor)
        if self.groups.tree is None and recorded is not None:
            killed = KillRound(kill_descendants(*recorded))
        else:
            if child is not None:
                signal.pidfd_send_signal(child.pidfd, signal.SIGKILL)
            killed = self.groups.kill(executor)
        self.reap(executor)
        if executor in self.children:
            killed = KillRound(max(killed.left, 1), killed.oom_kills, killed.pids_refused)
        if not killed.left:
            self._records.remove(executor)
        return killed

    def reap(self, executor: str) -> None:
        """Reap the executor's own process if it has exited."""
        child = self.children.get(executor)
        if child is not None and os.waitpid(child.pid, os.WNOHANG)[0]:
            os.close(child.pidfd)
            del self.children[executor]

    @property
    def ending(self) -> bool:
        """Whether `end_round` has work."""
        return bool(self._ending)

    def end_soon(self, executor: str) -> None:
        """Let `end_round` end this executor."""
        self._ending[executor] = time.monotonic() + _KILL_DEADLINE

    def end_all_soon(self) -> set[str]:
        """Let `end_round` end every executor, also those of earlier launchers; return them."""
        executors = self._records.executors()
        for executor in executors:
            self.end_soon(executor)
        return executors

    def end_round(self) -> dict[str, int]:
        """Do one round for each executor that must end. Return the processes left of executors given up."""
        given_up = {}
        for executor, deadline in list(self._ending.items()):
            left = self.end(executor).left
            if not left or time.monotonic() >= deadline:
                del self._ending[executor]
                if left:
                    given_up[executor] = left
        return given_up


def _start_time(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19])
