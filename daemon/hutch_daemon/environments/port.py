"""The port to where executors run: start one, see whether it lives, end it with all that it started, adopt it.

An environment verifies what it reports: `kill` says `verified` only after a look that found nothing left.
`Launched.state` is all that a restarted hutchd has to find an executor by.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from hutch_daemon.environments.sandbox_probe import SandboxProbe
from hutch_shared import messages as m

__all__ = ["MARK", "Account", "Alive", "Environment", "Exited", "IsolationOffer", "Killed", "LaunchSpec", "Launched"]

MARK = "HUTCH_EXECUTOR_ID"
"""The variable in an executor's environment that its descendants inherit: it names the executor."""


@dataclass(frozen=True, slots=True)
class Account:
    """A Unix account as the system describes it."""

    uid: int
    gid: int
    name: str
    home: str
    shell: str = "/bin/sh"
    groups: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class LaunchSpec:
    """What to start. The process gets `env`, `MARK` and the variables on the environment's allow-list, no others."""

    executor: str
    account: Account
    agent: str
    boot: m.Boot
    """Holds the token, so it goes to standard input and nowhere else."""
    cwd: str
    log_path: Path
    env: Mapping[str, str]
    memory_limit: int | None = None
    """Bytes. An environment enforces this and the next limits as far as its host can."""
    pids: int | None = None
    cpu_weight: int | None = None
    """1 to 10,000; None is 100."""
    open_files: int | None = None

    def __repr__(self) -> str:
        return f"<LaunchSpec {self.executor} {self.agent} as {self.account.name}>"


@dataclass(frozen=True, slots=True)
class Launched:
    """One started executor. `state` is plain JSON and holds no secret."""

    executor: str
    pid: int
    start_time: int
    """In the kernel's ticks since boot: it tells the process from a later one with the same pid."""
    boot_id: str
    uid: int
    state: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Alive:
    """The process exists and is not a zombie."""


@dataclass(frozen=True, slots=True)
class Exited:
    """The process is gone. `code` is like `Popen.returncode`, or None for a process that was not hutchd's child."""

    code: int | None = None


@dataclass(frozen=True, slots=True)
class Killed:
    """`verified`: a look found nothing left of the executor. `left` names pids that could not be ended."""

    verified: bool
    left: tuple[int, ...] = ()
    over: str = ""
    """A sentence if the kernel ended a process of the executor for a limit, or the empty string."""


@dataclass(frozen=True, slots=True)
class IsolationOffer:
    """What an environment isolates sessions by, without a sandbox, according to the last probe."""

    separate_account: bool
    """Sessions run as other accounts than hutchd's."""
    cgroup: bool
    """Each executor has a cgroup of its own, whose limits and end apply to all that the executor starts."""
    why: str
    """A sentence that says what this means for a session."""
    insiders: str
    """How a process of a session is told from a user at the client socket."""
    missing: str = ""
    """What is missing for a higher isolation level, and how to get it."""


class Environment(Protocol):
    """Where and as whom executors run."""

    name: str

    def serves(self, account: Account) -> bool:
        """Tell whether this is the environment for an account; asks nothing and promises nothing."""

    async def probe(self) -> str:
        """Find out what can be offered here now; return what is wrong, or the empty string. Never raises.

        Cheap if it was asked a moment ago.
        """

    def isolation_offered(self) -> IsolationOffer:
        """Return what isolates sessions here, according to the last probe."""

    async def check_account(self, account: Account) -> None:
        """Return if executors may run as this account here; `isolation_unavailable` with the reason if not."""

    async def probe_sandbox(self, account: Account) -> SandboxProbe:
        """Return whether an account's agents can have a sandbox: a trial run as the account, whose result is kept.

        `isolation_unavailable` when there can be no trial.
        """

    def last_probe(self) -> SandboxProbe:
        """Return the result of the last probe, of whichever account."""

    def spool_of(self, account: Account, executor: str) -> Path | None:
        """Return the directory that an executor makes for its spool itself, or None if hutchd makes it."""

    async def start(self, spec: LaunchSpec) -> Launched:
        """Start an executor and hand it its boot line.

        `agent_unavailable` when it cannot be started. Cancelled or failed, it leaves no process behind.
        """

    async def poll(self, launched: Launched) -> Alive | Exited:
        """Tell whether the executor itself lives; never waits."""

    async def wait(self, launched: Launched) -> Exited:
        """Return when the executor itself has ended. Does not poll; may be cancelled."""

    async def kill(self, launched: Launched) -> Killed:
        """End the executor and everything that it started, and verify it. Has its own deadline."""

    async def sweep(self, account: Account) -> str:
        """Remove what is left of a dedicated account; return what went wrong, or the empty string.

        Other accounts are left as they are. Called when no executor of the account is left.
        """

    def adopt(self, state: Mapping[str, Any]) -> Launched | None:
        """Return the executor of a launch record if the very process lives (pid, start time, boot, uid), or None."""

    def trim_output(self, launched: Launched) -> None:
        """Cut the executor's own output down to its limit."""
