"""Reads from a request what it can cost at most. Pure.

The bound holds for what the request itself says: a token of input has at least one byte, output has at most
`max_tokens` tokens, and a tool of the provider is used at most `max_uses` times. What the provider's tools find is read
as input too, and has no bound here. A request that names no limit, or refers to files and pages by name, has none.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from hutch_broker.json_values import values_in
from hutch_broker.prices import PriceTable, Unpriced
from hutch_broker.usage import TokenCount
from hutch_shared.broker_link import DialectName

__all__ = ["RequestAsk", "how_to_price", "most", "read_request"]

_HIDDEN: Final = 2000
"""Tokens that a provider adds to the input by itself: instructions for tools, for instance."""
_MAX_TEXT: Final = 200
"""The number of characters that are kept of the model's name and other words: agents choose them."""
_INPUTS: Final = ("messages", "system", "input", "contents")
"""The parts of a request that the model reads, in the dialects that name files and pages."""
_MODEL_IN_PATH: Final = re.compile(r"/models?/([^/:]+(?:(?::|%3[Aa])\d+)?)")


@dataclass(frozen=True, slots=True)
class RequestAsk:
    """What a request asks for. None means that it names no limit."""

    model: str
    size: int
    """Bytes of the body."""
    output: int | None
    """Tokens of output."""
    searches: int | None = 0
    refers: bool = False
    """True if the input contains files or pages by name, whose size is unknown."""
    keeps: str = ""
    """The longest time for which input is written to the cache: `5m`, `1h`, or empty."""
    streams: bool = False
    speed: str = ""
    tier: str = ""
    geo: str = ""

    def tokens(self, count: int, output: int, searches: int) -> TokenCount:
        """Return the use of `count` tokens of input, written to the cache as asked, and of these other amounts."""
        written = count if self.keeps else 0
        return TokenCount(
            known=True,
            model=self.model,
            input=count - written,
            output=output,
            cache_write=written,
            cache_write_1h=written if self.keeps == "1h" else 0,
            searches=searches,
            speed=self.speed,
            tier=self.tier,
            geo=self.geo,
        )


def read_request(dialect: DialectName, path: str, body: bytes) -> RequestAsk | None:
    """Return what a request asks for; None if its body is not a JSON object."""
    try:
        asked = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if not isinstance(asked, dict):
        return None
    named = _MODEL_IN_PATH.search(path)
    config = asked.get("generationConfig")
    limits = config if isinstance(config, dict) else asked
    answers = max(_count(asked, "n") or 1, _count(asked, "best_of") or 1, _count(limits, "candidateCount") or 1)
    output = next((count for name in _LIMITS if (count := _count(limits, name)) is not None), None)
    if path.endswith(("/embeddings", ":embedContent")):
        output = 0
    return RequestAsk(
        model=_text(asked, "model") or (named[1][:_MAX_TEXT] if named else ""),
        size=len(body),
        output=None if output is None else output * answers,
        searches=_searches(asked.get("tools")),
        refers=any(map(_is_reference, values_in([asked.get(name) for name in _INPUTS])))
        or any(asked.get(name) for name in ("previous_response_id", "conversation", "cachedContent")),
        keeps="1h" if b'"1h"' in body else "5m" if b'"cache_control"' in body else "",
        streams=asked.get("stream") is True or "stream" in path.lower(),
        speed=_word(asked, "speed", "standard"),
        tier=_word(asked, "service_tier", "auto", "standard_only", "default", "standard"),
        geo=_word(asked, "inference_geo", "global"),
    )


def most(prices: PriceTable, provider: str | None, ask: RequestAsk) -> float | Unpriced | None:
    """Return the most that a request can cost in US dollars; None if it names no limit."""
    count = ask.size + _HIDDEN
    rates = prices.rates(provider, ask.tokens(count, 0, 0))
    if isinstance(rates, Unpriced):
        return rates
    if ask.output is None or ask.searches is None or ask.refers:
        return None
    return rates.usd(ask.tokens(count, ask.output, ask.searches))


def how_to_price(provider: str, unpriced: Unpriced) -> str:
    """Return how to price a model in the settings, after a blank, or "" if another price is missing."""
    if unpriced.model is None:
        return ""
    model = msgspec.json.encode(unpriced.model[:200]).decode()
    return (
        " To set it, add these lines to hutchd's settings, with its US dollars per million tokens, and reload them:\n"
        f"[providers.{provider}.prices.{model}]\ninput = …\noutput = …"
    )


_LIMITS: Final = ("max_tokens", "max_completion_tokens", "max_output_tokens", "maxOutputTokens")


def _count(of: Mapping[str, Any], name: str) -> int | None:
    value = of.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 40 else None


def _text(of: Mapping[str, Any], name: str) -> str:
    value = of.get(name)
    return value[:_MAX_TEXT] if isinstance(value, str) else ""


def _word(of: Mapping[str, Any], name: str, *usual: str) -> str:
    word = _text(of, name)
    return "" if word in usual else word


def _searches(tools: Any) -> int | None:
    """Return the most web searches that the tools allow; None without a limit."""
    total = 0
    for tool in tools if isinstance(tools, list) else ():
        if isinstance(tool, dict) and _text(tool, "type").startswith("web_search"):
            if (uses := _count(tool, "max_uses")) is None:
                return None
            total += uses
    return total


def _is_reference(value: Any) -> bool:
    """Return whether a part of the input is a file or page that is only named."""
    match value:
        case {"source": {"type": "url" | "file"}} | {"fileData": _} | {"file_id": _} | {"file_url": _}:
            return True
        case {"image_url": {"url": str() as url}} | {"image_url": str() as url}:
            return not url.startswith("data:")
    return False
