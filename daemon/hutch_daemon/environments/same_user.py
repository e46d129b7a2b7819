"""Runs executors as hutchd's own account, each in its own process session and, if the host allows it, its own cgroup.

hutchd finds the processes of an executor in three ways: by the cgroup; by descent, which also finds double-forked
children, because an executor and its reaper are subreapers; and by the mark in the environment, which children inherit.
`kill` first stops the executor with SIGSTOP, so that it starts no more processes, then kills the others, the executor,
and last the reaper, which meanwhile got the executor's orphans and so normally has nothing left to do.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Final

import anyio

from hutch_daemon.environments import cgroups
from hutch_daemon.environments.handover import await_ready, hand_over, name_senders
from hutch_daemon.environments.local import NO_PLACES, Local, open_output, reaper_record, refused_start
from hutch_daemon.environments.port import MARK, Account, IsolationOffer, Killed, Launched, LaunchSpec
from hutch_daemon.environments.processes import (
    ProcessEntry,
    descendants,
    end_all,
    scan,
    signal_it,
)
from hutch_daemon.environments.sandbox_probe import Places, SandboxProbe, SandboxProber, try_here
from hutch_daemon.settings import SandboxSettings
from hutch_shared import messages as m
from hutch_shared.errors import HutchError, Reason
from hutch_shared.failpoints import VARIABLES
from hutch_shared.processes import variable_of

__all__ = ["ARGV", "READY", "SameUser"]

ARGV: Final = (sys.executable, "-P", "-m", "hutch_executor", "--reaper")
"""The command of an executor, which gets a reaper.

