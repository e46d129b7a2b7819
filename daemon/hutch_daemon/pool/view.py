"""The input and the output of `plan`: plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hutch_daemon.environments.port import Account
from hutch_daemon.pool.start_history import NO_FAILURES, StartHistory
from hutch_daemon.pool.states import OVER
from hutch_daemon.settings import ExecutorSettings
from hutch_shared import messages as m

__all__ = ["ExecutorKey", "ExecutorView", "LeaseView", "PoolPlan", "PoolState", "Retirement"]


@dataclass(frozen=True, slots=True)
class ExecutorKey:
    """The kind of executor that a session needs. Keys are equal if uid, account name, agent and environment are.

    The rest of the account may change, for example its groups: that makes no new kind. See `made_of`.
    """

    account: Account = field(compare=False)
    agent: str
    environment: str
    uid: int = field(init=False)
    name: str = field(init=False)

    def __post_init__(self) -> None:
        """Take uid and name from the account."""
        object.__setattr__(self, "uid", self.account.uid)
        object.__setattr__(self, "name", self.account.name)

    def __str__(self) -> str:
        return f"{self.agent} as {self.account.name} ({self.environment})"


@dataclass(frozen=True, slots=True)
class ExecutorView:
    """One executor. Times are seconds on the pool's clock."""

    id: str
    key: ExecutorKey
    state: m.ExecutorState
    session: str | None = None
    outdated: bool = False
    """True if a new executor of its key would be made of something else now, or could not be made at all."""
    launching: bool = False
    """True until its start has succeeded or its failure is recorded, even if the start was given up meanwhile."""
    last_seen: float = 0.0
    """The time of its last heartbeat or hello."""
    since: float = 0.0
    """The time of the last change of its state."""
    idle_since: float | None = None
    """The time since when its session has no work; None while it has work."""
    rss: int = 0
    """Its resident memory, in bytes."""
    checking: bool = False
    """True while a check of a quarantined executor runs."""
    checked: float = 0.0
    """The time when the last check of a quarantined executor ended."""

    @property
    def over(self) -> bool:
        """True if it is ending or has ended, and so serves no session any more."""
        return self.state in OVER


@dataclass(frozen=True, slots=True)
class LeaseView:
    """A session that waits for an executor of `key`. `number` identifies the lease."""

    number: int
    key: ExecutorKey


@dataclass(frozen=True, slots=True)
class PoolState:
    """The whole input of `plan`. Executors and leases come oldest first."""

    settings: ExecutorSettings
    own_uid: int
    starts_at_once: int
    account_limit: int | None = None
    """The most executors that an account may have at once; None does not limit them."""
    executors: tuple[ExecutorView, ...] = ()
    leases: tuple[LeaseView, ...] = ()
    kept: tuple[ExecutorKey, ...] = ()
    """The keys that should have spares."""
    spare_at: Mapping[ExecutorKey, float] = field(default_factory=dict)
    """The earliest time when the next spare of a key may be started."""
    histories: Mapping[ExecutorKey, StartHistory] = field(default_factory=dict)
    stopping: bool = False

    def retry_at(self, key: ExecutorKey) -> float:
        """Return the time when a start of this key may be tried again."""
        history = self.histories.get(key, NO_FAILURES)
        return history.not_before(self.settings.start_attempts, self.settings.start_window)

    def most_spares(self, key: ExecutorKey) -> int:
        """Return the number of spares of a key above which they are ended at once."""
        return self.settings.spares if key.agent in self.settings.spare_agents else 0

    def wants_spares(self, key: ExecutorKey) -> bool:
        """Return whether a key should have spares. Other accounts than hutchd's have them only with sessions."""
        if key not in self.kept or not self.most_spares(key):
            return False
        return key.uid == self.own_uid or any(
            one.session is not None and not one.over and one.key.uid == key.uid for one in self.executors
        )


@dataclass(frozen=True, slots=True)
class Retirement:
    """An executor to end. It is killed after `grace` seconds, or at once if `grace` is 0."""

    executor: str
    detail: str
    grace: float = 0.0


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """The actions that are due, and the time of the next plan. Executors are given by id, leases by number."""

    retire: tuple[Retirement, ...] = ()
    check: tuple[str, ...] = ()
    """The quarantined executors to check again."""
    hand_out: tuple[tuple[int, str], ...] = ()
    """The leases to grant, each with its executor."""
    refuse: tuple[int, ...] = ()
    """The leases to refuse."""
    start: tuple[ExecutorKey, ...] = ()
    """The keys to start an executor for, one for each entry."""
    abandon: tuple[str, ...] = ()
    """The running starts to cancel, because no session needs them."""
    look_at: float = 0.0
    """The latest time for the next plan."""
