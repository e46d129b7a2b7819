"""Runs executors as other Unix accounts. hutch-launcher starts, limits and ends them, since hutchd has no privilege.

hutchd itself sends the token, through the socket that the launcher passes on. A kill is repeated until the executor's
cgroup is gone; only then is its outcome `gone`. While the launcher cannot be reached, the outcome is never `gone`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Final

import anyio
import structlog

from hutch_daemon.environments import cgroups
from hutch_daemon.environments.handover import await_ready, hand_over, name_senders, read_line
from hutch_daemon.environments.launcher_client import (
    LauncherAbilities,
    LauncherClient,
    LauncherReply,
    LauncherStatus,
    Started,
    cgroup_dir,
    read_abilities,
)
from hutch_daemon.environments.local import NO_PLACES, Local, open_output, reaper_record, refused_start
from hutch_daemon.environments.port import Account, IsolationOffer, Killed, KillScope, Launched, LaunchSpec
from hutch_daemon.environments.sandbox_probe import Places, SandboxProbe, SandboxProber
from hutch_daemon.settings import SandboxSettings
from hutch_shared import messages as m
from hutch_shared.errors import HutchError, Reason
from hutch_shared.ids import new_id

__all__ = ["UnixUser"]

_log: Final = structlog.get_logger(__name__)
_KILL_DEADLINE: Final = 5.0
_READY: Final = 30.0
_TRIAL_MEMORY: Final = 512 << 20
_TRIAL_PIDS: Final = 256
_TRIAL_DEADLINE: Final = 15.0
_ACCOUNTS: Final = 1024
"""Accounts whose trials of the sandbox are kept; the one that was not used for the longest time is tried again."""
_UNTRIED: Final = "it is tried when the first session of an account opens"
_PROBE_KEPT: Final = 5.0
"""Seconds during which the result of a probe of the launcher is reused, even of a failed one."""


class UnixUser(Local):
    """The environment `unix-user`."""

    name = "unix-user"
    asks_each_time = True

    def __init__(
        self,
        launcher: LauncherClient,
        *,
        output: int = 1024 * 1024,
        places: Places = NO_PLACES,
        dedicated: Callable[[str], bool] = lambda _: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`output` is the limit of an executor's log file, in bytes.

        `dedicated(name)` returns whether only Hutch uses an account. `places` are the paths that no agent may see, and
        those that no agent may change.
        """
        super().__init__(output)
        self._places = places
        self._prober = lru_cache(_ACCOUNTS)(self._make_prober)
        """The prober of an account. An account with other groups or another home is another one."""
        self._tried = SandboxProbe(untried=_UNTRIED)
        self._spool = ""
        self._launcher = launcher
        self._dedicated = dedicated
        self._clock = clock
        self._group: LauncherAbilities | None = None
        self._trouble = "The launcher was not asked yet."
        self._probed = -_PROBE_KEPT

    # ------------------------------------------------------------ probing

    def serves(self, account: Account) -> bool:
        """Serve every account except hutchd's own."""
        return account.uid != os.geteuid()

    async def probe(self) -> str:
        """Ask the launcher for its abilities. Return a sentence if something is wrong, otherwise "". Never raises."""
        if self._clock() - self._probed >= _PROBE_KEPT:
            await anyio.to_thread.run_sync(self._probe)
        return self._trouble

    def _probe(self) -> None:
        try:
            reply = self._launcher.probe()
        except HutchError as error:
            self._group, self._trouble = None, error.message
        else:
            found = read_abilities(reply.text) if reply.status is LauncherStatus.DONE else None
            self._spool = found.spool if found is not None and found.spool else self._spool
            self._group, self._trouble = found, "" if found is not None else reply.text
        self._probed = self._clock()

    def isolation_offered(self) -> IsolationOffer:
        """Return the isolation that the launcher can provide, according to its last reply."""
        group = self._group or LauncherAbilities()
        missing = self._trouble or ("" if group.cgroup else group.why or "The launcher can make no cgroup.")
        return IsolationOffer(
            separate_account=True,
            cgroup=bool(group.cgroup),
            why="Each session runs as its own account, which can reach neither another account's files and processes"
            " nor Hutch's.",
            insiders="by the cgroup that hutch-launcher put it into, and by descent. Outside a sandbox an agent may"
            " have other services of its account start something (a user manager, a terminal multiplexer): hutchd"
            " takes it for the user."
            if group.cgroup
            else "by descent.",
            missing=missing,
        )

    async def check_account(self, account: Account) -> None:
        """Ask the launcher, whose own list decides."""
        try:
            reply = await anyio.to_thread.run_sync(self._launcher.probe, account.uid)
        except HutchError:
            self._probed = -_PROBE_KEPT
            raise
        if reply.status is not LauncherStatus.DONE:
            why = reply.text or "The launcher refuses this account."
            advice = f"`hutch doctor --account {account.name}` says what to change."
            raise HutchError(Reason.ISOLATION_UNAVAILABLE, f"{why} {advice}", refused=True)
        if self._group is None:  # the launcher answers again
            await anyio.to_thread.run_sync(self._probe)

    async def probe_sandbox(self, account: Account, settings: SandboxSettings) -> SandboxProbe:
        """Let executors of the account try the sandbox. Each account is tried: its limits and its groups may matter.

        A slow account does not delay the others.
        """
        self._tried = found = await self._prober(account).probe(settings)
        return found

    def doubt_sandbox(self, account: Account, kind: m.SandboxKind, probe: SandboxProbe) -> None:
        """Let the account's next probe try a kind again; the results of other accounts are kept."""
        self._prober(account).doubt(kind, probe)

    def _make_prober(self, account: Account) -> SandboxProber:
        return SandboxProber(self._places, partial(self._try_sandbox, account), clock=self._clock)

    def last_probe(self) -> SandboxProbe:
        """Return the result of the last trial."""
        return self._tried

    async def _try_sandbox(self, account: Account, spec: m.SandboxSpec) -> str:
        await self.check_account(account)
        return await anyio.to_thread.run_sync(self._run_trial, account, spec)

    def _run_trial(self, account: Account, spec: m.SandboxSpec) -> str:
        """Start an executor that only tries the sandbox, without a token; return its answer."""
        executor = new_id("executor")
        reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            started = self._launcher.start(account.uid, executor, writer, memory=_TRIAL_MEMORY, pids=_TRIAL_PIDS)
            if not isinstance(started, Started):
                raise HutchError(Reason.ISOLATION_UNAVAILABLE, f"{account.name} gets no executor: {started.text}")
            try:
                boot = m.Boot(executor, "", "", os.geteuid(), "script", trial=spec)
                deadline = time.monotonic() + _TRIAL_DEADLINE
                name_senders(started.sock)
                process = await_ready(started.sock, started.reply.pid, account.uid, deadline)
                hand_over(started.sock, process.pid, account.uid, boot, deadline)
                return read_line(started.sock, deadline).decode(errors="replace") or "the trial gave no answer"
            finally:
                started.sock.close()
                os.close(started.pidfd)
                if (ended := self._end(account.uid, executor)).status is not LauncherStatus.DONE:
                    _log.error("a trial of the sandbox could not be ended", executor=executor, error=ended.text)
        finally:
            os.close(reader)
            os.close(writer)

    def gids_for(self, account: Account) -> tuple[int, ...]:
        """Return the account's groups; the launcher looks them up for each start."""
        return tuple(sorted({account.gid, *account.groups}))

    def spool_of(self, account: Account, executor: str) -> Path | None:
        """Return a directory below the one that the launcher creates for the account."""
        return Path(self._spool, str(account.uid), executor) if self._spool else None

    # ------------------------------------------------------------ start

    async def start(self, spec: LaunchSpec) -> Launched:
        """Start an executor; see the port. `isolation_unavailable` if the launcher refuses or cannot be reached."""
        await self.check_account(spec.account)
        return await anyio.to_thread.run_sync(self._start, spec)  # not cancellable: a started process must be recorded

    def _start(self, spec: LaunchSpec) -> Launched:
        uid = spec.account.uid
        try:
            output = open_output(spec.log_path)
        except OSError as error:
            raise refused_start(error) from error
        try:
            started = self._launcher.start(
                uid,
                spec.executor,
                output,
                memory=spec.memory_limit,
                pids=spec.pids,
                cpu_weight=spec.cpu_weight,
                open_files=spec.open_files,
                reaper=self._group is not None and self._group.reaper,
            )
        except HutchError:
            self._probed = -_PROBE_KEPT
            raise
        finally:
            os.close(output)
        if not isinstance(started, Started):
            reason = (
                Reason.ISOLATION_UNAVAILABLE if started.status is LauncherStatus.REFUSED else Reason.AGENT_UNAVAILABLE
            )
            raise HutchError(reason, f"{spec.account.name} gets no executor: {started.text}")
        reply = started.reply
        try:
            if self._group is not None and self._group.cgroup and cgroup_dir(reply) is None:
                self._probed = -_PROBE_KEPT
                why = "The launcher made no cgroup for the executor, although it reported that it can."
                raise HutchError(Reason.ISOLATION_UNAVAILABLE, why)
            name_senders(started.sock)
            deadline = time.monotonic() + _READY
            process = await_ready(started.sock, reply.pid, uid, deadline)
            reaper = reaper_record(process, reply.pid)
            hand_over(started.sock, process.pid, uid, spec.boot, deadline)
        except BaseException:
            self._end(uid, spec.executor)
            raise
        finally:
            started.sock.close()
            os.close(started.pidfd)
        state = {
            "executor": spec.executor,
            "pid": process.pid,
            "start_time": process.start_time,
            "boot_id": self._boot,
            "uid": uid,
            "log": str(spec.log_path),
            "cgroup": cgroup_dir(reply),
            "limits": {"memory": spec.memory_limit, "pids": spec.pids},
            "reaper": reaper,
        }
        return Launched(spec.executor, process.pid, process.start_time, self._boot, uid, state)

    # ------------------------------------------------------------ end

    async def kill(self, launched: Launched) -> Killed:
        """Let the launcher kill the processes in the executor's cgroup until the cgroup is gone."""
        if launched.boot_id != self._boot:
            return Killed("gone", scope="namespace")  # nothing outlives a boot
        return await anyio.to_thread.run_sync(self._kill, launched)

    def _kill(self, launched: Launched) -> Killed:
        try:
            reply = self._end(launched.uid, launched.executor)
        except HutchError as error:
            return self._not_ended(launched, error.message)
        if reply.status is not LauncherStatus.DONE:
            return self._not_ended(launched, f"the launcher says: {reply.text}")
        if left := self._left(launched):
            return Killed("left", left)
        scope: KillScope = "cgroup" if launched.state.get("cgroup") else "descent"
        return Killed("gone", scope=scope, over=_over(reply, launched))

    def _not_ended(self, launched: Launched, why: str) -> Killed:
        """Return the result of a kill that the launcher did not complete: never `gone`."""
        _log.error("an executor cannot be ended", executor=launched.executor, error=why)
        left = self._left(launched)
        return Killed("left", left) if left else Killed("unknown", why=why)

    def _end(self, uid: int, executor: str) -> LauncherReply:
        """Repeat the launcher's kill until nothing is left or the deadline has passed. Blocks."""
        deadline, pause = time.monotonic() + _KILL_DEADLINE, 0.0005
        oom = full = 0
        while True:
            reply = self._launcher.kill(uid, executor)
            oom, full = max(oom, reply.oom), max(full, reply.full)
            if reply.status is not LauncherStatus.NOT_YET or time.monotonic() >= deadline:
                return LauncherReply(reply.status, 0, reply.left, oom, full, 0, reply.text)
            time.sleep(pause)
            pause = min(pause * 1.5, 0.05)

    def _left(self, launched: Launched) -> tuple[int, ...]:
        """Return the pids of the executor that hutchd itself still finds."""
        executor = self._executor(launched)
        left = {launched.pid} if executor is not None and not executor.dead else set[int]()
        if (reaper := self._reaper(launched)) is not None:
            left.add(reaper.pid)
        if path := launched.state.get("cgroup"):
            left |= cgroups.Cgroup(Path(path), 2).pids()
        return tuple(sorted(left))

    async def sweep(self, account: Account) -> str:
        """Let the launcher sweep an account if both the settings and the launcher's list name it as dedicated."""
        if not self._dedicated(account.name):
            return ""
        deadline = self._clock() + _KILL_DEADLINE
        while True:
            try:
                reply = await anyio.to_thread.run_sync(self._launcher.sweep, account.uid)
            except HutchError as error:
                return error.message
            if reply.status is LauncherStatus.DONE:
                return ""
            if reply.status is not LauncherStatus.NOT_YET or self._clock() >= deadline:
                return reply.text or f"{reply.left} processes of {account.name} could not be ended."
            await anyio.sleep(0.02)


def _over(reply: LauncherReply, launched: Launched) -> str:
    limits = launched.state.get("limits") or {}
    if reply.oom:
        size = limits.get("memory")
        of = f" of {size / (1 << 20):,.0f} MiB" if size else ""
        some = "1 process was" if reply.oom == 1 else f"{reply.oom} processes were"
        return f"The session exceeded its memory limit{of}: {some} ended."
    if reply.full and limits.get("pids"):
        return f"The session reached its limit of {limits['pids']} processes and threads."
    return ""
