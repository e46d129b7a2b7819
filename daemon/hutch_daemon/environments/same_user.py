"""Executors as the very account that hutchd runs as: a session, a process group and, where there is one, a cgroup each.

What belongs to an executor is found three ways at once: its cgroup; its line of descent, which holds because an
executor is a subreaper, so that a double-forked child comes back to it; and the mark in the environment, which a child
inherits. `kill` stops the executor first, so that it starts nothing more, ends the rest, and the executor last.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import anyio
import msgspec

from hutch_daemon.environments import cgroups
from hutch_daemon.environments.port import MARK, Alive, Exited, Killed, Launched, LaunchSpec
from hutch_daemon.environments.processes import (
    Process,
    descendants,
    end_all,
    environ_mark,
    look_up,
    scan,
    signal_it,
)
from hutch_shared import messages as m
from hutch_shared.errors import HutchError, Reason
from hutch_shared.failpoints import VARIABLES, planted
from hutch_shared.unix import ancestors, boot_id

__all__ = ["ARGV", "SameUser"]

ARGV: Final = (sys.executable, "-P", "-m", "hutch_executor")
"""-P: nothing is imported from the directory in which it starts."""
_INHERITED: Final = frozenset(
    {"PATH", "LANG", "LANGUAGE", "TZ", "TMPDIR", "SSL_CERT_FILE", "SSL_CERT_DIR"}
    | {f"XDG_{name}" for name in ("RUNTIME_DIR", "CONFIG_HOME", "CACHE_HOME", "DATA_HOME")}
    | set(VARIABLES)
    | {spelt for name in ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY") for spelt in (name, name.lower())}
)
_INHERITED_PREFIX: Final = "LC_"
_KILL_DEADLINE: Final = 5.0


class SameUser:
    """The environment `same-user`."""

    name = "same-user"

    def __init__(self, argv: Sequence[str] = ARGV, *, output: int = 1024 * 1024, cgroup: bool = True) -> None:
        """`output` bounds an executor's log file in bytes; `cgroup=False` does without cgroups."""
        self._argv = tuple(argv)
        self._output = output
        self._root = cgroups.find_root() if cgroup else None
        self._boot = boot_id()
        self._children: dict[int, subprocess.Popen[bytes]] = {}

    def isolation(self) -> m.Isolation:
        """Tell that there is none to speak of, and how processes of a session are known."""
        if self._root is not None:
            insiders = f"by cgroup (version {self._root.version}), by descent and by a mark in the environment"
        else:
            insiders = "by descent and by a mark in the environment"
        return m.Isolation(
            level="reduced",
            why="Sessions run as the same account as hutchd: they can reach each other's files, and yours.",
            insiders=f"{insiders}. A process of this account that sets out to hide can escape all of them; only a"
            " sandbox that hides the client socket would make it complete.",
        )

    async def start(self, spec: LaunchSpec) -> Launched:
        """Start an executor; see the port."""
        if spec.account.uid != os.getuid():
            raise HutchError(
                Reason.ISOLATION_UNAVAILABLE,
                f"Here executors run as uid {os.getuid()}; {spec.account.name} (uid {spec.account.uid}) would need the"
                " environment unix-user.",
            )
        return await anyio.to_thread.run_sync(self._start, spec)  # not cancellable: what it forks it also records

    def _start(self, spec: LaunchSpec) -> Launched:
        group = self._root.make(spec.executor, spec.memory_limit) if self._root is not None else None
        child: subprocess.Popen[bytes] | None = None
        try:
            spec.log_path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
            output = os.open(spec.log_path, flags, 0o600)
            try:
                child = subprocess.Popen(
                    self._argv,
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=output,
                    cwd=spec.cwd,
                    env=self._environ(spec),
                    start_new_session=True,
                )
            finally:
                os.close(output)
            process = look_up(child.pid)
            assert process is not None, "a child that was not waited for has an entry in /proc"
            if group is not None:
                group.enter(child.pid)  # before it gets its boot line, so before it starts anything
            assert child.stdin is not None
            with child.stdin as pipe:
                pipe.write(msgspec.json.encode(spec.boot) + b"\n")
        except OSError as error:
            if child is not None:
                child.kill()
                child.wait()
            if group is not None:
                group.kill(time.monotonic() + _KILL_DEADLINE)
            why = error.strerror or type(error).__name__
            raise HutchError(Reason.AGENT_UNAVAILABLE, f"The executor cannot be started: {why}.") from error
        self._children[child.pid] = child
        state = {
            "executor": spec.executor,
            "pid": child.pid,
            "start_time": process.start_time,
            "boot_id": self._boot,
            "uid": spec.account.uid,
            "log": str(spec.log_path),
            "cgroup": str(group.path) if group is not None else None,
        }
        return Launched(spec.executor, child.pid, process.start_time, self._boot, spec.account.uid, state)

    def _environ(self, spec: LaunchSpec) -> dict[str, str]:
        inherited = {
            name: value
            for name, value in os.environ.items()
            if name in _INHERITED or name.startswith(_INHERITED_PREFIX)
        }
        account = spec.account
        own = {"HOME": account.home, "USER": account.name, "LOGNAME": account.name, "SHELL": account.shell}
        return {"PATH": os.defpath, **inherited, **own, **spec.env, MARK: spec.executor}

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

    async def kill(self, launched: Launched) -> Killed:
        """Stop the executor, end what it started, end it, look again."""
        return await anyio.to_thread.run_sync(self._kill, launched)

    def _kill(self, launched: Launched) -> Killed:
        deadline = time.monotonic() + _KILL_DEADLINE
        executor = self._executor(launched)
        if planted("leak_child"):
            if executor is not None:
                signal_it(executor, signal.SIGKILL)
            return Killed(verified=True)
        if executor is not None:
            signal_it(executor, signal.SIGSTOP)
        left = end_all(lambda: self._members(launched, with_executor=False), deadline)
        if executor is not None:
            signal_it(executor, signal.SIGKILL)
            child = self._children.pop(launched.pid, None)
            if child is not None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(timeout=max(0.1, deadline - time.monotonic()))
        group = self._group(launched)
        grouped = group is None or group.kill(max(deadline, time.monotonic() + 1.0))
        left = (*left, *end_all(lambda: self._members(launched, with_executor=True), deadline))
        if not grouped and group is not None:
            left = (*left, *group.pids())
        return Killed(verified=not left, left=tuple(sorted(set(left))))

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
        group = self._group(launched)
        return (
            (group is not None and pid in group.pids())
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

    def _executor(self, launched: Launched) -> Process | None:
        """Return the process of `launched`, a zombie too; None when that pid is nobody's or another's."""
        if launched.boot_id != self._boot:
            return None
        process = look_up(launched.pid)
        return process if process is not None and process.start_time == launched.start_time else None

    def _group(self, launched: Launched) -> cgroups.Cgroup | None:
        """Return its group, also of a start that was not recorded; the group of one that has none is empty."""
        if self._root is None:
            return None
        path = launched.state.get("cgroup")
        return self._root.find(path) if path else self._root.of(launched.executor)

    def _members(self, launched: Launched, *, with_executor: bool) -> list[Process]:
        """Look for everything that belongs to an executor. hutchd itself never does."""
        if launched.boot_id != self._boot:
            return []
        processes = scan()
        roots = {pid for pid in processes if environ_mark(pid, MARK) == launched.executor}
        executor = self._executor(launched)
        if executor is not None:
            roots.add(launched.pid)
        if (group := self._group(launched)) is not None:
            roots |= group.pids()
        roots.discard(os.getpid())
        members = (roots | descendants(processes, roots)) - {os.getpid()}
        if not with_executor:
            members.discard(launched.pid)
        return [processes[pid] for pid in members if pid in processes]
