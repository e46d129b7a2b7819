"""The events of a session, in the same vocabulary for every agent.

This module gives the shape of `data` for each kind. `native` is the agent's own message, whole and without a contract
of ours. hutchd stores and forwards both as the bytes it received.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

__all__ = [
    "DATA_OF_KIND",
    "KINDS",
    "Event",
    "EventKind",
    "Notice",
    "PermissionAsked",
    "PermissionSettled",
    "ReportedEvent",
    "StderrText",
    "Text",
    "ToolCallSeen",
    "ToolResult",
    "TurnEnded",
    "TurnKind",
    "TurnStarted",
    "UsageSeen",
]

EventKind = Literal[
    "turn_started",
    "text",
    "text_delta",
    "thinking",
    "thinking_delta",
    "tool_call",
    "tool_result",
    "permission_asked",
    "permission_settled",
    "notice",
    "usage",
    "stderr",
    "turn_ended",
]
KINDS: tuple[EventKind, ...] = get_args(EventKind)
TurnKind = Literal["prompt", "compact", "clear"]
"""What a turn does: it runs a prompt, replaces the conversation by its summary, or begins an empty conversation."""
Tokens = Annotated[int, Meta(ge=0, le=2**53)]


class Event(msgspec.Struct, frozen=True, omit_defaults=True):
    """An event as a client receives it. `seq` (1, 2, 3 …) orders a session, `position` the whole journal."""

    session: str
    seq: int
    position: int
    at: str
    kind: EventKind
    data: Raw
    turn: str | None = None
    native: Raw | UnsetType = UNSET
    follow: int | None = None
    """The follow that it belongs to; set only in the notification `event`."""


class ReportedEvent(msgspec.Struct, frozen=True, omit_defaults=True):
    """An event as an executor reports it; `n` is the executor's own number (1, 2, 3 … without gaps)."""

    n: int
    at: str
    kind: EventKind
    data: Raw
    turn: str | None = None
    native: Raw | UnsetType = UNSET


class TurnStarted(msgspec.Struct, frozen=True, omit_defaults=True):
    """`turn_started`: the prompt as it was given; of a turn of the kind `compact` the words about the summary."""

    prompt: str
    number: int
    kind: TurnKind = "prompt"


class Text(msgspec.Struct, frozen=True, omit_defaults=True):
    """`text`, `text_delta`, `thinking`, `thinking_delta`. Deltas and the finished text share a `block`.

    `parent` is the tool call of the sub-agent that wrote the text.
    """

    text: str
    block: str | None = None
    parent: str | None = None


class ToolCallSeen(msgspec.Struct, frozen=True, omit_defaults=True):
    """`tool_call`: a call in the common vocabulary; `call` is a `messages.ToolCall`.

    If a user edits a call before it runs, hutchd reports the call once more, with the edited input and `edited_by`. It
    is this one that may run.
    """

    call: dict[str, Any]
    parent: str | None = None
    edited_by: str | None = None


class ToolResult(msgspec.Struct, frozen=True, omit_defaults=True):
    """`tool_result`: the result of a call. `digest` is that of the input that ran, if the agent reports it."""

    call_id: str
    text: str
    is_error: bool = False
    digest: str | None = None
    parent: str | None = None


class PermissionAsked(msgspec.Struct, frozen=True):
    """`permission_asked`: the whole permission request, a `messages.Permission`."""

    permission: dict[str, Any]


class PermissionSettled(msgspec.Struct, frozen=True, omit_defaults=True):
    """`permission_settled`: the final decision, and the user or cause that made it.

    `rule` is the rule that settled it or that the decision added, for `scope`. `call_id` names the call, and `digest`
    is that of the input that may run. An edited input of up to 64 KiB is in `updated_input`; the call's own event has
    any.
    """

    permission: str
    state: str
    by: str
    message: str | None = None
    scope: str | None = None
    rule: str | None = None
    call_id: str | None = None
    digest: str | None = None
    updated_input: dict[str, Any] | None = None
    answers: dict[str, Any] | None = None


class Notice(msgspec.Struct, frozen=True, omit_defaults=True):
    """`notice`: something that the user should know. `word` is stable, `message` is a sentence."""

    word: str
    message: str
    details: dict[str, Any] = {}


class UsageSeen(msgspec.Struct, frozen=True, omit_defaults=True):
    """`usage`: tokens of one model request or, with `total`, of the whole turn."""

    input_tokens: Tokens = 0
    output_tokens: Tokens = 0
    cache_read_tokens: Tokens = 0
    cache_write_tokens: Tokens = 0
    usd: Annotated[float, Meta(ge=0)] | None = None
    model: str | None = None
    total: bool = False


class StderrText(msgspec.Struct, frozen=True):
    """`stderr`: lines that the agent's process wrote to its standard error."""

    text: str


class TurnEnded(msgspec.Struct, frozen=True, omit_defaults=True):
    """`turn_ended`: the terminal state, its reason (a stable word) and a sentence for the user."""

    state: Literal["completed", "failed", "stopped", "timed_out"]
    reason: str
    message: str
    result: str | None = None
    usage: UsageSeen | None = None
    agent_session: str | None = None
    conversation_kept: bool = True
    """False if the agent did not store the conversation, on a full disk for example. The next prompt begins a new one,
    with a recap of what Hutch recorded."""


DATA_OF_KIND: dict[EventKind, type[msgspec.Struct]] = {
    "turn_started": TurnStarted,
    "text": Text,
    "text_delta": Text,
    "thinking": Text,
    "thinking_delta": Text,
    "tool_call": ToolCallSeen,
    "tool_result": ToolResult,
    "permission_asked": PermissionAsked,
    "permission_settled": PermissionSettled,
    "notice": Notice,
    "usage": UsageSeen,
    "stderr": StderrText,
    "turn_ended": TurnEnded,
}
