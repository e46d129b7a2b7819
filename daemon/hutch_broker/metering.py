"""Counts the usage of a response while it streams. Pure: accepts chunks of any size.

Lines that contain the provider's field name for usage (`"usage"`) are decoded whole. If a model writes this word in its
answer, its quotes are escaped, so the line does not match. A stream may repeat a count; the last value is the final
one.

The content that arrives after the last report of usage is counted as well, one token per two bytes, which is more than
any model needs for text. So a stream that breaks off has a count that is not too low. The next report replaces the
estimate.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final, Protocol

from hutch_broker.content import CONTENT, NO_CONTENT, StreamContent, tokens_in
from hutch_broker.dialects import UsageStyle
from hutch_broker.usage import REQUIRED, TokenCount, counted

__all__ = ["StreamMeter", "meter_for"]

_MAX_LINE: Final = 1 << 20
_MAX_BODY: Final = 8 << 20
_WORD: Final[dict[UsageStyle, bytes]] = {
    "anthropic": b'"usage"',
    "openai": b'"usage"',
    "gemini": b'"usageMetadata"',
}


class StreamMeter(Protocol):
    """Counts the tokens of one response."""

    @property
    def reports(self) -> int:
        """The number of reports of usage so far."""

    @property
    def streamed(self) -> int:
        """Bytes of content that arrived since the last report."""

    def feed(self, chunk: bytes) -> None:
        """Count the next bytes."""

    def so_far(self) -> TokenCount:
        """Return the count so far. Content without a report is estimated."""

    def result(self) -> TokenCount:
        """Return the final count. Call it after the last bytes, or after the response broke off."""


def meter_for(style: UsageStyle | None, content_type: str) -> StreamMeter:
    """Return the meter for a response of this type. If Hutch cannot count the type, the count is unknown."""
    kind = content_type.partition(";")[0].strip().lower()
    if style is None or kind not in ("text/event-stream", "application/json"):
        return _Nothing()
    return _Lines(style) if kind == "text/event-stream" else _Whole(style)


class _Nothing:
    reports = 0

    def __init__(self) -> None:
        self.streamed = 0

    def feed(self, chunk: bytes) -> None:
        self.streamed += len(chunk)

    def so_far(self) -> TokenCount:
        return TokenCount()

    result = so_far


class _Lines:
    """Server-sent events, with one JSON value in each `data:` line."""

    def __init__(self, style: UsageStyle) -> None:
        self._style = style
        self._word = _WORD[style]
        self._begun = b""
        self._skipping = False
        self._tokens = TokenCount(missing=REQUIRED[style])
        self._content = CONTENT[style]
        self.reports = 0
        self._since = NO_CONTENT
        """The content since the last report of usage."""

    @property
    def streamed(self) -> int:
        return self._since.written

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
        for line in block.split(b"\n"):
            self._look_at(line)

    def _grow(self, piece: bytes) -> None:
        if self._skipping:
            self._since += StreamContent(written=len(piece))
            return
        self._begun += piece
        if len(self._begun) > _MAX_LINE:
            self._since += StreamContent(written=len(self._begun))
            self._begun = b""
            self._skipping = True

    def _look_at(self, line: bytes) -> None:
        if not line.startswith(b"data:"):
            return
        before = self._tokens
        if self._word in line:
            self._tokens = counted(self._style, before, line[5:])
        if self._tokens is before:
            if (content := self._content(line)) is not NO_CONTENT:
                self._since += content
            return
        self.reports += 1
        read = self._since.read if self._tokens.input == before.input else 0
        searches = 0 if b'"web_search_requests"' in line else self._since.searches
        self._since = StreamContent(0, read, searches) if read or searches else NO_CONTENT

    def so_far(self) -> TokenCount:
        """Return the count of the whole lines so far."""
        if self._since is NO_CONTENT:
            return self._tokens
        return replace(
            self._tokens,
            input=self._tokens.input + tokens_in(self._since.read),
            output=self._tokens.output + tokens_in(self._since.written),
            searches=self._tokens.searches + self._since.searches,
        )

    def result(self) -> TokenCount:
        begun, self._begun = self._begun, b""
        self._look_at(begun)
        return self.so_far()


class _Whole:
    """One JSON document."""

    def __init__(self, style: UsageStyle) -> None:
        self._style = style
        self._pieces: list[bytes] = []
        self.reports = 0
        self.streamed = 0

    def feed(self, chunk: bytes) -> None:
        self.streamed += len(chunk)
        if self.streamed <= _MAX_BODY:
            self._pieces.append(chunk)
        else:
            self._pieces.clear()

    def so_far(self) -> TokenCount:
        return TokenCount()

    def result(self) -> TokenCount:
        return counted(self._style, TokenCount(missing=REQUIRED[self._style]), b"".join(self._pieces))
