"""Measures the content of one line of a stream, so that a stream that breaks off has an estimate. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from hutch_broker.dialects import UsageStyle
from hutch_broker.json_values import values_in

__all__ = ["CONTENT", "NO_CONTENT", "StreamContent", "tokens_in"]

_BYTES_PER_TOKEN: Final = 2
"""Bytes of content that count as one token. Text in any language has fewer tokens."""


@dataclass(frozen=True, slots=True)
class StreamContent:
    """What one line of a stream carries: bytes that the model wrote, bytes that it reads, and searches."""

    written: int = 0
    read: int = 0
    searches: int = 0

    def __add__(self, other: StreamContent) -> StreamContent:
        return StreamContent(self.written + other.written, self.read + other.read, self.searches + other.searches)


NO_CONTENT: Final = StreamContent()


class _Delta(msgspec.Struct):
    text: str = ""
    partial_json: str = ""
    thinking: str = ""
    signature: str = ""


class _Block(msgspec.Struct):
    type: str = ""
    name: str = ""
    text: str = ""
    thinking: str = ""
    signature: str = ""
    data: str = ""
    content: Any = None


class _Event(msgspec.Struct):
    delta: _Delta | None = None
    content_block: _Block | None = None


_read_event: Final = msgspec.json.Decoder(_Event).decode


def _anthropic_content(line: bytes) -> StreamContent:
    if b'"content_block' not in line:
        return NO_CONTENT
    try:
        event = _read_event(line[5:])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return StreamContent(written=len(line))
    if (delta := event.delta) is not None:
        return StreamContent(
            _size(delta.text) + _size(delta.partial_json) + _size(delta.thinking) + _size(delta.signature)
        )
    if (block := event.content_block) is None:
        return NO_CONTENT
    return StreamContent(
        _size(block.text) + _size(block.thinking) + _size(block.signature) + _size(block.data),
        0 if block.content is None else len(line),
        int(block.type == "server_tool_use" and block.name == "web_search"),
    )


def _openai_content(line: bytes) -> StreamContent:
    """Count chat completions (`choices`) and responses (`delta`); the other events of responses repeat their text."""
    value = _decoded(line)
    if value is None:
        return StreamContent(written=len(line))
    return StreamContent(written=_strings(value.get("choices")) + _strings(value.get("delta")))


def _gemini_content(line: bytes) -> StreamContent:
    value = _decoded(line)
    return StreamContent(written=len(line) if value is None else _strings(value.get("candidates")))


CONTENT: Final[dict[UsageStyle, Callable[[bytes], StreamContent]]] = {
    "anthropic": _anthropic_content,
    "openai": _openai_content,
    "gemini": _gemini_content,
}


def _decoded(line: bytes) -> dict[str, Any] | None:
    if line[5:].strip() == b"[DONE]":
        return {}
    try:
        value = msgspec.json.decode(line[5:])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return value if isinstance(value, dict) else {}


def _strings(value: Any) -> int:
    """Return the bytes of all texts in `value`."""
    return sum(_size(one) for one in values_in(value) if isinstance(one, str))


def _size(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def tokens_in(size: int) -> int:
    """Return the tokens that `size` bytes of streamed content count as."""
    return -(-size // _BYTES_PER_TOKEN)
