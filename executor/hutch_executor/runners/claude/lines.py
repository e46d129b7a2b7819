"""The lines that the Claude CLI writes, as types: one JSON message per line (`--output-format stream-json`).

Only the fields that Hutch reads. Fields and kinds that a newer CLI adds do not matter here.

The CLI passes on what models, gateways and MCP servers send, so any field may have any type. A strict decoder reads
almost every line; `mended` reads the others: a field of another type counts as missing. Numbers that count money are
never guessed: `UsageCount` and `ModelUsage` are read whole, or count as unknown.
"""

from __future__ import annotations

import re
import types
import typing
from functools import cache
from typing import Annotated, Any, Final, TypeVar

import msgspec
from msgspec import Meta

from hutch_shared.text import read_lax_json

__all__ = [
    "ANY_LINE",
    "CONTROL",
    "CONVERSATION_LINE",
    "MESSAGES",
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
    "control_fault",
    "kind_by_scan",
    "kind_of_line",
    "lax_line",
    "mended",
]

Tokens = Annotated[int, Meta(ge=0, le=2**53)]
Dollars = Annotated[float, Meta(ge=0, le=1e9)]


class Mended(msgspec.Struct):
    """The base of the types whose fields may be missing."""


class UsageCount(msgspec.Struct):
    """Tokens of one model request."""

    input_tokens: Tokens | None = 0
    output_tokens: Tokens | None = 0
    cache_read_input_tokens: Tokens | None = 0
    cache_creation_input_tokens: Tokens | None = 0


class ContentBlock(Mended):
    """A content block of a message; which fields are set depends on `type`."""

    type: str = ""
    text: str = ""
    thinking: str = ""
    id: str = ""
    name: str = ""
    input: dict[str, Any] = {}
    tool_use_id: str = ""
    content: Any = None
    is_error: bool | None = None


class ModelMessage(Mended):
    """A message of the model's API."""

    content: str | list[ContentBlock] = ""
    id: str = ""
    model: str | None = None


class ConversationLine(Mended):
    """A line `assistant` or `user`: a message of the conversation."""

    message: ModelMessage
    parent_tool_use_id: str | None = None
    is_api_error_message: bool | None = None
    is_replay: bool | None = msgspec.field(default=None, name="isReplay")
    """Whether the line only repeats the output of a built-in command."""


class Delta(Mended):
    """A piece of a content block."""

    type: str = ""
    text: str = ""
    thinking: str = ""


class StreamBody(Mended):
    """An event of the model's stream; which fields are set depends on `type`."""

    type: str = ""
    index: int = 0
    delta: Delta | None = None
    message: ModelMessage | None = None
    usage: UsageCount | None = None


class StreamLine(Mended):
    """A line `stream_event`."""

    event: StreamBody
    parent_tool_use_id: str | None = None


class ModelUsage(msgspec.Struct, rename="camel"):
    """Usage of one model since the CLI started."""

    input_tokens: Tokens
    output_tokens: Tokens
    cache_read_input_tokens: Tokens
    cache_creation_input_tokens: Tokens
    cost_usd: Dollars = msgspec.field(name="costUSD")
    cost_basis: str = "list"
    """`unknown` if the CLI does not know the model's price: then `cost_usd` is another model's."""


class ResultLine(Mended):
    """A line `result`: the end of a turn. `is_error` may be true although `subtype` is `success`.

    `is_error` is None, and a model's usage is None, if the line does not say it.
    """

    subtype: str = ""
    is_error: bool | None = None
    result: str | None = None
    errors: list[str] | None = None
    terminal_reason: str | None = None
    api_error_status: int | None = None
    api_error: str | None = None
    session_id: str | None = None
    uuid: str | None = None
    origin: dict[str, Any] | None = None
    model_usage: dict[str, ModelUsage | None] | None = msgspec.field(default=None, name="modelUsage")
    usage_of_turn: dict[str, ModelUsage | None] | None = msgspec.field(
        default=None, name="model_usage_since_last_result"
    )


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
UNREADABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError)
"""The errors of a decoder: another shape, text that is not UTF-8, too deeply nested."""
CONTROL: Final = frozenset({"control_request", "control_response", "control_cancel_request"})
"""The kinds of lines of the control protocol, which the SDK reads."""
MESSAGES: Final = frozenset({"assistant", "user", "stream_event", "system", "result", "rate_limit_event"})
"""The kinds of lines that are no control lines, whatever their fields are. Others are looked at twice."""

_TOKEN: Final = re.compile(rb'"(?:[^"\\]|\\.)*+"|[][{}:,]')
_SCANNED: Final = 4 << 20
"""Bytes up to which a line that no decoder reads is scanned for its kind."""
T = TypeVar("T", bound=Mended)


