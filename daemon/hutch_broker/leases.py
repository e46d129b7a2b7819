"""The live leases, their allowances, and their open streams. No I/O; the clock is a parameter.

A lease ends for good when it expires, is revoked, or is missing from hutchd's list. Its open streams are cut at once.
Allowances are prepaid: a request reserves part of the allowance before it is forwarded and settles when it ends. Its
cost is known only at the end, so each open request reserves the cost of the last finished request.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from hutch_broker.judge import Refusal
from hutch_shared.broker_link import Ended, Key, Lease, LeaseState, Refill

__all__ = ["HeldLease", "LeaseTable", "lease_id_in"]

_PREFIX: Final = "hutch-"
_ID: Final = 18
"""The length of a lease id, in characters."""
_RESERVE: Final = 0.05
"""US dollars that the first request of a lease reserves."""


def lease_id_in(token: str) -> str:
    """Return the lease id in a token (`hutch-<id>-<secret>`), without checking the token."""
    return token[len(_PREFIX) : len(_PREFIX) + _ID] if token.startswith(_PREFIX) else ""


@dataclass(slots=True, eq=False)
class HeldLease:
    """A lease with its state."""

    lease: Lease
    ends_at: float
    requests: int
    """The number of requests that the allowance still permits."""
    usd: float | None
    """US dollars left in the allowance; None without a budget."""
    key: Key | None = None
    key_until: float | None = None
    """The time on the table's clock when the key must be requested again."""
    rejected: bool = False
    """True if the provider refused the last key."""
    usual: float = _RESERVE
    """US dollars that the next request reserves: the cost of the last one."""
    reserved: float = 0.0
    """US dollars reserved by open requests."""
    active: bool = True
    """Whether requests may use the lease."""
    cut: set[Callable[[], None]] = field(default_factory=set)
    """One function per open stream; calling it cuts the stream."""

    def reserve(self, cut: Callable[[], None]) -> float | Refusal:
        """Start a request. Return the reserved US dollars, which `settle` needs, or the reason why it may not start."""
        if self.requests < 1:
            return Refusal(429, "rate_limit_error", "The lease's allowance of requests is used up for the moment.")
        if self.usd is not None and self.usd - self.reserved <= 0:
            return Refusal(402, "billing_error", "The session's budget is used up.")
        reserve = 0.0 if self.usd is None else self.usual
        self.requests -= 1
        self.reserved += reserve
        self.cut.add(cut)
        return reserve

    def settle(self, cut: Callable[[], None], reserve: float, usd: float | None) -> None:
        """End a request that cost `usd`. If a session has a budget, a request of unknown price uses up all of it."""
        self.cut.discard(cut)
        self.reserved = max(0.0, self.reserved - reserve)
        if self.usd is not None:
            self.usd = 0.0 if usd is None else self.usd - usd
            if usd:
                self.usual = usd

    def forget_key(self, *, rejected: bool = False) -> None:
        """Drop the key, so that the next request asks hutchd for it. `rejected`: the provider refused the key."""
        self.key = None
        self.rejected = rejected

    def __repr__(self) -> str:
        return f"<HeldLease {self.lease.id} of {self.lease.session}, {self.requests} requests, {len(self.cut)} streams>"


class LeaseTable:
    """Live leases by id."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` returns monotonic seconds."""
        self._clock = clock
        self._held: dict[str, HeldLease] = {}

    def put(self, state: LeaseState) -> None:
        """Add a lease, or set the allowance and end of an existing one."""
        ends_at = self._clock() + state.expires_in
        held = self._held.get(state.lease.id)
        if held is None:
            self._held[state.lease.id] = HeldLease(state.lease, ends_at, state.requests, state.usd, active=state.active)
        else:
            held.ends_at, held.requests, held.usd, held.active = ends_at, state.requests, state.usd, state.active

    def refill(self, refill: Refill) -> None:
        """Add to a lease's allowance and extend its life. An unknown lease is ignored."""
        if (held := self.get(refill.lease)) is not None:
            held.requests += refill.requests
            if refill.usd is not None:
                held.usd = (held.usd or 0.0) + refill.usd
            if refill.expires_in is not None:
                held.ends_at = self._clock() + refill.expires_in

    def end(self, leases: Iterable[str]) -> Ended:
        """End these leases, and cut their open streams."""
        count = streams = 0
        for lease in leases:
            if (held := self._held.pop(lease, None)) is not None:
                count += 1
                streams += len(held.cut)
                held.key = None
                for cut in tuple(held.cut):
                    cut()
        return Ended(leases=count, streams=streams)

    def set_active(self, lease: str, *, active: bool) -> Ended:
        """Let requests use a lease, or stop that and cut its open streams. An unknown lease is ignored."""
        held = self._held.get(lease)
        if held is None:
            return Ended(leases=0, streams=0)
        held.active = active
        cuts = () if active else tuple(held.cut)
        for cut in cuts:
            cut()
        return Ended(leases=0, streams=len(cuts))

    def keep(self, leases: Iterable[str]) -> Ended:
        """End all leases except these."""
        return self.end(self._held.keys() - set(leases))

    def end_expired(self) -> Ended:
        """End the leases that have expired."""
        now = self._clock()
        return self.end([lease for lease, held in self._held.items() if held.ends_at <= now])

    def next_end(self) -> float | None:
        """Return the seconds until the next lease expires; None without leases."""
        return min((held.ends_at - self._clock() for held in self._held.values()), default=None)

    def get(self, lease: str) -> HeldLease | None:
        """Return a live lease; None if it ended or expired."""
        held = self._held.get(lease)
        return held if held is not None and held.ends_at > self._clock() else None

    def of_token(self, token: str) -> HeldLease | None:
        """Return the live lease whose token this is, or None."""
        held = self.get(lease_id_in(token))
        digest = hashlib.sha256(token.encode("utf-8", "surrogateescape")).hexdigest()
        proven = hmac.compare_digest(digest, held.lease.token_hash if held else "0" * len(digest))
        return held if proven else None

    def drop_keys(self, credential: str) -> None:
        """Drop the key from each lease of a credential."""
        for held in self._held.values():
            if held.lease.credential == credential:
                held.forget_key()

    def states(self) -> tuple[LeaseState, ...]:
        """Return the live leases with their allowances."""
        now = self._clock()
        return tuple(
            LeaseState(
                lease=held.lease,
                expires_in=held.ends_at - now,
                requests=held.requests,
                usd=held.usd,
                streams=len(held.cut),
                active=held.active,
            )
            for held in self._held.values()
            if held.ends_at > now
        )

    def __len__(self) -> int:
        return len(self._held)

    def __repr__(self) -> str:
        return f"<LeaseTable {len(self._held)}>"
