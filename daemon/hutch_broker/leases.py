"""The live leases, their allowances, and their open streams. No I/O; the clock is a parameter.

A lease ends for good when it expires, is revoked, or is missing from hutchd's list. Its open streams are cut at once.
The allowance of requests is prepaid. The leases of a session share its budget, which stays here while a lease, an open
request or a record that hutchd has not acknowledged belongs to the session, and a minute longer: hutchd may have summed
up the session's records before it got the last of them.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from msgspec.structs import replace

from hutch_broker.budgets import HeldBudget
from hutch_broker.judge import Refusal
from hutch_shared.broker_link import Ended, Key, Lease, LeaseState, Refill
from hutch_shared.secret_forms import SecretForms

__all__ = ["HeldLease", "LeaseTable", "lease_id_in"]

_PREFIX: Final = "hutch-"
_ID: Final = 18
"""The length of a lease id, in characters."""
_KEPT: Final = 60.0
"""Seconds for which a budget without leases, requests and records is kept. A call of hutchd takes half of that."""


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
    budget: HeldBudget | None = None
    """The session's budget; None if its spending is not limited."""
    key: Key | None = None
    key_until: float | None = None
    """The time on the table's clock when the key must be requested again."""
    searched: tuple[Key, SecretForms] | None = None
    """A key and the forms in which answers are searched for it."""
    rejected: bool = False
    """True if the provider refused the last key."""
    active: bool = True
    """Whether requests may use the lease."""
    cut: set[Callable[[], None]] = field(default_factory=set)
    """One function per open stream; calling it cuts the stream."""

    def begin(self, cut: Callable[[], None]) -> Refusal | None:
        """Begin a request; return the reason if it may not begin. `end` ends it."""
        if self.requests < 1:
            return Refusal(429, "rate_limit_error", "The lease's allowance of requests is used up for the moment.")
        self.requests -= 1
        self.cut.add(cut)
        return None

    def end(self, cut: Callable[[], None]) -> None:
        """End a request."""
        self.cut.discard(cut)

    def forget_key(self, *, rejected: bool = False) -> None:
        """Drop the key, so that the next request asks hutchd for it. `rejected`: the provider refused the key."""
        self.key = self.searched = None
        self.rejected = rejected

    def forms_of(self, key: Key) -> SecretForms:
        """Return the forms of a key of this lease. They are kept while the key is."""
        if self.searched is None or self.searched[0] is not key:
            made = (key, SecretForms(key.secret))
            if self.key is not key:
                return made[1]
            self.searched = made
        return self.searched[1]

    def __repr__(self) -> str:
        return f"<HeldLease {self.lease.id} of {self.lease.session}, {self.requests} requests, {len(self.cut)} streams>"


class LeaseTable:
    """Live leases by id."""

    def __init__(self, clock: Callable[[], float], reported: Callable[[str], bool] = lambda _: True) -> None:
        """`clock` returns monotonic seconds. `reported` says whether hutchd acknowledged all records of a session."""
        self._clock = clock
        self._reported = reported
        self._held: dict[str, HeldLease] = {}
        self._budgets: dict[str, HeldBudget] = {}
        self._unused: dict[str, float] = {}
        """The budgets that nothing refers to any more, with the times from which on they are forgotten."""

    def put(self, state: LeaseState) -> None:
        """Add a lease, or set the allowance and end of an existing one.

        A session's budget that is here already stays as it is, and so does a lease's network once it is known.
        """
        self._forget_budgets()
        ends_at = self._clock() + state.expires_in
        held = self._held.get(state.lease.id)
        if held is None:
            held = self._held[state.lease.id] = HeldLease(state.lease, ends_at, state.requests)
        elif held.lease.network is None:  # an earlier hutchd granted it
            held.lease = replace(held.lease, network=state.lease.network)
        held.ends_at, held.requests, held.active = ends_at, state.requests, state.active
        held.budget = self._budget(state)

    def _budget(self, state: LeaseState) -> HeldBudget | None:
        if state.usd is None:
            return None
        session = state.lease.session
        if (budget := self._budgets.get(session)) is None:
            budget = self._budgets[session] = HeldBudget(state.usd)
        self._unused.pop(session, None)
        return budget

    def _forget_budgets(self) -> None:
        """Forget the budgets that nothing has referred to for some time."""
        leased = {held.lease.session for held in self._held.values()}
        for session, budget in list(self._budgets.items()):
            if session in leased or budget.open or not self._reported(session):
                self._unused.pop(session, None)
            elif self._unused.setdefault(session, self._clock() + _KEPT) <= self._clock():
                del self._budgets[session], self._unused[session]

    def refill(self, refill: Refill) -> None:
        """Add to a lease's allowance of requests and extend its life. An unknown lease is ignored."""
        if (held := self.get(refill.lease)) is not None:
            held.requests += refill.requests
            if refill.expires_in is not None:
                held.ends_at = self._clock() + refill.expires_in

    def end(self, leases: Iterable[str]) -> Ended:
        """End these leases, and cut their open streams."""
        count = streams = 0
        for lease in leases:
            if (held := self._held.pop(lease, None)) is not None:
                count += 1
                streams += len(held.cut)
                held.forget_key()
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
        self._forget_budgets()
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
                usd=None if held.budget is None else held.budget.usd,
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
