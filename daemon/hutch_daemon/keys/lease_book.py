"""The leases that hutchd has granted, and what each of them may still spend. No I/O, no clock.

The broker gets allowances in small portions, ahead of use, and reports each request afterwards. The leases of one
session share its budget: what is left of it beyond the portions that were handed out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from hutch_daemon.settings import BrokerSettings
from hutch_shared import broker_link as link

__all__ = ["Budget", "GrantedLease", "LeaseBook", "LeaseHolder"]

_SHARE = 0.1
"""A lease is refilled when it has used this share of its portion. Refilling at each request doubles its work."""


@dataclass(frozen=True, slots=True)
class LeaseHolder:
    """The processes that may use a lease: an executor and its descendants."""

    executor: str
    uid: int
    pid: int
    start_time: int
    cgroup: str | None = None
    """A path component of its processes in /proc/PID/cgroup (`hutch-<executor>`), where such groups exist."""
    tcp: bool = False
    """The agent cannot dial a Unix socket."""


@dataclass(slots=True)
class Budget:
    """What a session's budget has left beyond the portions that were handed out, in US dollars."""

    usd: float

    def take(self, usd: float) -> float:
        """Take up to `usd` from it; return how much was taken."""
        taken = min(self.usd, usd)
        self.usd -= taken
        return taken


@dataclass(slots=True)
class GrantedLease:
    """A live lease as hutchd knows it."""

    lease: link.Lease
    budget: Budget | None
    paid_until: int = 0
    """Records up to this number were paid by an earlier portion: they are not refilled."""
    requests: int = 0
    """Requests since its last refill."""
    usd: float = 0.0
    """Dollars since its last refill."""


class LeaseBook:
    """Live leases by id, and the ended ones that the broker must still be told to end."""

    def __init__(self, settings: Callable[[], BrokerSettings]) -> None:
        """Start empty. `settings` holds the size of a portion and the seconds that a lease lives without renewal."""
        self._settings = settings
        self.live: dict[str, GrantedLease] = {}
        self.ended: set[str] = set()

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

    def sessions_of(self, credential: str) -> tuple[str, ...]:
        """Return the sessions that use a credential now."""
        leases = (granted.lease for granted in self.live.values())
        return tuple({lease.session for lease in leases if lease.credential == credential})

    def budget_of(self, session: str) -> Budget | None:
        """Return the budget that the session's live leases share; None if there is none yet."""
        for granted in self.live.values():
            if granted.lease.session == session and granted.budget is not None:
                return granted.budget
        return None

    def with_portion(self, granted: GrantedLease) -> link.LeaseState:
        """Take a whole portion for the lease from its budget; return the lease as the broker should hold it."""
        settings = self._settings()
        return link.LeaseState(
            lease=granted.lease,
            expires_in=settings.lease,
            requests=settings.requests,
            usd=None if granted.budget is None else granted.budget.take(settings.usd),
        )

    def renewal(self, lease: str, *, requests: int = 0, usd: float | None = None) -> link.Refill:
        """Return the message that moves the lease's end and adds to its allowance."""
        return link.Refill(lease=lease, requests=requests, usd=usd, expires_in=self._settings().lease)

    def top_up(self, granted: GrantedLease, state: link.LeaseState) -> link.Refill:
        """Return the refill that brings the requests of a lease that a broker kept (`state`) to a whole portion."""
        granted.requests = 0
        return self.renewal(state.lease.id, requests=max(0, self._settings().requests - state.requests))

    def restart(self, granted: GrantedLease) -> link.LeaseState:
        """Return a lease that a new broker does not have, with a fresh portion."""
        granted.requests, granted.usd = 0, 0.0
        return self.with_portion(granted)

    def count(self, records: Iterable[link.Record]) -> list[link.Refill]:
        """Count what requests used; return the refills that are due, as far as the budgets go."""
        used = set()
        for record in records:
            used.add(record.lease)
            granted = self.live.get(record.lease)
            if granted is not None and record.refused is None and record.n > granted.paid_until:
                granted.requests += 1
                granted.usd += record.usd or 0.0
        return [refill for lease in used if (refill := self._due(lease)) is not None]

    def _due(self, lease: str) -> link.Refill | None:
        settings, granted = self._settings(), self.live.get(lease)
        if granted is None or (granted.requests < _SHARE * settings.requests and granted.usd < _SHARE * settings.usd):
            return None
        requests, spent, granted.requests, granted.usd = granted.requests, granted.usd, 0, 0.0
        usd = None if granted.budget is None else granted.budget.take(spent)
        return self.renewal(lease, requests=requests, usd=usd)

    def __repr__(self) -> str:
        return f"<LeaseBook {len(self.live)} live, {len(self.ended)} to end>"
