"""Prices of what a request uses: from the settings, otherwise from the table in `genai_prices`. Works offline.

Everything that the API's usage names has a price, or the price of the request is unknown and says why. A model that is
in neither place has no price: it is never priced as another model whose name is similar.

Loading the table takes a quarter of a second, on a thread. The first look-up of a model takes about a millisecond.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Set
from copy import copy
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

import anyio
from anyio import to_thread

from hutch_broker.usage import TokenCount
from hutch_shared.broker_link import Price

__all__ = ["PriceTable", "Rates", "Unpriced", "load_table"]

_MILLION: Final = 1_000_000
_SEARCH: Final = 0.01
"""US dollars per web search, as Anthropic charges."""
_WRITE: Final = 1.25
_WRITE_1H: Final = 2.0
"""Prices of cache writes for five minutes and for an hour, as multiples of the price of input."""
_SPEEDS: Final = {"": 1.0, "fast": 2.0}
_TIERS: Final = {"": 1.0, "batch": 0.5}
_GEOS: Final = {"": 1.0, "us": 1.1}
_VERSION: Final = re.compile(
    r"[-@](\d{8}|\d{4}-\d{2}-\d{2}|\d{3}|\d{4}|latest|default|preview(-\d{2}-\d{2,4})?|exp(-\d{2}-\d{2})?|)$"
)
"""What may follow a model's name: a version of the same model. The table's beginnings of names may end within one."""
_LISTED: Final = 5
"""The most names in a sentence: the sentence is stored with the request, and the provider chooses the names."""
_CACHED_MODELS: Final = 1000
"""The bound of the cache of models: agents choose the names."""


@dataclass(frozen=True, slots=True)
class Unpriced:
    """Why a price is unknown, as a sentence."""

    why: str
    model: str | None = None
    """The model, if it is the one without a price."""


@dataclass(frozen=True, slots=True)
class Rates:
    """US dollars per token, and per search."""

    input: float
    output: float
    cache_read: float
    cache_write: float
    cache_write_1h: float
    search: float

    def usd(self, tokens: TokenCount) -> float:
        """Return the price of these tokens and searches."""
        return (
            tokens.input * self.input
            + tokens.output * self.output
            + tokens.cache_read * self.cache_read
            + (tokens.cache_write - tokens.cache_write_1h) * self.cache_write
            + tokens.cache_write_1h * self.cache_write_1h
            + tokens.searches * self.search
        )

    def times(self, factor: float) -> Rates:
        """Return the rates with the price of each token multiplied."""
        return Rates(
            self.input * factor,
            self.output * factor,
            self.cache_read * factor,
            self.cache_write * factor,
            self.cache_write_1h * factor,
            self.search,
        )


class PriceTable:
    """Prices by provider and model."""

    def __init__(self, own: Mapping[str, Price]) -> None:
        """`own` holds the prices from the settings, by model. They take precedence over the table."""
        self._own = own
        self._models: dict[tuple[str, str], Any] = {}
        self.loaded = anyio.Event()
        """Set once the table is in memory. An earlier look-up would load it and block every stream."""

    async def load(self) -> None:
        """Load the table."""
        await load_table()
        self.loaded.set()

    def replace_own(self, own: Mapping[str, Price]) -> None:
        """Use these prices from the settings instead of the earlier ones."""
        self._own = own

    def as_now(self) -> PriceTable:
        """Return a table that keeps the present prices when others replace them: a request is paid as it began."""
        return copy(self)

    def usd(self, provider: str | None, tokens: TokenCount) -> float | Unpriced:
        """Return the price of what a request used, or why it is unknown. `provider` is a name in the table."""
        if not tokens.known:
            named = _listed(tokens.missing)
            return Unpriced(f"The provider did not report usage that can be read{f' ({named})' if named else ''}.")
        if tokens.unpriced:
            return Unpriced(f"The price of {_listed(tokens.unpriced)} is unknown.")
        rates = self.rates(provider, tokens)
        return rates if isinstance(rates, Unpriced) else rates.usd(tokens)

    def rates(self, provider: str | None, tokens: TokenCount) -> Rates | Unpriced:
        """Return the rates for a request of this model, amount of input, speed, tier and region."""
        factor = 1.0
        for what, word, factors in (
            ("speed", tokens.speed, _SPEEDS),
            ("service tier", tokens.tier, _TIERS),
            ("region", tokens.geo, _GEOS),
        ):
            if word not in factors:
                return Unpriced(f"The price of the {what} {_shown(word)} is unknown.")
            factor *= factors[word]
        own = self._own.get(tokens.model)
        rates = _own_rates(own) if own is not None else self._listed_rates(provider, tokens)
        if rates is None:
            named = f"the model {_shown(tokens.model)}" if tokens.model else "a model without a name"
            return Unpriced(f"The price of {named} is unknown.", tokens.model)
        return rates.times(factor)

    def _listed_rates(self, provider: str | None, tokens: TokenCount) -> Rates | None:
        if provider is None:
            return None
        key = (provider, tokens.model)
        if key not in self._models:
            if len(self._models) >= _CACHED_MODELS:
                self._models.clear()
            self._models[key] = _model(provider, tokens.model)
        if (model := self._models[key]) is None:
            return None
        prices = model.get_prices(datetime.now(tz=UTC))
        whole = tokens.input + tokens.cache_read + tokens.cache_write
        return _rates(
            _at(prices.input_mtok, whole),
            _at(prices.output_mtok, whole),
            _at(prices.cache_read_mtok, whole),
            _at(prices.cache_write_mtok, whole),
            _at(prices.cache_write_1h_mtok, whole),
            None,
        )


async def load_table() -> None:
    """Load the package's table into memory."""
    await to_thread.run_sync(_table)


