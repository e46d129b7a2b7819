"""Reads a provider's report of usage: tokens, searches, and what else costs money. Pure.

A gateway may send a count as text, below zero, or not at all. Then the tokens of the request are unknown, not too few.
`REQUIRED` lists the counts that each style must have sent; a count that is not listed is 0 until it is sent. A counter
above 0 that is not known here may cost money: it is listed in `TokenCount.unpriced`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field, replace
from typing import Any, Final

import msgspec

from hutch_broker.dialects import UsageStyle
from hutch_shared.text import read_lax_json

__all__ = ["REQUIRED", "TokenCount", "counted"]

REQUIRED: Final[dict[UsageStyle, frozenset[str]]] = {
    "anthropic": frozenset({"input_tokens", "output_tokens"}),
    "openai": frozenset({"input", "output"}),  # the counts have other names in chat completions than in responses
    "gemini": frozenset({"promptTokenCount"}),  # a blocked answer has no other count
}


@dataclass(frozen=True, slots=True)
class TokenCount:
    """What a request used. `input` does not include cached tokens."""

    known: bool = False
    """True if the provider reported the counts, and each can be read."""
    model: str = ""
    input: int = 0
    output: int = 0
    cache_read: int = 0
    cache_write: int = 0
    """Tokens written to the cache, those for one hour included."""
    cache_write_1h: int = 0
    searches: int = 0
    """Web searches that the provider made."""
    speed: str = ""
    """The mode of speed, `fast` for instance; empty for the standard one."""
    tier: str = ""
    """The service tier; empty for the standard one."""
    geo: str = ""
    """The part of the world that the model ran in, if that was chosen; otherwise empty."""
    unpriced: frozenset[str] = frozenset()
    """Names of counters above 0 that may cost money, and whose price Hutch does not know."""
    missing: frozenset[str] = field(default=frozenset(), compare=False)
    """The names of counts that could not be read, or have not come yet."""


def counted(style: UsageStyle, before: TokenCount, text: bytes) -> TokenCount:
    """Return the count after the JSON value in `text`; `before` itself if that reports no usage."""
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        try:
            value = read_lax_json(text)
        except (ValueError, RecursionError):
            return replace(before, known=False, missing=before.missing | {"line"}) if text.strip() else before
    if isinstance(value, list):  # Gemini without server-sent events: an array of responses
        for one in value:
            before = _READERS[style](before, one) if isinstance(one, dict) else before
        return before
    return _READERS[style](before, value) if isinstance(value, dict) else before


def _anthropic(before: TokenCount, value: Mapping[str, Any]) -> TokenCount:
    """Read `message_start` (usage inside `message`), `message_delta` (usage so far), or an unstreamed message."""
    message = value.get("message") if isinstance(value.get("message"), dict) else value
    assert message is not None
    usage = message.get("usage")
    if not isinstance(usage, dict):
        return before if usage is None else replace(before, known=False, missing=before.missing | {"usage"})
    names = ("input_tokens", "output_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    missing = _missing(before, usage, *names)
    writes, tools = _part(usage, "cache_creation"), _part(usage, "server_tool_use")
    missing = _missing(replace(before, missing=missing), writes, *_WRITES)
    missing = _missing(replace(before, missing=missing), tools, "web_search_requests")
    more, unpriced = _iterations(usage)
    for_hour = _number(writes, _WRITES[1], before.cache_write_1h)
    return replace(
        before,
        known=not missing,
        missing=missing,
        model=_text(message, "model") or before.model,
        input=_number(usage, names[0], before.input) + more[0],
        output=_number(usage, names[1], before.output) + more[1],
        cache_read=_number(usage, names[2], before.cache_read) + more[2],
        cache_write=max(
            _number(usage, names[3], before.cache_write) + more[3],
            _number(writes, _WRITES[0], before.cache_write - before.cache_write_1h) + for_hour,
        ),
        cache_write_1h=for_hour,
        searches=_number(tools, "web_search_requests", before.searches),
        speed=_word(usage, "speed", before.speed, "standard"),
        tier=_word(usage, "service_tier", before.tier, "standard"),
        geo=_word(usage, "inference_geo", before.geo, "global", "not_available"),
        unpriced=before.unpriced
        | unpriced
        | _unknown_counters(usage, {*names, "output_tokens_details", "cache_creation", "server_tool_use", "iterations"})
        | _unknown_counters(writes, set(_WRITES))
        | _unknown_counters(tools, {"web_search_requests", "web_fetch_requests"}),
    )


_WRITES: Final = ("ephemeral_5m_input_tokens", "ephemeral_1h_input_tokens")


def _iterations(usage: Mapping[str, Any]) -> tuple[tuple[int, int, int, int], frozenset[str]]:
    """Return the tokens of `iterations` that the other counts do not include, and those whose price is unknown.

    The other counts are the sums of the iterations of type `message`. A compaction comes on top, at the same price.
    """
    names = ("input_tokens", "output_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    listed = usage.get("iterations")
    steps = [step for step in listed if isinstance(step, dict)] if isinstance(listed, list) else []
    compactions = [step for step in steps if step.get("type") == "compaction"]
    sums = [sum(_number(step, name, 0) for step in compactions) for name in names]
    unpriced = {
        f"iterations.{_text(step, 'type')}"
        for step in steps
        if step.get("type") not in ("message", "compaction") and _unknown_counters(step, set())
    }
    if any(count and name not in usage for name, count in zip(names, sums, strict=True)):
        unpriced.add("iterations.compaction")
    return (sums[0], sums[1], sums[2], sums[3]), frozenset(unpriced)


def _openai(before: TokenCount, value: Mapping[str, Any]) -> TokenCount:
    """Read chat completions (`prompt_tokens`) or responses (`input_tokens`). Both counts include cached tokens.

    Embeddings have no output: their total equals their input, and they have no count of their output.
    """
    inner = value.get("response") if isinstance(value.get("response"), dict) else value
    assert inner is not None
    usage = inner.get("usage")
    if not isinstance(usage, dict):
        return before
    sent_input = _number(usage, "input_tokens", _number(usage, "prompt_tokens", -1))
    sent_output = _number(usage, "output_tokens", _number(usage, "completion_tokens", -1))
    if sent_output < 0 and 0 <= sent_input == _number(usage, "total_tokens", -1):
        sent_output = 0
    whole = sent_input if sent_input >= 0 else before.input + before.cache_read
    details = usage.get("input_tokens_details", usage.get("prompt_tokens_details"))
    cached = min(whole, _number(details, "cached_tokens", before.cache_read) if isinstance(details, dict) else 0)
    missing = _missing(before, usage, "input_tokens", "output_tokens", "prompt_tokens", "completion_tokens")
    missing -= {name for name, count in (("input", sent_input), ("output", sent_output)) if count >= 0}
    return replace(
        before,
        known=not missing,
        missing=missing,
        model=_text(inner, "model") or before.model,
        input=whole - cached,
        output=sent_output if sent_output >= 0 else before.output,
        cache_read=cached,
        tier=_word(inner, "service_tier", before.tier, "default", "auto", "standard"),
        unpriced=before.unpriced | _unknown_counters(usage, _OPENAI_COUNTS) | _openai_tools(inner),
    )


_OPENAI_COUNTS: Final = {
    "input_tokens",
    "output_tokens",
    "prompt_tokens",
    "completion_tokens",
    "total_tokens",
    # parts of the counts above
    "cached_tokens",
    "text_tokens",
    "image_tokens",
    "reasoning_tokens",
    "accepted_prediction_tokens",
    "rejected_prediction_tokens",
    "prompt_cache_hit_tokens",
    "prompt_cache_miss_tokens",
}


def _openai_tools(response: Mapping[str, Any]) -> frozenset[str]:
    """Return the kinds of calls of the provider's own tools. The usage does not count them, and they cost money."""
    output = response.get("output")
    items = [_text(item, "type") for item in output if isinstance(item, dict)] if isinstance(output, list) else []
    ours = ("function_call", "custom_tool_call", "local_shell_call", "computer_call")
    return frozenset(kind for kind in items if kind.endswith("_call") and kind not in ours)


