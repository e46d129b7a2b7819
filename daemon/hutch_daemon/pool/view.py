"""The pool as `plan` sees it, and what a plan says: plain values. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hutch_daemon.pool.executor import ExecutorKey
from hutch_daemon.pool.start_history import NO_FAILURES, StartHistory
from hutch_daemon.settings import ExecutorSettings
from hutch_shared import messages as m

__all__ = ["ExecutorView", "LeaseView", "Plan", "PoolState", "Retirement"]


@dataclass(frozen=True, slots=True)
class ExecutorView:
    """One executor as the plan sees it. Times are seconds on the pool's clock."""

    id: str
    key: ExecutorKey
    state: m.ExecutorState
    session: str | None = None
    launching: bool = False
    """Its start has not come to an end: whether it failed is not known yet, even if it was given up meanwhile."""
    heard: float = 0.0
    """When it last sent a heartbeat, or said hello."""
    since: float = 0.0
    """When its state last changed."""
    idle_since: float | None = None
    """Since when its session has nothing to do; None while it has."""
    rss: int = 0
    """Bytes of memory."""
    checking: bool = False
    """A quarantined one: a check for what is left of it is under way."""
    checked: float = 0.0
    """A quarantined one: when the last check ended."""

    @property
    def over(self) -> bool:
        """It does nothing for a session any more."""
        return self.state in ("draining", "gone", "quarantined")


@dataclass(frozen=True, slots=True)
class LeaseView:
    """A session that waits for an executor of `key`; `number` tells it from others."""

    number: int
    key: ExecutorKey


@dataclass(frozen=True, slots=True)
class PoolState:
    """All that the plan depends on. Executors and leases come oldest first."""

    settings: ExecutorSettings
    own_uid: int
    starts_at_once: int
    account_limit: int | None = None
    """Executors of one account at once."""
    executors: tuple[ExecutorView, ...] = ()
    leases: tuple[LeaseView, ...] = ()
    kept: tuple[ExecutorKey, ...] = ()
    """Keys of which spares are kept."""
    spare_at: Mapping[ExecutorKey, float] = field(default_factory=dict)
    """When the next spare of a key may be started at the earliest."""
    histories: Mapping[ExecutorKey, StartHistory] = field(default_factory=dict)
    stopping: bool = False

    def retry_at(self, key: ExecutorKey) -> float:
        """Return when a start of this key may be tried again."""
        history = self.histories.get(key, NO_FAILURES)
        return history.not_before(self.settings.start_attempts, self.settings.start_window)

    def wants_spares(self, key: ExecutorKey) -> bool:
        """Tell whether spares of a key are kept: for accounts other than hutchd's only while they have sessions."""
        if key not in self.kept or key.agent not in self.settings.spare_agents or not self.settings.spares:
            return False
        uid = key.account.uid
        return uid == self.own_uid or any(
            one.session is not None and not one.over and one.key.account.uid == uid for one in self.executors
        )


@dataclass(frozen=True, slots=True)
class Retirement:
    """An executor to end: asked first if it has `grace` seconds, else killed."""

    executor: str
    detail: str
    grace: float = 0.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What to carry out, and when to look again at the latest. Executors are named by their ids."""

    retire: tuple[Retirement, ...] = ()
    check: tuple[str, ...] = ()
    """Quarantined executors to check again."""
    hand_out: tuple[tuple[int, str], ...] = ()
    """Numbers of leases, each with the executor that serves it."""
    refuse: tuple[int, ...] = ()
    """Numbers of leases."""
    start: tuple[ExecutorKey, ...] = ()
    abandon: tuple[str, ...] = ()
    """Starts under way that nothing needs any more."""
    look_at: float = 0.0
