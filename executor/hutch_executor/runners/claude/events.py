"""What the Claude CLI says, in the words that are the same for every agent. Pure: lines in, events out.

The CLI writes one JSON message per line. With partial messages it tells everything twice: as deltas while the model
speaks, then as one `assistant` message for each finished block. Deltas and their whole text are joined by `block`,
which is the model message's id and the place of the block in it. What carries nothing for a reader (the start and
stop of blocks, pieces of a tool's input, progress counters) becomes no event; a message of a kind not known here
becomes a notice, so that a newer CLI loses nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import msgspec

from hutch_shared.events import EventKind, Notice, Text, ToolCallSeen, ToolResult, TurnEnded, UsageSeen
from hutch_shared.vocabulary import to_call

__all__ = ["Meter", "ModelUsage", "Narrator", "Result", "ended", "failure", "kind_of_line", "total"]

Told = tuple[EventKind, msgspec.Struct]

_NOTE_LIMIT: Final = 2000


class Tokens(msgspec.Struct):
    input_tokens: int | None = 0
    output_tokens: int | None = 0
    cache_read_input_tokens: int | None = 0
    cache_creation_input_tokens: int | None = 0


class Block(msgspec.Struct):
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


class Message(msgspec.Struct):
    content: str | list[Block] = ""
    id: str = ""
    model: str | None = None


class Spoken(msgspec.Struct):
    """Lines `assistant` and `user`."""

    message: Message
    parent_tool_use_id: str | None = None
    is_api_error_message: bool | None = None


class Delta(msgspec.Struct):
    type: str = ""
    text: str = ""
    thinking: str = ""


class StreamBody(msgspec.Struct):
    type: str
    index: int = 0
    delta: Delta | None = None
    message: Message | None = None
    usage: Tokens | None = None


class Stream(msgspec.Struct):
    """Line `stream_event`."""

    event: StreamBody
    parent_tool_use_id: str | None = None


class ModelUsage(msgspec.Struct, rename="camel"):
    """Usage of one model since the CLI started."""

    input_tokens: int = 0
    output_tokens: int = 0
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0
    cost_usd: float = msgspec.field(default=0.0, name="costUSD")


class Result(msgspec.Struct):
    """Line `result`: the end of a turn. `is_error` may be true where `subtype` says `success`."""

    subtype: str = ""
    is_error: bool = False
    result: str | None = None
    errors: list[str] | None = None
    terminal_reason: str | None = None
    api_error_status: int | None = None
    api_error: str | None = None
    session_id: str | None = None
    model_usage: dict[str, ModelUsage] | None = msgspec.field(default=None, name="modelUsage")


class _Envelope(msgspec.Struct):
    type: str


_ENVELOPE: Final = msgspec.json.Decoder(_Envelope)
_SPOKEN: Final = msgspec.json.Decoder(Spoken)
_STREAM: Final = msgspec.json.Decoder(Stream)
_RESULT: Final = msgspec.json.Decoder(Result)
_ANY: Final = msgspec.json.Decoder(dict[str, Any])


def kind_of_line(line: bytes) -> str:
    """Return the `type` of a line. ValueError when it is not one JSON object with such a field."""
    return _ENVELOPE.decode(line).type


@dataclass(slots=True)
class _Speaker:
    """Where the main agent or one sub-agent is in its model message."""

    message: str = ""
    finished: int = 0


class Narrator:
    """Tells the events of one conversation, line by line. `ran` gives the digest of the input that a call ran with."""

    def __init__(self, cwd: str, ran: dict[str, str]) -> None:
        """Begin; relative paths in tool calls stand below `cwd`."""
        self._cwd = cwd
        self._ran = ran
        self._speakers: dict[str | None, _Speaker] = {}
        self._model: str | None = None
        self._shown: dict[str, Any] | None = None
        self.awaits_model = False
        """Whether the main agent has asked the model and its answer has not ended."""
        self._refused: int | None = None
        self.spoke = False
        """Whether the model has said anything; from then on the CLI has the conversation written down."""
        self.session: str | None = None
        """The agent's own id of the conversation."""
        self.result: Result | None = None
        """Set by the line that ends the turn."""

    def tell(self, line: bytes) -> list[Told]:
        """Return the events of one line; msgspec.DecodeError where it has not the shape of its kind."""
        match kind_of_line(line):
            case "stream_event":
                return self._stream(_STREAM.decode(line))
            case "assistant":
                return self._assistant(_SPOKEN.decode(line))
            case "user":
                return self._user(_SPOKEN.decode(line))
            case "result":
                self.result = _RESULT.decode(line)
                self.awaits_model = False
                return []
            case "system":
                return self._system(_ANY.decode(line))
            case "rate_limit_event":
                return _rate_limit(_ANY.decode(line))
            case kind:
                return [_note("agent_note", f"Claude Code sent a message of the kind {kind!r}.")]

    def awaited(self) -> Result:
        """Return what the CLI would say if it gave up waiting for the model now."""
        return Result("success", is_error=True, api_error_status=self._refused, api_error="timeout")

    def _stream(self, line: Stream) -> list[Told]:
        event, parent = line.event, line.parent_tool_use_id
        speaker = self._speakers.setdefault(parent, _Speaker())
        if event.type == "content_block_delta" and event.delta is not None:
            block = f"{speaker.message}:{event.index}"
            if event.delta.type == "text_delta":
                return [("text_delta", Text(event.delta.text, block, parent))]
            if event.delta.type == "thinking_delta":
                return [("thinking_delta", Text(event.delta.thinking, block, parent))]
        elif event.type == "message_start" and event.message is not None:
            self._enter(speaker, event.message)
            self._refused = None
            self.awaits_model = parent is None or self.awaits_model
        elif event.type == "message_delta" and event.usage is not None:
            return [("usage", _request_usage(event.usage, self._model))]
        elif event.type == "message_stop" and parent is None:
            self.awaits_model = False
        return []

    def _enter(self, speaker: _Speaker, message: Message) -> None:
        if speaker.message != message.id:
            speaker.message, speaker.finished = message.id, 0
        self._model = message.model or self._model

    def _assistant(self, line: Spoken) -> list[Told]:
        parent, message = line.parent_tool_use_id, line.message
        speaker = self._speakers.setdefault(parent, _Speaker())
        self.spoke = True
        told: list[Told] = []
        blocks = _blocks(message.content)
        if line.is_api_error_message:
            return [_note("api_error", " ".join(block.text for block in blocks))]
        self._enter(speaker, message)
        for block in blocks:
            name = f"{message.id}:{speaker.finished}"
            speaker.finished += 1
            if block.type == "text":
                told.append(("text", Text(block.text, name, parent)))
            elif block.type == "thinking":
                told.append(("thinking", Text(block.thinking, name, parent)))
            elif block.type.endswith("tool_use"):
                call = to_call(block.name, block.input, block.id, self._cwd, with_diff=True)
                told.append(("tool_call", ToolCallSeen(msgspec.to_builtins(call), parent)))
            elif block.type.endswith("tool_result"):
                told.append(self._tool_result(block, parent))
            else:
                told.append(_note("agent_note", f"The model sent a block of the kind {block.type!r}."))
        return told

    def _user(self, line: Spoken) -> list[Told]:
        return [
            self._tool_result(block, line.parent_tool_use_id)
            if block.type.endswith("tool_result")
            else _note("agent_note", block.text or f"A block of the kind {block.type!r} was added to the conversation.")
            for block in _blocks(line.message.content)
        ]

    def _tool_result(self, block: Block, parent: str | None) -> Told:
        digest = self._ran.pop(block.tool_use_id, None)
        return "tool_result", ToolResult(
            block.tool_use_id, _result_text(block.content), bool(block.is_error), digest, parent
        )

    def _system(self, line: dict[str, Any]) -> list[Told]:
        match line.get("subtype"):
            case "init":
                return self._init(line)
            case "status":
                if line.get("status") == "requesting":
                    self.awaits_model = True
                if mode := line.get("permissionMode"):
                    return [_note("agent_mode", f"Claude Code is in its mode {mode!r} now.")]
                if line.get("status") == "compacting":
                    return [_note("compacting", "The conversation is being shortened to fit the model.")]
            case "compact_boundary":
                return [_note("compacted", "The conversation was shortened; the model goes on from a summary.")]
            case "api_retry":
                status = line.get("error_status")
                self._refused = status if isinstance(status, int) else None
                return [_retry(line)]
            case "task_started":
                return [_note("subagent_started", str(line.get("description", "")))]
            case "task_notification":
                return [_note("subagent_ended", f"{line.get('status')}: {line.get('summary', '')}")]
            case "thinking_tokens" | "task_progress" | "task_updated" | "session_state_changed":
                pass
            case subtype:
                return [_note("agent_note", f"Claude Code says {subtype!r}.")]
        return []

    def _init(self, line: dict[str, Any]) -> list[Told]:
        """The CLI introduces itself with every turn; it is told when it says something new."""
        session = line.get("session_id")
        self.session = session if isinstance(session, str) else self.session
        names = {"model": "model", "version": "claude_code_version", "tools": "tools", "mcp_servers": "mcp_servers"}
        shown = {ours: line.get(theirs) for ours, theirs in names.items()}
        if shown == self._shown:
            return []
        self._shown = shown
        failed = [str(s.get("name")) for s in line.get("mcp_servers") or () if s.get("status") not in _MCP_FINE]
        told = [_note("agent_ready", f"Claude Code {shown['version']}, model {shown['model']}.", shown)]
        if failed:
            told.append(_note("mcp_failed", f"MCP servers that are not connected: {', '.join(failed)}."))
        return told


