"""The live leases, their allowances, and their open streams. No I/O; the clock is a parameter.

A lease ends for good when it expires, is revoked, or is missing from hutchd's list. Its open streams are cut at once.
Allowances are prepaid: a request reserves before it goes out and settles when it is over. Its dollars are known only
then, so each open request reserves what the last one cost.
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
"""Length of a lease's id."""
_RESERVE: Final = 0.05
"""Dollars that a lease's first request reserves."""


def lease_id_in(token: str) -> str:
    """Return the lease id in a token (`hutch-<id>-<secret>`), without checking the token."""
    return token[len(_PREFIX) : len(_PREFIX) + _ID] if token.startswith(_PREFIX) else ""


@dataclass(slots=True, eq=False)
class HeldLease:
    """A lease with its state. `cut` has one function per open stream, which cuts the stream."""

    lease: Lease
    ends_at: float
    requests: int
    usd: float | None
    key: Key | None = None
    key_until: float | None = None
    rejected: bool = False
    """The provider refused the key given last."""
    usual: float = _RESERVE
    reserved: float = 0.0
    cut: set[Callable[[], None]] = field(default_factory=set)

    def reserve(self, cut: Callable[[], None]) -> float | Refusal:
        """Start a request; return the reserved dollars, to pass to `settle`, or why it may not start."""
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
        """End a request that cost `usd`. With a budget, an unknown price uses up the rest of it."""
        self.cut.discard(cut)
        self.reserved = max(0.0, self.reserved - reserve)
        if self.usd is not None:
            self.usd = 0.0 if usd is None else self.usd - usd
            if usd:
                self.usual = usd

    def forget_key(self, *, rejected: bool = False) -> None:
        """Drop the key, so that the next request asks for it."""
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
            self._held[state.lease.id] = HeldLease(state.lease, ends_at, state.requests, state.usd)
        else:
            held.ends_at, held.requests, held.usd = ends_at, state.requests, state.usd

    def refill(self, refill: Refill) -> None:
        """Add to an allowance and move the end. An unknown lease is ignored."""
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
        """Return the lease that a token proves; None if it proves none."""
        held = self.get(lease_id_in(token))
        digest = hashlib.sha256(token.encode("utf-8", "surrogateescape")).hexdigest()
        proven = hmac.compare_digest(digest, held.lease.token_hash if held else "0" * len(digest))
        return held if proven else None

    def drop_keys(self, credential: str) -> None:
        """Drop a credential's secret in each of its leases."""
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
            )
            for held in self._held.values()
            if held.ends_at > now
        )

    def __len__(self) -> int:
        return len(self._held)

    def __repr__(self) -> str:
        return f"<LeaseTable {len(self._held)}>"
