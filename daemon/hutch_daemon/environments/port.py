"""The interface of environments, which run executors: start one, poll it, kill it with all its processes, adopt it.

An environment verifies its reports: `kill` returns `gone` only if a search afterwards found no process left. A
restarted hutchd finds an executor by its `Launched.state` alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, Protocol

from hutch_daemon.environments.sandbox_probe import SandboxProbe
from hutch_daemon.settings import SandboxSettings
from hutch_shared import messages as m

__all__ = [
    "MARK",
    "Account",
    "Alive",
    "Environment",
    "Exited",
    "InForce",
    "IsolationOffer",
    "KillScope",
    "Killed",
    "LaunchSpec",
    "Launched",
    "combined",
]

MARK = "HUTCH_EXECUTOR_ID"
"""The environment variable with the executor's id. Its descendants inherit it."""

KillScope = Literal["namespace", "cgroup", "descent"]
"""How far the search after a kill reached: a pid namespace holds everything that an agent started. Without one, other
services of the account (a user manager, a terminal multiplexer) may run something for it outside the cgroup."""
_SCOPES: Final[tuple[KillScope, ...]] = ("namespace", "cgroup", "descent")
_GONE: Final[Mapping[KillScope, str]] = {
    "namespace": "nothing of it is left",
    "cgroup": "nothing in its cgroup is left",
    "descent": "no process that descends from it is left",
}


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
    """The executor to start. Its process gets only `env`, `MARK` and the variables on the environment's allow-list."""

    executor: str
    account: Account
    agent: str
    boot: m.Boot
    """The boot line. It contains the token, so it is sent only to standard input."""
    cwd: str
    log_path: Path
    env: Mapping[str, str]
    memory_limit: int | None = None
    """The memory limit in bytes. An environment enforces this and the following limits as far as the host can."""
    pids: int | None = None
    cpu_weight: int | None = None
    """The share of a busy CPU, from 1 to 10,000; None means 100."""
    open_files: int | None = None

    def __repr__(self) -> str:
        return f"<LaunchSpec {self.executor} {self.agent} as {self.account.name}>"


@dataclass(frozen=True, slots=True)
class Launched:
    """One started executor. `state` is plain JSON and contains no secret."""

    executor: str
    pid: int
    start_time: int
    """The start time in kernel ticks since boot. It distinguishes the process from a later one with the same pid."""
    boot_id: str
    uid: int
    state: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Alive:
    """The process exists and is not a zombie."""


@dataclass(frozen=True, slots=True)
class Exited:
    """The process is gone. `code` is its `Popen.returncode`, or None if it was not hutchd's child."""

    code: int | None = None


@dataclass(frozen=True, slots=True)
class Killed:
    """The result of killing an executor. Every reader keeps the three outcomes apart."""

    outcome: m.KillOutcome
    """`gone`: a search found no process of the executor. `left`: these could not be ended. `unknown`: nobody knows."""
    left: tuple[int, ...] = ()
    """For `left`: the pids."""
    why: str = ""
    """For `unknown`: the reason, a sentence or clause."""
    scope: KillScope = "descent"
    """For `gone`: how far the search reached."""
    over: str = ""
    """A sentence if the executor exceeded a limit and the kernel acted on it, or the empty string."""

    @property
    def verified(self) -> bool:
        """True if the outcome is `gone`."""
        return self.outcome == "gone"

    def words(self) -> str:
        """Return a clause about what is left, without a full stop."""
        if self.outcome == "gone":
            return _GONE[self.scope]
        if self.outcome == "left":
            return f"these processes of it could not be ended: {', '.join(map(str, self.left))}"
        return f"what is left of it is unknown: {self.why.rstrip('.')}"

    def result(self) -> m.KillResult:
        """Return the result as clients see it."""
        return m.KillResult(self.outcome, self.words(), self.left)


