"""Translates the Claude CLI's lines into events that are the same for every agent. Pure: lines in, events out.

With partial messages the CLI writes everything twice: as deltas while the model answers, then as one `assistant`
message for each finished block. Deltas and their whole text share a `block`: the model message's id and the block's
place in it. Lines without content for a reader (start and stop of blocks, pieces of a tool's input, progress counters)
become no event. A line of an unknown kind becomes a notice, so that nothing of a newer CLI is lost.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import msgspec

from hutch_executor.runners.claude.lines import (
    ANY_LINE,
    CONVERSATION_LINE,
    RESULT_LINE,
    STREAM_LINE,
    ContentBlock,
    ConversationLine,
    ModelMessage,
    ResultLine,
    StreamLine,
    UsageCount,
    kind_of_line,
)
from hutch_shared.events import EventKind, Notice, Text, ToolCallSeen, ToolResult, UsageSeen
from hutch_shared.vocabulary import to_call

__all__ = ["EventTranslator"]

Translated = tuple[EventKind, msgspec.Struct]

_NOTE_LIMIT: Final = 2000


@dataclass(slots=True)
class _Speaker:
    """The model message that the main agent or a sub-agent writes: its id, and the number of finished blocks."""

    message: str = ""
    finished: int = 0


class EventTranslator:
    """Translates one conversation, line by line. `ran` has the digest of the input that each call ran with, by call."""

    def __init__(self, cwd: str, ran: dict[str, str]) -> None:
        """Start a conversation; relative paths in tool calls start from `cwd`."""
        self._cwd = cwd
        self._ran = ran
        self._speakers: dict[str | None, _Speaker] = {}
        self._model: str | None = None
        self._shown: dict[str, Any] | None = None
        self.awaits_model = False
        """Whether the main agent waits for the model's answer or for the rest of it."""
        self._refused: int | None = None
        """The HTTP status with which the provider refused the current request."""
        self.spoke = False
        """Whether the model has answered; from then on the CLI has the conversation on disk."""
        self.session: str | None = None
        """The agent's own id of the conversation."""
        self.result: ResultLine | None = None
        """The line that ended the turn; its reader resets it."""

    def __repr__(self) -> str:
        return f"<EventTranslator {self.session or 'new'}{', awaits the model' if self.awaits_model else ''}>"

    def translate(self, line: bytes) -> list[Translated]:
        """Return the events of one line. One of `UNREADABLE` if the line does not have the shape of its kind."""
        match kind_of_line(line):
            case "stream_event":
                return self._stream(STREAM_LINE.decode(line))
            case "assistant":
                return self._assistant(CONVERSATION_LINE.decode(line))
            case "user":
                return self._user(CONVERSATION_LINE.decode(line))
            case "result":
                self.result = RESULT_LINE.decode(line)
                self.awaits_model = False
                return []
            case "system":
                return self._system(ANY_LINE.decode(line))
            case "command_lifecycle":  # what the CLI does with the prompt that it got
                return []
            case "rate_limit_event":
                return _rate_limit(ANY_LINE.decode(line))
            case kind:
                return [_note("agent_note", f"Claude Code sent a message of the kind {kind!r}.")]

    def awaited(self) -> ResultLine:
        """Return the result line that the CLI would write if it gave up waiting for the model now."""
        return ResultLine("success", is_error=True, api_error_status=self._refused, api_error="timeout")

    def _stream(self, line: StreamLine) -> list[Translated]:
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

    def _enter(self, speaker: _Speaker, message: ModelMessage) -> None:
        if speaker.message != message.id:
            speaker.message, speaker.finished = message.id, 0
        self._model = message.model or self._model

    def _assistant(self, line: ConversationLine) -> list[Translated]:
        parent, message = line.parent_tool_use_id, line.message
        speaker = self._speakers.setdefault(parent, _Speaker())
        self.spoke = True
        events: list[Translated] = []
        blocks = _blocks(message.content)
        if line.is_api_error_message:
            return [_note("api_error", " ".join(block.text for block in blocks))]
        self._enter(speaker, message)
        for block in blocks:
            name = f"{message.id}:{speaker.finished}"
            speaker.finished += 1
            if block.type == "text":
                events.append(("text", Text(block.text, name, parent)))
            elif block.type == "thinking":
                events.append(("thinking", Text(block.thinking, name, parent)))
            elif block.type.endswith("tool_use"):
                call = to_call(block.name, block.input, block.id, self._cwd, with_diff=True)
                events.append(("tool_call", ToolCallSeen(msgspec.to_builtins(call), parent)))
            elif block.type.endswith("tool_result"):
                events.append(self._tool_result(block, parent))
            else:
                events.append(_note("agent_note", f"The model sent a block of the kind {block.type!r}."))
        return events

    def _user(self, line: ConversationLine) -> list[Translated]:
        return [
            self._tool_result(block, line.parent_tool_use_id)
            if block.type.endswith("tool_result")
            else _note("agent_note", block.text or f"A block of the kind {block.type!r} was added to the conversation.")
            for block in _blocks(line.message.content)
        ]

    def _tool_result(self, block: ContentBlock, parent: str | None) -> Translated:
        digest = self._ran.pop(block.tool_use_id, None)
        return "tool_result", ToolResult(
            block.tool_use_id, _result_text(block.content), bool(block.is_error), digest, parent
        )

    def _system(self, line: dict[str, Any]) -> list[Translated]:
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

    def _init(self, line: dict[str, Any]) -> list[Translated]:
        """The CLI introduces itself in every turn; report it when something changed."""
        session = line.get("session_id")
        self.session = session if isinstance(session, str) else self.session
        names = {"model": "model", "version": "claude_code_version", "tools": "tools", "mcp_servers": "mcp_servers"}
        shown = {ours: line.get(theirs) for ours, theirs in names.items()}
        if shown == self._shown:
            return []
        self._shown = shown
        servers = line.get("mcp_servers")
        known = [one for one in servers if isinstance(one, dict)] if isinstance(servers, list) else []
        failed = [str(one.get("name")) for one in known if one.get("status") not in _MCP_FINE]
        events = [_note("agent_ready", f"Claude Code {shown['version']}, model {shown['model']}.", shown)]
        if failed:
            events.append(_note("mcp_failed", f"MCP servers that are not connected: {', '.join(failed)}."))
        return events