def kind_of_line(line: bytes) -> str:
    """Return the `type` of a line. One of `UNREADABLE` if it is not JSON with that field, or too deep."""
    return _ENVELOPE.decode(line).type


def kind_by_scan(line: bytes) -> str:
    """Return the `type` of a line that no decoder reads, say because it is nested too deeply; empty if it has none."""
    depth, key, before = 0, b"", b""
    for match in _TOKEN.finditer(line, 0, _SCANNED):
        token = match[0]
        if token in b"[{":
            depth += 1
        elif token in b"]}":
            depth -= 1
        elif depth == 1 and token == b":":
            key = before
        elif depth == 1 and key == b'"type"' and before == b":":
            return token[1:-1].decode(errors="replace")
        before = token
    return ""


def lax_line(line: bytes) -> tuple[str, dict[str, Any]]:
    """Return the `type` of a line (empty if it has none) and its fields, whose text may hold lone surrogates.

    One of `UNREADABLE` if it is not a JSON object.
    """
    value = read_lax_json(line)
    if not isinstance(value, dict):
        raise ValueError("it is not an object")
    kind = value.get("type")
    return (kind if isinstance(kind, str) else ""), value


def mended(shape: type[T], value: dict[str, Any]) -> T:
    """Return `value` as `shape`: a field of another type, and a missing one, get their default."""
    fields: dict[str, Any] = {}
    for name, encoded, kind, part, default in _fields_of(shape):
        if encoded in value:
            fields[name] = _mended_field(value[encoded], kind, part, default)
        elif default is msgspec.NODEFAULT:
            fields[name] = part()
    return shape(**fields)


@cache
def _fields_of(shape: type[Mended]) -> list[tuple[str, str, Any, Any, Any]]:
    """Return name, name in JSON, type, struct within the type (or None) and default of each field."""
    found = []
    for field in msgspec.structs.fields(shape):
        default = field.default_factory() if field.default_factory is not msgspec.NODEFAULT else field.default
        found.append((field.name, field.encode_name, field.type, _struct_in(field.type), default))
    return found


def _struct_in(kind: Any) -> Any:
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return kind
    return next((found for part in typing.get_args(kind) if (found := _struct_in(part)) is not None), None)


def _mended_field(value: Any, kind: Any, part: Any, default: Any) -> Any:
    try:
        return msgspec.convert(value, kind)
    except (ValueError, RecursionError):
        pass
    kinds = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    if isinstance(value, dict) and part in kinds:
        if (whole := _mended_struct(value, part)) is not None:
            return whole
    elif isinstance(value, dict) and part is not None and _has(dict, kinds):
        return {name: _mended_struct(item, part) for name, item in value.items()}
    elif isinstance(value, list) and part is not None and _has(list, kinds):
        return [one for item in value if (one := _mended_struct(item, part)) is not None]
    return part() if default is msgspec.NODEFAULT else default


def _has(container: type, kinds: tuple[Any, ...]) -> bool:
    return any(typing.get_origin(one) is container for one in kinds)


def _mended_struct(value: Any, part: Any) -> Any:
    """Return `value` as the struct `part`; None if it cannot be read or mended."""
    try:
        return msgspec.convert(value, part)
    except (ValueError, RecursionError):
        return mended(part, value) if isinstance(value, dict) and issubclass(part, Mended) else None


def control_fault(control: dict[str, Any]) -> str | None:
    """Return why the SDK could not read this control line, or None. Removes what Hutch does not use."""
    if control.get("type") == "control_request":
        request = control.get("request")
        if not isinstance(control.get("request_id"), str):
            return "its id is not text"
        if not isinstance(request, dict) or not isinstance(request.get("subtype"), str):
            return "it names no request"
        request.pop("permission_suggestions", None)
        wanted = _WANTED.get(request["subtype"], {})
        return next((f"{name!r} has another type" for name in wanted if not _fits(request, name, wanted[name])), None)
    if control.get("type") == "control_response":
        response = control.get("response")
        if not isinstance(response, dict) or not isinstance(response.get("request_id"), str):
            return "it names no request"
        return None
    return None if isinstance(control.get("request_id"), str) else "it names no request"


_WANTED: Final[dict[str, dict[str, tuple[type, ...]]]] = {
    "can_use_tool": {"tool_name": (str,), "input": (dict,), "tool_use_id": (str,), "agent_id": (str, types.NoneType)},
    "hook_callback": {"callback_id": (str,), "input": (dict,), "tool_use_id": (str, types.NoneType)},
}
"""The types of the fields that Hutch reads, by request. None stands for a missing field too."""


def _fits(request: dict[str, Any], name: str, kinds: tuple[type, ...]) -> bool:
    return isinstance(request.get(name), kinds)
