"""What one request costs: so far, while its answer streams, and in the end. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Final

from hutch_broker.budgets import HeldBudget, Reservation
from hutch_broker.content import tokens_in
from hutch_broker.metering import StreamMeter
from hutch_broker.prices import PriceTable, Rates, Unpriced
from hutch_broker.request_cost import RequestAsk
from hutch_broker.usage import TokenCount

__all__ = ["Bill", "Cost"]

_BROKE_OFF: Final = "It broke off before the provider reported its usage."


@dataclass(frozen=True, slots=True)
class Cost:
    """What a request used, and its price in US dollars; None with the reason if that is unknown."""

    tokens: TokenCount
    usd: float | None
    why_unknown: str = ""


@dataclass(slots=True)
class Bill:
    """The cost of an open request, and its part of the session's budget if there is one."""

    prices: PriceTable
    provider: str | None
    """The provider's name in the table of prices."""
    free: bool = False
    """True if the provider takes no money for requests of this kind."""
    ask: RequestAsk | None = None
    """What the request asks for. It is read only if the session has a budget."""
    budget: HeldBudget | None = None
    reservation: Reservation | None = None
    meter: StreamMeter | None = None
    """The meter of the answer, once it has come."""
    sent: bool = False
    """True once the provider may have got the request."""
    complete: bool = False
    """True once the whole answer came."""
    _rates: Rates | None = field(default=None, init=False)
    _reports: int = field(default=-1, init=False)

    def reserve(self, budget: HeldBudget, reservation: Reservation) -> None:
        """Pay from `budget`, which holds `reservation` for this request."""
        self.budget, self.reservation = budget, reservation

    def exceeds(self) -> bool:
        """Return whether the request must be cut: it used what is left of the budget, or its price became unknown.

        An answer that is not streamed is not cut: what it used is known only with its end. Nor is a stream of which no
        content has come: its input is spent, and most providers report it first.
        """
        if self.budget is None or self.reservation is None or self.meter is None:
            return False
        tokens = self.meter.so_far()
        if not tokens.known and self.ask is not None and not (self.ask.streams and self.meter.streamed):
            return False
        tokens = self._estimate(tokens)
        if self.meter.reports != self._reports:
            self._reports = self.meter.reports
            rates = self.prices.rates(self.provider, tokens)
            self._rates = None if isinstance(rates, Unpriced) or tokens.unpriced else rates
        return self._rates is None or not self.budget.use(self.reservation, self._rates.usd(tokens))

    def settle(self, status: int) -> Cost:
        """End the request and pay it. `status` is the provider's, 0 if no answer came. Call it once."""
        cost = self._cost(status)
        if self.budget is not None and self.reservation is not None:
            self.budget.settle(self.reservation, cost.usd, cost.why_unknown)
        return cost

    def _cost(self, status: int) -> Cost:
        tokens = TokenCount() if self.meter is None else self.meter.result()
        if not self.sent or (self.free and not tokens.known) or (status not in (0, 200) and not tokens.known):
            return Cost(tokens, 0.0)
        if not tokens.known and not self.complete:
            if self.ask is None or (not self.ask.streams and self.ask.output is None):
                return Cost(tokens, None, _BROKE_OFF)
            tokens = self._estimate(tokens)
        usd = self.prices.usd(self.provider, tokens)
        return Cost(tokens, None, usd.why) if isinstance(usd, Unpriced) else Cost(tokens, usd)

    def _estimate(self, tokens: TokenCount) -> TokenCount:
        """Return `tokens` if the provider reported them; otherwise what the request asks for, and what came so far.

        An answer that comes in one piece may have been written whole before anything of it arrives.
        """
        if tokens.known or self.ask is None:
            return tokens
        ask = self.ask
        came = 0 if self.meter is None else tokens_in(self.meter.streamed)
        output = max(tokens.output, came if ask.streams else ask.output or 0)
        return replace(ask.tokens(tokens_in(ask.size), output, tokens.searches), model=tokens.model or ask.model)
