"""The lines that the Claude CLI writes, as types: one JSON message per line (`--output-format stream-json`).

Only the fields that Hutch reads. Fields and kinds that a newer CLI adds do not matter here.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

__all__ = [
    "ANY_LINE",
    "CONVERSATION_LINE",
    "RESULT_LINE",
    "STREAM_LINE",
    "UNREADABLE",
    "ContentBlock",
    "ConversationLine",
    "ModelMessage",
    "ModelUsage",
    "ResultLine",
    "StreamLine",
    "UsageCount",
    "UsageResponse",
    "kind_of_line",
]


class UsageCount(msgspec.Struct):
    """Tokens of one model request."""

    input_tokens: int | None = 0
    output_tokens: int | None = 0
    cache_read_input_tokens: int | None = 0
    cache_creation_input_tokens: int | None = 0


class ContentBlock(msgspec.Struct):
    """A content block of a message; which fields are set depends on `type`."""

    type: str
    text: str = ""
    thinking: str = ""
    id: str = ""
    name: str = ""
    input: dict[str, Any] = {}
    tool_use_id: str = ""
    content: Any = None
    is_error: bool | None = None


class ModelMessage(msgspec.Struct):
    """A message of the model's API."""

    content: str | list[ContentBlock] = ""
    id: str = ""
    model: str | None = None


class ConversationLine(msgspec.Struct):
    """A line `assistant` or `user`: a message of the conversation."""

    message: ModelMessage
    parent_tool_use_id: str | None = None
    is_api_error_message: bool | None = None


class Delta(msgspec.Struct):
    """A piece of a content block."""

    type: str = ""
    text: str = ""
    thinking: str = ""


class StreamBody(msgspec.Struct):
    """An event of the model's stream; which fields are set depends on `type`."""

    type: str
    index: int = 0
    delta: Delta | None = None
    message: ModelMessage | None = None
    usage: UsageCount | None = None


class StreamLine(msgspec.Struct):
    """A line `stream_event`."""

    event: StreamBody
    parent_tool_use_id: str | None = None


class ModelUsage(msgspec.Struct, rename="camel"):
    """Usage of one model since the CLI started."""

    input_tokens: int = 0
    output_tokens: int = 0
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0
    cost_usd: float = msgspec.field(default=0.0, name="costUSD")


class ResultLine(msgspec.Struct):
    """A line `result`: the end of a turn. `is_error` may be true although `subtype` is `success`."""

    subtype: str = ""
    is_error: bool = False
    result: str | None = None
    errors: list[str] | None = None
    terminal_reason: str | None = None
    api_error_status: int | None = None
    api_error: str | None = None
    session_id: str | None = None
    model_usage: dict[str, ModelUsage] | None = msgspec.field(default=None, name="modelUsage")


class SessionUsage(msgspec.Struct):
    """Usage of the conversation, by model."""

    model_usage: dict[str, ModelUsage]


class UsageResponse(msgspec.Struct):
    """The response to the control request `get_usage`."""

    session: SessionUsage


class _Envelope(msgspec.Struct):
    type: str


_ENVELOPE: Final = msgspec.json.Decoder(_Envelope)
CONVERSATION_LINE: Final = msgspec.json.Decoder(ConversationLine)
STREAM_LINE: Final = msgspec.json.Decoder(StreamLine)
RESULT_LINE: Final = msgspec.json.Decoder(ResultLine)
ANY_LINE: Final = msgspec.json.Decoder(dict[str, Any])
UNREADABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""The errors of a decoder: another shape, text that is not UTF-8, too deeply nested."""


def kind_of_line(line: bytes) -> str:
    """Return the `type` of a line. ValueError if it is no JSON object with that field; RecursionError if too deep."""
    return _ENVELOPE.decode(line).type
