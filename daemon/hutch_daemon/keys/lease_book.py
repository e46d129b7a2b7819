"""The leases that hutchd has granted, and the budgets that they spend. No I/O, no clock.

hutchd gives the broker allowances in small portions, ahead of use; the broker reports each request afterwards. The
leases of one session share the session's `Budget`, which excludes the portions already given to the broker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from hutch_daemon.settings import SettingsInForce
from hutch_shared import broker_link as link

__all__ = ["Budget", "GrantedLease", "LeaseBook", "LeaseHolder"]

_SHARE = 0.1
"""The used share of a portion at which a lease is refilled. A refill after each request would cost a call each time."""


@dataclass(frozen=True, slots=True)
class LeaseHolder:
    """The processes that may use a lease: an executor and its descendants."""

    executor: str
    uid: int
    pid: int
    start_time: int
    cgroup: str | None = None
    """The name of the executor's cgroup (`hutch-<executor>`), as in /proc/PID/cgroup; None without cgroups."""
    tcp: bool = False
    """True if the agent cannot dial a Unix socket and uses TCP."""


@dataclass(slots=True)
class Budget:
    """The rest of a session's budget, without the portions already given to the broker."""

    usd: float
    """The rest, in US dollars."""

    def take(self, usd: float) -> float:
        """Take up to `usd` from the budget; return the amount taken."""
        taken = min(self.usd, usd)
        self.usd -= taken
        return taken


@dataclass(slots=True)
class GrantedLease:
    """A live lease as hutchd knows it."""

    lease: link.Lease
    budget: Budget | None
    paid_until: int = 0
    """The number of the last record that an earlier portion paid for. Records up to it cause no refill."""
    requests: int = 0
    """The number of requests since the last refill."""
    usd: float = 0.0
    """US dollars spent since the last refill."""


class LeaseBook:
    """Live leases by id, and the ids of ended leases that the broker has not been notified of."""

    def __init__(self, settings: SettingsInForce) -> None:
        """Start empty. `settings` has the size of a portion and the lifetime of a lease without renewal."""
        self._settings = settings
        self.live: dict[str, GrantedLease] = {}
        self.ended: set[str] = set()
        self.in_turn: set[str] = set()
        """The sessions that have a turn. Only their leases are active."""

    def add(self, granted: GrantedLease) -> None:
        """Add a live lease."""
        self.live[granted.lease.id] = granted

    def end(self, leases: Iterable[str]) -> None:
        """End leases for good."""
        for lease in leases:
            self.live.pop(lease, None)
            self.ended.add(lease)

    def select(self, chosen: Callable[[link.Lease], bool]) -> list[str]:
        """Return the ids of the live leases that `chosen` accepts."""
        return [granted.lease.id for granted in self.live.values() if chosen(granted.lease)]

    def is_active(self, lease: link.Lease) -> bool:
        """Return whether requests may use the lease: a turn of its session is running."""
        return lease.session in self.in_turn

    def sessions_of(self, credential: str) -> tuple[str, ...]:
        """Return the ids of the sessions with a live lease of this credential."""
        leases = (granted.lease for granted in self.live.values())
        return tuple({lease.session for lease in leases if lease.credential == credential})

    def budget_of(self, session: str) -> Budget | None:
        """Return the budget that the session's live leases share; None if no live lease has a budget."""
        for granted in self.live.values():
            if granted.lease.session == session and granted.budget is not None:
                return granted.budget
        return None

    def with_portion(self, granted: GrantedLease) -> link.LeaseState:
        """Take a full portion from the lease's budget; return the lease and its allowance for the broker."""
        settings = self._settings.current.broker
        return link.LeaseState(
            lease=granted.lease,
            expires_in=settings.lease,
            requests=settings.requests,
            usd=None if granted.budget is None else granted.budget.take(settings.usd),
            active=self.is_active(granted.lease),
        )

    def renewal(self, lease: str, *, requests: int = 0, usd: float | None = None) -> link.Refill:
        """Return the message that extends a lease's life and adds `requests` and `usd` to its allowance."""
        return link.Refill(lease=lease, requests=requests, usd=usd, expires_in=self._settings.current.broker.lease)

    def top_up(self, granted: GrantedLease, state: link.LeaseState) -> link.Refill:
        """Return the refill that restores a full portion of requests. `state` is the lease as the broker has it."""
        granted.requests = 0
        return self.renewal(state.lease.id, requests=max(0, self._settings.current.broker.requests - state.requests))

    def restart(self, granted: GrantedLease) -> link.LeaseState:
        """Return the lease with a fresh portion, for a broker that does not have it."""
        granted.requests, granted.usd = 0, 0.0
        return self.with_portion(granted)

    def count(self, records: Iterable[link.Record]) -> list[link.Refill]:
        """Count the usage of requests; return the refills that are due. Budgets limit their dollars."""
        used = set()
        for record in records:
            used.add(record.lease)
            granted = self.live.get(record.lease)
            if granted is not None and record.refused is None and record.n > granted.paid_until:
                granted.requests += 1
                granted.usd += record.usd or 0.0
        return [refill for lease in used if (refill := self._due(lease)) is not None]

    def _due(self, lease: str) -> link.Refill | None:
        settings, granted = self._settings.current.broker, self.live.get(lease)
        if granted is None or (granted.requests < _SHARE * settings.requests and granted.usd < _SHARE * settings.usd):
            return None
        requests, spent, granted.requests, granted.usd = granted.requests, granted.usd, 0, 0.0
        usd = None if granted.budget is None else granted.budget.take(spent)
        return self.renewal(lease, requests=requests, usd=usd)

    def __repr__(self) -> str:
        return f"<LeaseBook {len(self.live)} live, {len(self.ended)} to end>"
