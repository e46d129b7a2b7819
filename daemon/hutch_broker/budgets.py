"""The budget of a session: reserved before a request, settled after it, and cut at its end. No I/O.

- A request that what is left covers begins at once.
- A request that it does not cover waits while others of the budget run.
- A request that is alone begins while anything is left, and is cut when what it used reaches that.

So a budget is exceeded at most by what arrives between two looks at the usage of one request.
"""

from __future__ import annotations

from dataclasses import dataclass

import anyio

from hutch_broker.judge import Refusal

__all__ = ["HeldBudget", "Reservation"]


@dataclass(slots=True, eq=False)
class Reservation:
    """The part of a budget that an open request holds, in US dollars."""

    usd: float
    used: float = 0.0
    """What the request used so far."""

    @property
    def held(self) -> float:
        """What nobody else may use."""
        return max(self.usd, self.used)


class HeldBudget:
    """What a session may still spend, shared by its leases."""

    def __init__(self, usd: float) -> None:
        """Start with `usd` US dollars."""
        self.usd = usd
        """US dollars left, without what open requests will cost."""
        self.why = ""
        """Why the rest of the budget counts as used although it was not spent, as a sentence."""
        self._open: set[Reservation] = set()
        self._changed = anyio.Event()

    @property
    def open(self) -> int:
        """The number of open requests."""
        return len(self._open)

    def begin(self, most: float | None) -> Reservation | None:
        """Reserve `most` US dollars, or all that is left for a request that is alone. None if the request must wait.

        `most` None: the request can cost any amount.
        """
        left = self.usd - sum(one.held for one in self._open)
        if most is None or most > left:
            if self._open:
                return None
            most = left
        reservation = Reservation(most)
        self._open.add(reservation)
        return reservation

    async def reserve(self, most: float | None, wait: float) -> Reservation | Refusal:
        """Reserve as `begin` does; wait up to `wait` seconds for other requests. A cancelled wait reserves nothing."""
        with anyio.move_on_after(wait):
            while self.usd > 0:
                if (reservation := self.begin(most)) is not None:
                    return reservation
                await self._changed.wait()
        if self.usd <= 0:
            return Refusal(402, "billing_error", f"The session's budget is used up.{self.why and ' ' + self.why}")
        return Refusal(
            402,
            "billing_error",
            "The rest of the session's budget does not cover this request while others run; "
            f"none of them ended within {wait:g} s.",
        )

    def use(self, reservation: Reservation, used: float) -> bool:
        """Note what an open request used so far, in US dollars; return False if it must be cut."""
        reservation.used = used
        return used < self.usd - sum(one.held for one in self._open if one is not reservation)

    def settle(self, reservation: Reservation, usd: float | None, why: str = "") -> None:
        """End a request that cost `usd`. If that is unknown, the rest of the budget counts as used; `why` says why."""
        self._open.remove(reservation)
        if usd is None:
            self.usd, self.why = 0.0, why
        else:
            self.usd -= usd
        self._changed.set()
        self._changed = anyio.Event()

    def __repr__(self) -> str:
        return f"<HeldBudget ${self.usd:.4f}, {len(self._open)} open>"