_MCP_FINE: Final = ("connected", "pending")


def _blocks(content: str | list[Block]) -> list[Block]:
    return [Block("text", text=content)] if isinstance(content, str) else content


def _note(word: str, message: str, details: dict[str, Any] | None = None) -> Told:
    return "notice", Notice(word, message[:_NOTE_LIMIT], details or {})


def _result_text(content: Any) -> str:
    """Join the texts of a tool result; what is no text is named."""
    if isinstance(content, str):
        return content
    parts = [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []
    return "\n".join(str(part.get("text", f"[{part.get('type')}]")) for part in parts)


def _request_usage(tokens: Tokens, model: str | None) -> UsageSeen:
    return UsageSeen(
        tokens.input_tokens or 0,
        tokens.output_tokens or 0,
        tokens.cache_read_input_tokens or 0,
        tokens.cache_creation_input_tokens or 0,
        model=model,
    )


def _retry(line: dict[str, Any]) -> Told:
    status, word = line.get("error_status"), line.get("error")
    what = f"status {status}" if status else "the connection failed"
    delay = line.get("retry_delay_ms")
    wait = f" in {delay / 1000:.1f} s" if isinstance(delay, int | float) else ""
    message = f"The model did not answer ({what}); attempt {line.get('attempt')} of {line.get('max_retries')}{wait}."
    return _note("retrying", message, {"status": status, "error": word})


def _rate_limit(line: dict[str, Any]) -> list[Told]:
    info = line.get("rate_limit_info")
    if not isinstance(info, dict) or info.get("status") == "allowed":
        return []
    return [_note("rate_limit", f"The provider's limit: {info.get('status')}.", info)]


# ---------------------------------------------------------------- the end of a turn


class Meter:
    """Turns the CLI's sums since its start into those of each turn."""

    def __init__(self, before: dict[str, ModelUsage] | None) -> None:
        """Begin with the sums of a conversation that goes on; None when they are not known."""
        self._before = before

    def turn(self, sums: dict[str, ModelUsage] | None) -> list[UsageSeen]:
        """Return what was used since the last call, by model; models without any are left out.

        Nothing is returned as long as it is not known from where to count: too little is better than twice.
        """
        known, self._before = self._before, {**(self._before or {}), **(sums or {})}
        if known is None:
            return []
        used = []
        for model, now in (sums or {}).items():
            before = known.get(model, ModelUsage())
            seen = UsageSeen(
                now.input_tokens - before.input_tokens,
                now.output_tokens - before.output_tokens,
                now.cache_read_input_tokens - before.cache_read_input_tokens,
                now.cache_creation_input_tokens - before.cache_creation_input_tokens,
                round(now.cost_usd - before.cost_usd, 9),
                model,
                total=True,
            )
            if seen.input_tokens or seen.output_tokens or seen.usd:
                used.append(seen)
        return used


def total(used: list[UsageSeen]) -> UsageSeen | None:
    """Return the sum over models, or None when nothing was used."""
    if not used:
        return None
    return UsageSeen(
        sum(u.input_tokens for u in used),
        sum(u.output_tokens for u in used),
        sum(u.cache_read_tokens for u in used),
        sum(u.cache_write_tokens for u in used),
        round(sum(u.usd or 0.0 for u in used), 9),
        used[0].model if len(used) == 1 else None,
        total=True,
    )


_BY_STATUS: Final = {
    401: ("auth_failed", "The provider refused the key. Look at it with `hutch key ls`, or add another one."),
    403: ("auth_failed", "The provider does not let this key do that."),
    429: ("rate_limited", "The provider's rate limit was reached. Wait a while, then submit the prompt again."),
    529: ("overloaded", "The provider is overloaded. Submit the prompt again in a moment."),
}
_BY_SUBTYPE: Final = {
    "error_max_turns": ("max_turns", "The agent used up the number of model requests allowed for a turn."),
    "error_max_budget_usd": ("max_usd", "The agent used up its budget."),
}


def ended(result: Result, usage: UsageSeen | None) -> TurnEnded:
    """Return how a turn ended by the CLI's own account of it."""
    state, (reason, message) = _verdict(result)
    told = "; ".join(result.errors or ()) or result.result or ""
    if state == "failed" and told:
        message = f"{message} ({told[:_NOTE_LIMIT]})"
    text = result.result if state == "completed" else None
    return TurnEnded(state, reason, message, text, usage, result.session_id)


def _verdict(result: Result) -> tuple[Any, tuple[str, str]]:
    if (result.terminal_reason or "").startswith("aborted"):
        return "stopped", ("interrupted", "The turn was stopped.")
    if not result.is_error and result.subtype == "success":
        return "completed", ("completed", "The agent has finished.")
    return "failed", failure(result)


def failure(result: Result) -> tuple[str, str]:
    """Return the word and the sentence for a turn that failed."""
    status = result.api_error_status
    if result.subtype in _BY_SUBTYPE:
        return _BY_SUBTYPE[result.subtype]
    if status in _BY_STATUS:
        return _BY_STATUS[status]
    if status is not None and status >= 500:
        return "provider_error", f"The provider failed (status {status}). Submit the prompt again in a moment."
    if status is not None and status >= 400:
        return "bad_request", f"The provider refused the request (status {status})."
    if "timeout" in (result.api_error or "") or "timed out" in (result.result or ""):
        return "stream_stalled", "The model's answer stopped coming."
    if result.api_error or result.terminal_reason == "api_error":
        return "stream_broken", "The connection to the model broke off."
    if any("No conversation found" in error for error in result.errors or ()):
        return "resume_unknown", "Claude Code does not know the conversation that was to go on, in this directory."
    return "agent_error", "The agent gave up."