_MCP_FINE: Final = ("connected", "pending")


def _blocks(content: str | list[ContentBlock]) -> list[ContentBlock]:
    return [ContentBlock("text", text=content)] if isinstance(content, str) else content


def _note(word: str, message: str, details: dict[str, Any] | None = None) -> Translated:
    return "notice", Notice(word, message[:_NOTE_LIMIT], details or {})


def _result_text(content: Any) -> str:
    """Join the texts of a tool result; name every other part by its type."""
    if isinstance(content, str):
        return content
    parts = [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []
    return "\n".join(str(part.get("text", f"[{part.get('type')}]")) for part in parts)


def _request_usage(tokens: UsageCount, model: str | None) -> UsageSeen:
    return UsageSeen(
        tokens.input_tokens or 0,
        tokens.output_tokens or 0,
        tokens.cache_read_input_tokens or 0,
        tokens.cache_creation_input_tokens or 0,
        model=model,
    )


def _retry(line: dict[str, Any]) -> Translated:
    status, word = line.get("error_status"), line.get("error")
    what = f"status {status}" if status else "the connection failed"
    delay = line.get("retry_delay_ms")
    wait = f" in {delay / 1000:.1f} s" if isinstance(delay, int | float) else ""
    message = f"The model did not answer ({what}); attempt {line.get('attempt')} of {line.get('max_retries')}{wait}."
    return _note("retrying", message, {"status": status, "error": word})


def _rate_limit(line: dict[str, Any]) -> list[Translated]:
    info = line.get("rate_limit_info")
    if not isinstance(info, dict) or info.get("status") == "allowed":
        return []
    return [_note("rate_limit", f"The provider's limit: {info.get('status')}.", info)]
