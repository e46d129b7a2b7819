"""Prices of tokens: from the settings, otherwise from the table in the package `genai_prices`. Works offline.

Loading the table takes a quarter of a second, on a thread. A look-up takes a tenth of a millisecond.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any, Final

import anyio
from anyio import to_thread

from hutch_broker.metering import TokenCount
from hutch_shared.broker_link import Price

__all__ = ["PriceTable", "load_table"]

_MILLION: Final = 1_000_000
_MODEL: Final = re.compile(rb'"model"\s*:\s*"([^"\\]{1,200})"')


class PriceTable:
    """Prices by provider and model."""

    def __init__(self, own: Mapping[str, Price]) -> None:
        """`own` holds the prices from the settings, by model. They take precedence over the table."""
        self._own = own
        self._known: dict[tuple[str, str], bool] = {}
        self.loaded = anyio.Event()
        """Set once the table is in memory. An earlier look-up would load it and block every stream."""

    async def load(self) -> None:
        """Load the table."""
        await load_table()
        self.loaded.set()

    def usd(self, provider: str | None, tokens: TokenCount) -> float | None:
        """Return the price of the tokens in US dollars; None if it is unknown."""
        if not tokens.known:
            return None
        own = self._own.get(tokens.model)
        if own is not None:
            read = own.input if own.cache_read is None else own.cache_read
            write = own.input if own.cache_write is None else own.cache_write
            return (
                tokens.input * own.input
                + tokens.output * own.output
                + tokens.cache_read * read
                + tokens.cache_write * write
            ) / _MILLION
        if provider is None:
            return None
        return _from_table(provider, tokens)

    def knows(self, provider: str | None, body: bytes) -> bool:
        """Return whether the model named in the first bytes of a request body has a price; True if none is named."""
        named = _MODEL.search(body)
        if named is None:
            return True
        model = named[1].decode("utf-8", "replace")
        key = (provider or "", model)
        if key not in self._known:
            if len(self._known) >= 1000:  # agents choose the model names, so the cache needs a bound
                self._known.clear()
            self._known[key] = self.usd(provider, TokenCount(known=True, model=model, input=1, output=1)) is not None
        return self._known[key]


async def load_table() -> None:
    """Load the package's table into memory."""
    await to_thread.run_sync(_table)


def _table() -> Any:
    import genai_prices

    return genai_prices


def _from_table(provider: str, tokens: TokenCount) -> float | None:
    table = _table()
    usage = table.Usage(
        input_tokens=tokens.input + tokens.cache_read + tokens.cache_write,
        output_tokens=tokens.output,
        cache_read_tokens=tokens.cache_read,
        cache_write_tokens=tokens.cache_write,
    )
    try:
        price: Decimal = table.calc_price(usage, model_ref=tokens.model, provider_id=provider).total_price
    except (LookupError, ValueError):
        return None
    return float(price)
