"""The port to where executors run: start one, see whether it lives, end it with all that it started, find it again.

What an environment promises is verified, not hoped for: `kill` says `verified` only when it looked and nothing was
left. `Launched.state` is all that a restarted hutchd has to find an executor again.
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
    """What to start. `env` is all that the process gets beside the environment's own allow-list and `MARK`."""

    executor: str
    account: Account
    agent: str
    boot: m.Boot
    """Holds the token: it goes to standard input and nowhere else."""
    cwd: str
    log_path: Path
    env: Mapping[str, str]
    memory_limit: int | None = None
    """Bytes; this and what follows is held where the environment has the means."""
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
    """Of the process, in the kernel's ticks since boot: tells it from another one of the same pid."""
    boot_id: str
    uid: int
    state: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Alive:
    """The process is there and no zombie."""


@dataclass(frozen=True, slots=True)
class Exited:
    """It is gone; `code` as `Popen.returncode` has it, None where nobody can know (it was not our child)."""

    code: int | None = None


@dataclass(frozen=True, slots=True)
class Killed:
    """`verified`: it was looked for and nothing of it is left. `left` names pids that could not be ended."""

    verified: bool
    left: tuple[int, ...] = ()
    over: str = ""
    """A sentence, when the kernel ended something of it for a limit."""


@dataclass(frozen=True, slots=True)
class IsolationOffer:
    """What an environment puts between a session, others and Hutch by itself, as it was probed."""

    separate_account: bool
    """Sessions run as other accounts than hutchd's."""
    cgroup: bool
    """Each executor has a cgroup of its own, whose limits and end count for all that it starts."""
    why: str
    """What that means, a sentence."""
    insiders: str
    """How a process of a session is told from a person at the client socket."""
    missing: str = ""
    """What more would take, and how to get it."""


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
        """Tell what separates sessions here, by the newest probe."""

    async def check_account(self, account: Account) -> None:
        """Return if executors may run as this account here; `isolation_unavailable` with the reason if not."""

    async def probe_sandbox(self, account: Account) -> SandboxProbe:
        """Return what walls can be put around an account's agents; tried once for each, by really putting them up.

        `isolation_unavailable` when nobody can try it.
        """

    def last_probe(self) -> SandboxProbe:
        """Return what was found last, for whichever account."""

    def spool_of(self, account: Account, executor: str) -> Path | None:
        """Return the directory that an executor makes for its spool itself; None where hutchd makes it one."""

    async def start(self, spec: LaunchSpec) -> Launched:
        """Start an executor and hand it its boot line.

        `agent_unavailable` when it cannot be started. Cancelled or failed, it leaves no process behind.
        """

    async def poll(self, launched: Launched) -> Alive | Exited:
        """Tell whether the executor itself lives; never waits."""

    async def wait(self, launched: Launched) -> Exited:
        """Return when the executor itself has ended. Costs nothing while it lives; may be cancelled."""

    async def kill(self, launched: Launched) -> Killed:
        """End the executor and everything that it started, and look whether that is so. Has its own deadline."""

    async def sweep(self, account: Account) -> str:
        """Remove what is left of an account that is Hutch's alone; return what was wrong. Others are left as they are.

        Called when no executor of the account is left.
        """

    def adopt(self, state: Mapping[str, Any]) -> Launched | None:
        """Return the executor of a launch record, if it is the very process (pid, start time, boot, uid), else None."""

    def owns(self, launched: Launched, pid: int) -> bool:
        """Tell whether `pid` is the executor or something that it started."""

    def trim_output(self, launched: Launched) -> None:
        """Keep the executor's own output within its bound."""