def _gemini(before: TokenCount, value: Mapping[str, Any]) -> TokenCount:
    usage = value.get("usageMetadata")
    if not isinstance(usage, dict):
        return before
    whole = _number(usage, "promptTokenCount", before.input + before.cache_read)
    cached = min(whole, _number(usage, "cachedContentTokenCount", before.cache_read))
    output = _number(usage, "candidatesTokenCount", 0) + _number(usage, "thoughtsTokenCount", 0)
    names = ("promptTokenCount", "candidatesTokenCount", "thoughtsTokenCount", "toolUsePromptTokenCount")
    missing = _missing(before, usage, *names)
    return replace(
        before,
        known=not missing,
        missing=missing,
        model=_text(value, "modelVersion") or before.model,
        input=whole - cached + _number(usage, "toolUsePromptTokenCount", 0),
        output=output or before.output,
        cache_read=cached,
        tier=_word(usage, "trafficType", before.tier, "ON_DEMAND", "TRAFFIC_TYPE_UNSPECIFIED"),
        unpriced=before.unpriced
        | _unknown_counters(usage, {*names, "cachedContentTokenCount", "totalTokenCount", *_GEMINI_DETAILS})
        | frozenset(one for name, same in _GEMINI_DETAILS.items() for one in _modalities(usage.get(name), same))
        | _gemini_searches(value),
    )