def combined(results: Iterable[Killed | None]) -> Killed | None:
    """Return the result of several kills: it is `gone` only if all are. None if there are no results."""
    found = tuple(filter(None, results))
    left = tuple(sorted({pid for one in found for pid in one.left}))
    if left:
        return Killed("left", left)
    if unknown := next((one for one in found if one.outcome == "unknown"), None):
        return unknown
    return max(found, key=lambda one: _SCOPES.index(one.scope), default=None)


@dataclass(frozen=True, slots=True)
class InForce:
    """The limits and the group ids (sorted) of a running executor, as the kernel reports them.

    `gids` is None if the system does not report them.
    """

    limits: m.ResourceLimits
    gids: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class IsolationOffer:
    """The isolation that an environment offers to sessions apart from the sandbox, according to the last probe."""

    separate_account: bool
    """True if sessions run as other accounts than hutchd's."""
    cgroup: bool
    """True if each executor has its own cgroup, which limits and ends all processes that the executor starts."""
    why: str
    """A sentence for the user about the consequences for a session."""
    insiders: str
    """A description of how hutchd distinguishes a process of a session from a user at the client socket."""
    missing: str = ""
    """A sentence about what a higher isolation level needs, and how to get it."""


class Environment(Protocol):
    """Starts and ends executors as the accounts that it serves."""

    name: str
    asks_each_time: bool
    """True if another program decides which accounts are accepted, so `check_account` may change its answer."""

    def serves(self, account: Account) -> bool:
        """Return whether this environment is meant for an account. `check_account` decides whether it accepts it."""

    async def probe(self) -> str:
        """Find out what the environment can offer now. Return a sentence if something is wrong, otherwise "".

        Never raises. Cheap if it was called a moment ago.
        """

    def isolation_offered(self) -> IsolationOffer:
        """Return the isolation offered here, according to the last probe."""

    async def check_account(self, account: Account) -> None:
        """Raise `isolation_unavailable`, with the reason, if executors may not run as this account here."""

    async def probe_sandbox(self, account: Account, settings: SandboxSettings) -> SandboxProbe:
        """Try the sandbox in a process of the account, as far as these settings need it; return what holds now.

        Results are kept while they can still hold. `isolation_unavailable` if it cannot be tried.
        """

    def doubt_sandbox(self, account: Account, kind: m.SandboxKind, probe: SandboxProbe) -> None:
        """Let the account's next probe try a kind again, since an executor refused it after this probe."""

    def last_probe(self) -> SandboxProbe:
        """Return the result of the last probe of the sandbox, for any account."""

    def spool_of(self, account: Account, executor: str) -> Path | None:
        """Return the directory that the executor must create for its spool, or None if hutchd creates one."""

    def gids_for(self, account: Account) -> tuple[int, ...]:
        """Return the group ids, sorted, that a new executor of this account would have."""

    def in_force(self, launched: Launched) -> InForce:
        """Return the limits and groups of a running executor. Never raises: what is not known is None. Blocks."""

    async def start(self, spec: LaunchSpec) -> Launched:
        """Start an executor and send it its boot line.

        `agent_unavailable` if it cannot be started. If this is cancelled or fails, no process is left behind.
        """

    async def poll(self, launched: Launched) -> Alive | Exited:
        """Return whether the executor's own process lives. Never waits."""

    async def wait(self, launched: Launched) -> Exited:
        """Wait until the executor's own process has ended. Does not poll; may be cancelled."""

    async def kill(self, launched: Launched) -> Killed:
        """End the executor and all processes that it started, and verify the result. Has its own deadline."""

    async def sweep(self, account: Account) -> str:
        """Remove processes and files that a dedicated account left behind. Return a sentence on failure, otherwise "".

        Does nothing for other accounts. Called when the account has no executor left.
        """

    def adopt(self, state: Mapping[str, Any]) -> Launched | None:
        """Return the executor of a launch record if the same process lives (pid, start time, boot, uid), or None."""

    def trim_output(self, launched: Launched) -> None:
        """Shorten the executor's log file to its limit."""