`-P` keeps Python from importing modules from the directory in which it starts.
"""
_INHERITED: Final = frozenset(
    {"PATH", "LANG", "LANGUAGE", "TZ", "TMPDIR", "SSL_CERT_FILE", "SSL_CERT_DIR"}
    | {f"XDG_{name}" for name in ("RUNTIME_DIR", "CONFIG_HOME", "CACHE_HOME", "DATA_HOME")}
    | set(VARIABLES)
    | {spelt for name in ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY") for spelt in (name, name.lower())}
)
_INHERITED_PREFIX: Final = "LC_"
_KILL_DEADLINE: Final = 5.0
_REAPER_DEADLINE: Final = 1.0
"""Seconds that the reaper has to end by itself once nothing else is left."""
_LAST_LOOK: Final = 0.5
"""Seconds for the last search, in which killed processes have time to disappear."""
READY: Final = 30.0
"""Seconds within which an executor must be ready for its boot line."""


class SameUser(Local):
    """The environment `same-user`."""

    name = "same-user"
    asks_each_time = False

    def __init__(
        self,
        argv: Sequence[str] = ARGV,
        *,
        output: int = 1024 * 1024,
        cgroup: bool = True,
        places: Places = NO_PLACES,
        sandbox: Callable[[], SandboxSettings] = SandboxSettings,
    ) -> None:
        """`output` is the limit of an executor's log file, in bytes; `cgroup=False` uses no cgroups.

        `places` are the paths that no agent may see, and those that no agent may change. `sandbox` returns the settings
        for which the first `probe` tries the sandbox.
        """
        super().__init__(output)
        self._sandbox = sandbox
        self._tried = False
        self._prober = SandboxProber(places, try_here)
        self._argv = tuple(argv)
        self._root = cgroups.find_root() if cgroup else None

    def serves(self, account: Account) -> bool:
        """Serve hutchd's own account."""
        return account.uid == os.getuid()

    async def probe(self) -> str:
        """Try the sandbox at the first call, so that no session waits for it. There is nothing else to probe."""
        if not self._tried:
            self._tried = True
            await self._prober.probe(self._sandbox())
        return ""

    def isolation_offered(self) -> IsolationOffer:
        """Return the offer of an environment whose sessions share hutchd's account."""
        if self._root is not None:
            insiders = f"by cgroup (version {self._root.version}), by descent and by a mark in the environment"
        else:
            insiders = "by descent and by a mark in the environment"
        return IsolationOffer(
            separate_account=False,
            cgroup=self._root is not None,
            why="Sessions run as the same account as hutchd: they can reach each other's files, and yours.",
            insiders=f"{insiders}. A process of this account that hides on purpose can escape them all; only a"
            " sandbox that hides the client socket prevents that.",
            missing="A higher level needs a separate account for each session: `hutch service install --system`.",
        )

    async def check_account(self, account: Account) -> None:
        """Accept only hutchd's own account."""
        if not self.serves(account):
            raise HutchError(
                Reason.ISOLATION_UNAVAILABLE,
                f"Here executors run as uid {os.getuid()}; {account.name} (uid {account.uid}) would need the"
                " environment unix-user.",
            )

    async def probe_sandbox(self, account: Account, settings: SandboxSettings) -> SandboxProbe:
        """Try the sandbox as hutchd's own account."""
        return await self._prober.probe(settings)

    def doubt_sandbox(self, account: Account, kind: m.SandboxKind, probe: SandboxProbe) -> None:
        """Let the next probe try a kind again."""
        self._prober.doubt(kind, probe)

    def last_probe(self) -> SandboxProbe:
        """Return what is known without a trial."""
        return self._prober.last

    def gids_for(self, account: Account) -> tuple[int, ...]:
        """Return hutchd's own groups, which its executors inherit."""
        return tuple(sorted({os.getegid(), *os.getgroups()}))

    def spool_of(self, account: Account, executor: str) -> Path | None:
        """Return None: the account is hutchd's own."""
        return None

    async def sweep(self, account: Account) -> str:
        """Do nothing: the account belongs to a user."""
        return ""

    async def start(self, spec: LaunchSpec) -> Launched:
        """Start an executor; see the port."""
        await self.check_account(spec.account)
        return await anyio.to_thread.run_sync(self._start, spec)  # not cancellable: a started process must be recorded

    def _start(self, spec: LaunchSpec) -> Launched:
        group = self._root.make(spec.executor, spec.memory_limit, spec.pids, spec.cpu_weight) if self._root else None
        child: subprocess.Popen[bytes] | None = None
        ours, theirs = socket.socketpair()
        name_senders(ours)
        try:
            output = open_output(spec.log_path)
            try:
                child = subprocess.Popen(
                    self._argv,
                    stdin=theirs.fileno(),
                    stdout=output,
                    stderr=output,
                    cwd=spec.cwd,
                    env=self._environ(spec),
                    start_new_session=True,
                )
            finally:
                os.close(output)
                theirs.close()
            deadline = time.monotonic() + READY
            process = await_ready(ours, child.pid, spec.account.uid, deadline)
            if group is not None:
                for pid in {child.pid, process.pid}:  # before the boot line: without it no executor starts a process
                    group.enter(pid)
            hand_over(ours, process.pid, spec.account.uid, spec.boot, deadline)
        except (OSError, HutchError) as error:
            if child is not None:
                child.kill()
                child.wait()
            if group is not None:
                group.kill(time.monotonic() + _KILL_DEADLINE)
            if isinstance(error, HutchError):
                raise
            raise refused_start(error) from error
        finally:
            ours.close()
        self._children[process.pid] = child
        state = {
            "executor": spec.executor,
            "pid": process.pid,
            "start_time": process.start_time,
            "boot_id": self._boot,
            "uid": spec.account.uid,
            "log": str(spec.log_path),
            "cgroup": str(group.path) if group is not None else None,
            "reaper": reaper_record(process, child.pid),
        }
        return Launched(spec.executor, process.pid, process.start_time, self._boot, spec.account.uid, state)

    def _environ(self, spec: LaunchSpec) -> dict[str, str]:
        inherited = {
            name: value
            for name, value in os.environ.items()
            if name in _INHERITED or name.startswith(_INHERITED_PREFIX)
        }
        account = spec.account
        own = {"HOME": account.home, "USER": account.name, "LOGNAME": account.name, "SHELL": account.shell}
        return {"PATH": os.defpath, **inherited, **own, **spec.env, MARK: spec.executor}

    async def kill(self, launched: Launched) -> Killed:
        """Stop the executor, kill its other processes, kill the executor, and search again."""
        return await anyio.to_thread.run_sync(self._kill, launched)

    def _kill(self, launched: Launched) -> Killed:
        executor, reaper = self._executor(launched), self._reaper(launched)
        if executor is not None:
            signal_it(executor, signal.SIGSTOP)
        try:
            left = self._end_all(launched, executor, reaper)
        except OSError:  # the search failed, but the executor must not stay stopped: its reaper ends what is left
            if executor is not None:
                signal_it(executor, signal.SIGKILL)
            raise
        if left:
            return Killed("left", tuple(sorted(left)))
        if (group := self._group(launched)) is not None and not group.kill(time.monotonic()):
            return Killed("unknown", why=f"its cgroup {group.path} cannot be removed")
        return Killed("gone", scope="cgroup" if launched.state.get("cgroup") else "descent")

    def _end_all(self, launched: Launched, executor: ProcessEntry | None, reaper: ProcessEntry | None) -> set[int]:
        """End a stopped executor with all its processes; return the pids that a search finds afterwards."""
        deadline = time.monotonic() + _KILL_DEADLINE
        above = {one.pid for one in (executor, reaper) if one is not None}
        end_all(lambda: self._members(launched, without=above), deadline)
        if executor is not None:
            signal_it(executor, signal.SIGKILL)
        group = self._group(launched)
        if group is not None:
            group.kill(max(deadline, time.monotonic() + 1.0))
        above = {reaper.pid} if reaper is not None else set()
        end_all(lambda: self._members(launched, without=above), deadline)
        if reaper is not None:
            self._end_reaper(reaper, min(deadline, time.monotonic() + _REAPER_DEADLINE))
        self._wait_child(launched, deadline)
        left = end_all(lambda: self._members(launched), max(deadline, time.monotonic() + _LAST_LOOK))
        return {*left, *(group.pids() if group is not None else ())}

    @staticmethod
    def _end_reaper(reaper: ProcessEntry, deadline: float) -> None:
        """Let the reaper end by itself, which it does when it sees that nothing is left; kill it at the deadline."""
        with contextlib.suppress(ProcessLookupError):
            handle = os.pidfd_open(reaper.pid)
            try:
                poll = select.poll()
                poll.register(handle, select.POLLIN)
                if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                    signal_it(reaper, signal.SIGKILL)
            finally:
                os.close(handle)

    def _group(self, launched: Launched) -> cgroups.Cgroup | None:
        """Return the executor's cgroup, recorded or not. If it was never made, it has no processes."""
        if self._root is None:
            return None
        path = launched.state.get("cgroup")
        return self._root.find(path) if path else self._root.of(launched.executor)

    def _members(self, launched: Launched, *, without: Collection[int] = ()) -> list[ProcessEntry]:
        """Return every process of an executor, except the pids in `without` and never hutchd itself."""
        if launched.boot_id != self._boot:
            return []
        processes = scan()
        roots = {pid for pid in processes if variable_of(pid, MARK) == launched.executor}
        roots |= {one.pid for one in (self._executor(launched), self._reaper(launched)) if one is not None}
        if (group := self._group(launched)) is not None:
            roots |= group.pids()
        roots.discard(os.getpid())
        members = (roots | descendants(processes, roots)) - {os.getpid(), *without}
        return [processes[pid] for pid in members if pid in processes]
