"""The leases that hutchd has granted. No I/O, no clock.

hutchd gives the broker allowances of requests in small portions, ahead of use; the broker reports each request
afterwards. Budgets belong to the broker: hutchd only tells it what a session's record leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from hutch_daemon.settings import SettingsInForce
from hutch_shared import broker_link as link
from hutch_shared import messages as m

__all__ = ["GrantedLease", "LeaseBook", "LeaseHolder"]

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
    network: m.Network | None = None
    """The network of the agent; None if an earlier hutchd prepared it, without a record of it."""


@dataclass(slots=True)
class GrantedLease:
    """A live lease as hutchd knows it."""

    lease: link.Lease
    max_usd: float | None
    """The session's budget in US dollars; None if its spending is not limited."""
    paid_until: int = 0
    """The number of the last record that an earlier portion paid for. Records up to it cause no refill."""
    requests: int = 0
    """The number of requests since the last refill."""


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

    def network(self, recorded: m.Network | None) -> m.Network:
        """Return the network of a lease. One that an earlier hutchd did not record is that of the present settings."""
        return recorded if recorded is not None else self._settings.current.sandbox.network

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

    def fresh(self, granted: GrantedLease, usd: float | None) -> link.LeaseState:
        """Return the lease with a full portion of requests, for a broker that does not have it.

        `usd` is what the session's record leaves of its budget; None without a budget.
        """
        settings = self._settings.current.broker
        granted.requests = 0
        return link.LeaseState(
            lease=granted.lease,
            expires_in=settings.lease,
            requests=settings.requests,
            usd=usd,
            active=self.is_active(granted.lease),
        )

    def renewal(self, lease: str, *, requests: int = 0) -> link.Refill:
        """Return the message that extends a lease's life and adds `requests` to its allowance."""
        return link.Refill(lease=lease, requests=requests, expires_in=self._settings.current.broker.lease)

    def top_up(self, granted: GrantedLease, state: link.LeaseState) -> link.Refill:
        """Return the refill that restores a full portion of requests. `state` is the lease as the broker has it."""
        granted.requests = 0
        return self.renewal(state.lease.id, requests=max(0, self._settings.current.broker.requests - state.requests))

    def count(self, records: Iterable[link.Record]) -> list[link.Refill]:
        """Count requests; return the refills that are due."""
        used = set()
        for record in records:
            used.add(record.lease)
            granted = self.live.get(record.lease)
            if granted is not None and record.refused is None and record.n > granted.paid_until:
                granted.requests += 1
        return [refill for lease in used if (refill := self._due(lease)) is not None]

    def _due(self, lease: str) -> link.Refill | None:
        granted = self.live.get(lease)
        if granted is None or granted.requests < _SHARE * self._settings.current.broker.requests:
            return None
        requests, granted.requests = granted.requests, 0
        return self.renewal(lease, requests=requests)

    def __repr__(self) -> str:
        return f"<LeaseBook {len(self.live)} live, {len(self.ended)} to end>"