_GEMINI_INPUT: Final = ("TEXT", "IMAGE", "VIDEO", "DOCUMENT")
_GEMINI_DETAILS: Final[dict[str, tuple[str, ...]]] = {
    "promptTokensDetails": _GEMINI_INPUT,
    "cacheTokensDetails": _GEMINI_INPUT,
    "toolUsePromptTokensDetails": _GEMINI_INPUT,
    "candidatesTokensDetails": ("TEXT",),
}
"""The counts per modality, with the modalities that cost as much as text."""


def _modalities(details: Any, same: tuple[str, ...]) -> frozenset[str]:
    parts = [one for one in details if isinstance(one, dict)] if isinstance(details, list) else []
    return frozenset(
        f"tokens of {_text(one, 'modality')}"
        for one in parts
        if one.get("modality") not in same and _number(one, "tokenCount", 0)
    )


def _gemini_searches(value: Mapping[str, Any]) -> frozenset[str]:
    """Return `webSearchQueries` if the answer made any. The usage does not count them, and they cost money."""
    listed = value.get("candidates")
    found = (
        [_part(one, "groundingMetadata") for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []
    )
    return frozenset({"webSearchQueries"} if any(one.get("webSearchQueries") for one in found) else ())


_READERS: Final[dict[UsageStyle, Callable[[TokenCount, Mapping[str, Any]], TokenCount]]] = {
    "anthropic": _anthropic,
    "openai": _openai,
    "gemini": _gemini,
}


def _part(of: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = of.get(name)
    return value if isinstance(value, dict) else {}


def _word(of: Mapping[str, Any], name: str, before: str, *usual: str) -> str:
    """Return the word `name`, "" for a usual one, and `before` without one."""
    value = of.get(name)
    if value is None:
        return before
    return "" if value in ("", *usual) else value[:50] if isinstance(value, str) else "of no kind"


def _is_count(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0 and value == value // 1


def _unknown_counters(of: Mapping[str, Any], known: Set[str]) -> frozenset[str]:
    """Return the names of counters above 0 that are not `known`, at any depth. Times and shares are no counters."""
    found: set[str] = set()
    left = [of]
    while left:
        for name, value in left.pop().items():
            if name in known:
                continue
            if isinstance(value, dict):
                left.append(value)
            elif _is_count(value):
                found.add(name[:100])
    return frozenset(found)


def _text(of: Mapping[str, Any], name: str) -> str:
    value = of.get(name)
    return value[:200] if isinstance(value, str) else ""


def _missing(before: TokenCount, usage: Mapping[str, Any], *names: str) -> frozenset[str]:
    """Return the counts that cannot be read, or are still missing, after this `usage`."""
    given = {name for name in names if usage.get(name) is not None}
    readable = {name for name in given if _number(usage, name, -1) >= 0}
    return (before.missing - readable) | (given - readable)


def _number(of: Mapping[str, Any], name: str, otherwise: int) -> int:
    value = of.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 53 else otherwise