def _table() -> Any:
    import genai_prices

    return genai_prices


def _own_rates(own: Price) -> Rates | None:
    return _rates(own.input, own.output, own.cache_read, own.cache_write, own.cache_write_1h, own.search)


def _rates(
    fresh: float | None,
    output: float | None,
    read: float | None,
    write: float | None,
    write_1h: float | None,
    search: float | None,
) -> Rates | None:
    """Return rates from prices per million tokens; None without a price of input. A model without output has none."""
    if fresh is None:
        return None
    return Rates(
        fresh / _MILLION,
        (output or 0.0) / _MILLION,
        (fresh if read is None else read) / _MILLION,
        (_WRITE * fresh if write is None else write) / _MILLION,
        (_WRITE_1H * fresh if write_1h is None else write_1h) / _MILLION,
        _SEARCH if search is None else search,
    )


def _at(price: Any, whole: int) -> float | None:
    """Return a price of the table for a request with `whole` tokens of input. Its tiers hold for all tokens."""
    if price is None:
        return None
    if (tiers := getattr(price, "tiers", None)) is None:
        return float(price)
    return float(next((tier.price for tier in reversed(tiers) if whole > tier.start), price.base))


def _model(provider: str, name: str) -> Any:
    """Return the table's model of this name, or None. A longer name is another model, unless it adds a version."""
    table = _table()
    try:
        model = table.calc_price(table.Usage(input_tokens=1), model_ref=name, provider_id=provider).model
    except (LookupError, ValueError):
        return None
    return model if _names(model.match, name.lower()) else None


def _names(clause: Any, name: str) -> bool:
    """Return whether a clause of the table accepts `name` as a whole, and not only its beginning or a part of it."""
    if (either := getattr(clause, "or_", None)) is not None:
        return any(_names(one, name) for one in either)
    if (each := getattr(clause, "and_", None)) is not None:
        return clause.is_match(name) and any(_names(one, name) for one in each)
    if (start := getattr(clause, "starts_with", None)) is not None:
        return _VERSION.sub("", name) == _VERSION.sub("", start)
    for part in (getattr(clause, "contains", None), getattr(clause, "ends_with", None)):
        if part is not None:
            return _VERSION.sub("", name) == _VERSION.sub("", part)
    if hasattr(clause, "equals") or hasattr(clause, "regex"):
        return bool(clause.is_match(name))
    return False


def _listed(names: Set[str]) -> str:
    shown = ", ".join(map(_shown, sorted(names)[:_LISTED]))
    return shown if len(names) <= _LISTED else f"{shown} and {len(names) - _LISTED} more"


def _shown(text: str) -> str:
    """Return a word of the provider or the agent for a sentence: printable and short."""
    return "".join(char if char.isprintable() else "?" for char in text[:80])
