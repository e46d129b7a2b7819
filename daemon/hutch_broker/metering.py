"""Reads the provider's token counts from a response while it streams. Pure: accepts chunks of any size.

Only lines that contain the provider's field name for usage (`"usage"`) are decoded; most lines of a stream do not. If a
model writes this word in its answer, its quotes are escaped, so the line does not match. A stream may repeat a count;
the last value is the final one.

A gateway may send a count as text, below zero, or not at all. Then the tokens of the request are unknown, not too few.
`_REQUIRED` lists the counts that each style must have sent; a count that is not listed is 0 until it is sent.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol

import msgspec

from hutch_broker.dialects import UsageStyle
from hutch_shared.text import read_lax_json

__all__ = ["StreamMeter", "TokenCount", "meter_for"]

_MAX_LINE: Final = 1 << 20
_MAX_BODY: Final = 8 << 20
_WORD: Final[dict[UsageStyle, bytes]] = {
    "anthropic": b'"usage"',
    "openai": b'"usage"',
    "gemini": b'"usageMetadata"',
}
_REQUIRED: Final[dict[UsageStyle, frozenset[str]]] = {
    "anthropic": frozenset({"input_tokens", "output_tokens"}),
    "openai": frozenset({"input", "output"}),  # the counts have other names in chat completions than in responses
    "gemini": frozenset({"promptTokenCount"}),  # a blocked answer has no other count
}


@dataclass(frozen=True, slots=True)
class TokenCount:
    """The tokens that a request used. `input` does not include cached tokens."""

    known: bool = False
    """True if the provider reported the counts, and each can be read."""
    model: str = ""
    input: int = 0
    output: int = 0
    cache_read: int = 0
    cache_write: int = 0
    missing: frozenset[str] = field(default=frozenset(), compare=False)
    """The names of counts that could not be read, or have not come yet."""


class StreamMeter(Protocol):
    """Counts the tokens of one response."""

    def feed(self, chunk: bytes) -> None:
        """Count the next bytes."""

    def result(self) -> TokenCount:
        """Return the count. Call it after the last bytes, or after the response broke off."""


def meter_for(style: UsageStyle | None, content_type: str, content_encoding: str) -> StreamMeter:
    """Return the meter for a response of this type. If Hutch cannot decode the type, the count is unknown."""
    kind = content_type.partition(";")[0].strip().lower()
    if style is None or kind not in ("text/event-stream", "application/json"):
        return _Nothing()
    meter: StreamMeter = _Lines(style) if kind == "text/event-stream" else _Whole(style)
    match content_encoding.strip().lower():
        case "" | "identity":
            return meter
        case "gzip" | "deflate":
            return _Inflated(meter)
        case _:
            return _Nothing()


class _Nothing:
    def feed(self, chunk: bytes) -> None:
        pass

    def result(self) -> TokenCount:
        return TokenCount()


class _Lines:
    """Server-sent events, with one JSON value in each `data:` line."""

    def __init__(self, style: UsageStyle) -> None:
        self._style = style
        self._word = _WORD[style]
        self._begun = b""
        self._skipping = False
        self._tokens = TokenCount(missing=_REQUIRED[style])

    def feed(self, chunk: bytes) -> None:
        end = chunk.rfind(b"\n")
        if end < 0:
            self._grow(chunk)
            return
        block = self._begun + chunk[:end]
        if self._skipping:  # the rest of a line longer than _MAX_LINE
            block = block.partition(b"\n")[2]
            self._skipping = False
        self._begun = b""
        self._grow(chunk[end + 1 :])
        if self._word in block:
            for line in block.split(b"\n"):
                self._look_at(line)

    def _grow(self, piece: bytes) -> None:
        if not self._skipping:
            self._begun += piece
            if len(self._begun) > _MAX_LINE:
                self._begun = b""
                self._skipping = True

    def _look_at(self, line: bytes) -> None:
        if self._word in line and line.startswith(b"data:"):
            self._tokens = _counted(self._style, self._tokens, line[5:])

    def result(self) -> TokenCount:
        self._look_at(self._begun)
        return self._tokens


class _Whole:
    """One JSON document."""

    def __init__(self, style: UsageStyle) -> None:
        self._style = style
        self._pieces: list[bytes] = []
        self._size = 0

    def feed(self, chunk: bytes) -> None:
        self._size += len(chunk)
        if self._size <= _MAX_BODY:
            self._pieces.append(chunk)
        else:
            self._pieces.clear()

    def result(self) -> TokenCount:
        return _counted(self._style, TokenCount(missing=_REQUIRED[self._style]), b"".join(self._pieces))


class _Inflated:
    """Decompresses a copy of the response for the meter. Stops counting if a chunk inflates beyond _MAX_BODY."""

    def __init__(self, meter: StreamMeter) -> None:
        self._meter = meter
        self._inflate: Any = zlib.decompressobj(zlib.MAX_WBITS | 32)

    def feed(self, chunk: bytes) -> None:
        if self._inflate is None:
            return
        try:
            self._meter.feed(self._inflate.decompress(chunk, _MAX_BODY))
        except zlib.error:
            self._inflate = None
            return
        if self._inflate.unconsumed_tail:
            self._inflate = None

    def result(self) -> TokenCount:
        return self._meter.result()


def _counted(style: UsageStyle, before: TokenCount, text: bytes) -> TokenCount:
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
    return replace(
        before,
        known=not missing,
        missing=missing,
        model=_text(message, "model") or before.model,
        input=_number(usage, "input_tokens", before.input),
        output=_number(usage, "output_tokens", before.output),
        cache_read=_number(usage, "cache_read_input_tokens", before.cache_read),
        cache_write=_number(usage, "cache_creation_input_tokens", before.cache_write),
    )


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
    )


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
    )


_READERS: Final[dict[UsageStyle, Callable[[TokenCount, Mapping[str, Any]], TokenCount]]] = {
    "anthropic": _anthropic,
    "openai": _openai,
    "gemini": _gemini,
}


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
