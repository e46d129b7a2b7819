"""Translates the Claude CLI's lines into events that are the same for every agent. Pure: lines in, events out.

With partial messages the CLI writes everything twice: as deltas while the model answers, then as one `assistant`
message for each finished block. Deltas and their whole text share a `block`: the model message's id and the block's
place in it. Lines without content for a reader (start and stop of blocks, pieces of a tool's input, progress counters)
become no event.

Any line may be odd, since models, gateways and MCP servers write parts of it. So translation never fails:

- A line that strict decoders refuse is read again without them: invalid text becomes U+FFFD, and a field of another
  type counts as missing. The halves of one character in two deltas are joined first.
- A line of an unknown kind, or one that cannot be read, becomes a notice with its beginning; see `UnknownLines`.
- The kind of a line alone decides that it is the `result` that ends the turn.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from hutch_executor.runners.claude.lines import (
    ANY_LINE,
    CONVERSATION_LINE,
    RESULT_LINE,
    STREAM_LINE,
    UNREADABLE,
    ContentBlock,
    ConversationLine,
    ModelMessage,
    ResultLine,
    StreamLine,
    UsageCount,
    kind_by_scan,
    kind_of_line,
    lax_line,
    mended,
)
from hutch_executor.runners.claude.unknown import UnknownLines, bounded
from hutch_shared.events import EventKind, Notice, Text, ToolCallSeen, ToolResult, UsageSeen
from hutch_shared.text import split_surrogate, valid_text, valid_value
from hutch_shared.vocabulary import to_call

__all__ = ["EventTranslator"]

Translated = tuple[EventKind, msgspec.Struct]

_NOTE_LIMIT: Final = 2000
_NO_SUMMARY: Final = "Claude Code wrote no summary."
_SYNTHETIC: Final = "<synthetic>"
"""The model that the CLI names in an answer of its own."""
_OURS: Final = frozenset({"human", "person", "composer", "auto-continuation"})
"""The origins of a `result` that ends a turn of ours. Others: peer, task-notification, plugin, channel, …"""
_PROGRESS: Final = frozenset(
    {
        *("tool_progress", "keep_alive", "command_lifecycle", "transcript_mirror"),
        *("thinking_tokens", "task_progress", "task_updated", "task_summary", "session_state_changed", "hook_progress"),
        *("control_request_progress", "background_tasks_changed", "turn_duration", "commands_changed", "turn_starting"),
    }
)
"""Kinds of lines, and of `system` lines, that only say that something goes on."""
_WITH_CONTENT: Final = frozenset({"informational", "notification", "instruction_size_warning", "api_error"})
"""Kinds of `system` lines that the CLI writes for a person to read."""


@dataclass(slots=True)
class _Speaker:
    """The model message that the main agent or a sub-agent writes: its id, and the number of finished blocks.

    `held` is the first half of a character at the end of a delta, with the delta's kind and block.
    """

    message: str = ""
    finished: int = 0
    held: tuple[EventKind, str, str] | None = None


class EventTranslator:
    """Translates one conversation, line by line. `ran` has the digest of the input that each call ran with, by call."""

    def __init__(
        self, cwd: str, ran: dict[str, str], servers: Iterable[str] = (), unknown: UnknownLines | None = None
    ) -> None:
        """Start a conversation; relative paths in tool calls start from `cwd`, `servers` are its MCP servers.

        `unknown` counts lines over the CLIs of a session.
        """
        self._cwd = cwd
        self._servers = tuple(servers)
        self._ran = ran
        self._speakers: dict[str | None, _Speaker] = {}
        self._model: str | None = None
        self._shown: dict[str, Any] | None = None
        self.awaits_model = False
        """Whether the main agent waits for the model's answer or for the rest of it."""
        self.compacts = False
        """Whether the CLI shortens the conversation; its model request writes no lines."""
        self.summary_lost = False
        """Whether it asked the model in this turn for a summary and got none, a request that its sums may leave out."""
        self.open_calls: set[str] = set()
        """The tool calls that have no result yet."""
        self.asked = False
        """Whether a model was asked in this turn."""
        self._refused: int | None = None
        """The HTTP status with which the provider refused the current request."""
        self.spoke = False
        """Whether the model has answered; from then on the CLI has the conversation on disk."""
        self.session: str | None = None
        """The agent's own id of the conversation."""
        self.message_socket: str | None = None
        """The socket over which the CLI says that it takes messages from other processes."""
        self.mode: str | None = None
        """The agent's mode, as the CLI reported it last."""
        self.compact_error: str | None = _NO_SUMMARY
        """The reason why this turn did not compact the conversation; None after a success."""
        self._summary_follows = False
        """Whether the next line of the user is the summary that the CLI wrote."""
        self.started_prompt: str | None = None
        """The uuid of the last prompt that the CLI began in this turn."""
        self.dropped_prompt: str | None = None
        """The uuid of the last prompt that the CLI dropped, since the conversation contains it; no result follows."""
        self.result: ResultLine | None = None
        """The line that ended this turn."""
        self._ended_by: str | None = None
        """The id of the last such line, until another line shows that the CLI has gone on."""
        self.unknown = unknown or UnknownLines()

    def __repr__(self) -> str:
        return f"<EventTranslator {self.session or 'new'}{', awaits the model' if self.awaits_model else ''}>"

    @property
    def in_flight(self) -> bool:
        """Whether the CLI has a reason to be silent: a model request, or a tool call without a result."""
        return self.awaits_model or self.compacts or bool(self.open_calls)

    def begin_turn(self) -> None:
        """Forget what only the last turn needs. Call it after its last line and before the first one of the new turn.

        What the CLI has under way, and what a line says about the next one, stays.
        """
        self.asked = self.summary_lost = False
        self.compact_error = _NO_SUMMARY
        self.started_prompt = self.result = None

    def translate(self, line: bytes) -> list[Translated]:
        """Return the events of one line; see the module."""
        try:
            return self._read(line)
        except UNREADABLE:
            pass
        try:
            return self._mend(*lax_line(line))
        except UNREADABLE as error:
            if kind_by_scan(line) == "result":
                self.end(ResultLine())
            return self.unknown.unreadable(str(error), line)

    def _read(self, line: bytes) -> list[Translated]:
        match kind_of_line(line):
            case "stream_event":
                return self._stream(STREAM_LINE.decode(line))
            case "assistant":
                return self._assistant(CONVERSATION_LINE.decode(line))
            case "user":
                return self._user(CONVERSATION_LINE.decode(line))
            case "result":
                self.end(RESULT_LINE.decode(line))
                return []
            case "command_lifecycle":
                self._follow_prompt(ANY_LINE.decode(line))
                return []
            case kind:
                return self._other(kind, ANY_LINE.decode(line))

    def _mend(self, kind: str, line: dict[str, Any]) -> list[Translated]:
        """Translate a line that a strict decoder refuses."""
        if kind == "stream_event" and isinstance(line.get("event"), dict):  # half a character stays as it is
            return self._stream(mended(StreamLine, line))
        line = valid_value(line)
        match kind:
            case "assistant" | "user":
                conversation = mended(ConversationLine, line)
                events = self._assistant(conversation) if kind == "assistant" else self._user(conversation)
                return events or self.unknown.note(f"{kind} without content", line)
            case "result":
                self.end(mended(ResultLine, line))
                return []
            case _:
                return self._other(kind, line)

    def _other(self, kind: str, line: dict[str, Any]) -> list[Translated]:
        match kind:
            case "system":
                return self._system(line)
            case "rate_limit_event":
                return _rate_limit(line)
            case "conversation_reset":
                return []  # the next `init` names the new conversation
            case _ if kind in _PROGRESS:
                return []
            case _:
                return self.unknown.note(kind, line)

    def end(self, result: ResultLine) -> None:
        """Take the line that ends the turn. Leave out the end of a turn that is not ours, and a line sent again."""
        origin = (result.origin or {}).get("kind")
        if (isinstance(origin, str) and origin not in _OURS) or (result.uuid and result.uuid == self._ended_by):
            return
        self.result, self._ended_by = result, result.uuid
        self.awaits_model = self.compacts = False
        self.open_calls.clear()

    def _follow_prompt(self, line: dict[str, Any]) -> None:
        """Follow what the CLI does with a prompt that it got."""
        uuid, state = line.get("command_uuid"), line.get("state")
        if not isinstance(uuid, str):
            return
        if state == "started":
            self.started_prompt = uuid
        elif state == "completed" and uuid != self.started_prompt:
            self.dropped_prompt = uuid

    def awaited(self) -> ResultLine:
        """Return the result line that the CLI would write if it gave up waiting for the model now."""
        return ResultLine("success", is_error=True, api_error_status=self._refused, api_error="timeout")

    def _stream(self, line: StreamLine) -> list[Translated]:
        event, parent = line.event, line.parent_tool_use_id
        self.asked, self._ended_by = True, None
        speaker = self._speakers.setdefault(parent, _Speaker())
        if event.type == "content_block_delta" and event.delta is not None:
            block = f"{speaker.message}:{event.index}"
            if event.delta.type == "text_delta":
                return self._delta(speaker, "text_delta", event.delta.text, block, parent)
            if event.delta.type == "thinking_delta":
                return self._delta(speaker, "thinking_delta", event.delta.thinking, block, parent)
            return []
        events = _flush(speaker, parent) if speaker.held else []
        if event.type == "message_start" and event.message is not None:
            self._enter(speaker, event.message)
            self._refused = None
            self.awaits_model = parent is None or self.awaits_model
        elif event.type == "message_delta" and event.usage is not None:
            events.append(("usage", _request_usage(event.usage, self._model)))
        elif event.type == "message_stop" and parent is None:
            self.awaits_model = False
        return events

    def _delta(self, speaker: _Speaker, kind: EventKind, text: str, block: str, parent: str | None) -> list[Translated]:
        """Return the delta as an event; half a character at its end waits for the next delta of its block."""
        events: list[Translated] = []
        if speaker.held is not None:
            if speaker.held[:2] == (kind, block):
                text = speaker.held[2] + text
            else:
                events = _flush(speaker, parent)
            speaker.held = None
        if text.isascii():
            return [*events, (kind, Text(text, block, parent))]
        text, half = split_surrogate(text)
        if half:
            speaker.held = (kind, block, half)
        if text or not half:
            events.append((kind, Text(valid_text(text), block, parent)))
        return events

    def _enter(self, speaker: _Speaker, message: ModelMessage) -> None:
        if speaker.message != message.id:
            speaker.message, speaker.finished = valid_text(message.id), 0
        self._model = valid_text(message.model) if message.model else self._model

    def _assistant(self, line: ConversationLine) -> list[Translated]:
        parent, message = line.parent_tool_use_id, line.message
        speaker = self._speakers.setdefault(parent, _Speaker())
        self.spoke, self._ended_by = True, None
        self.asked = self.asked or message.model != _SYNTHETIC
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
                self.open_calls.add(block.id)
                call = to_call(block.name, block.input, block.id, self._cwd, servers=self._servers, with_diff=True)
                events.append(("tool_call", ToolCallSeen(msgspec.to_builtins(call), parent)))
            elif block.type.endswith("tool_result"):
                events.append(self._tool_result(block, parent))
            else:
                events += self.unknown.note(f"content block {block.type}", msgspec.to_builtins(block))
        return events

    def _user(self, line: ConversationLine) -> list[Translated]:
        events: list[Translated] = []
        if line.is_replay:
            return events
        for block in _blocks(line.message.content):
            if block.type.endswith("tool_result"):
                events.append(self._tool_result(block, line.parent_tool_use_id))
            elif block.text and self._summary_follows:
                size = f"{len(block.text):,} characters"
                message = f"The summary has {size}; the event's details contain its beginning."
                events.append(_note("compact_summary", message, {"text": block.text[:_NOTE_LIMIT]}))
            elif block.text:
                events.append(_note("agent_note", block.text))
            else:
                events += self.unknown.note(f"content block {block.type}", msgspec.to_builtins(block))
        self._summary_follows = False
        return events

    def _tool_result(self, block: ContentBlock, parent: str | None) -> Translated:
        digest = self._ran.pop(block.tool_use_id, None)
        self.open_calls.discard(block.tool_use_id)
        return "tool_result", ToolResult(
            block.tool_use_id, _result_text(block.content), bool(block.is_error), digest, parent
        )

    def _system(self, line: dict[str, Any]) -> list[Translated]:
        match line.get("subtype"):
            case "init":
                self._ended_by = None
                self._note_mode(line)
                return self._init(line)
            case "status":
                status = line.get("status")
                self.awaits_model = self.awaits_model or status == "requesting"
                self.asked = self.asked or status == "requesting"
                self.compacts = status == "compacting"
                self.summary_lost = self.summary_lost or self.compacts
                self._note_mode(line)
                if (outcome := line.get("compact_result")) is not None:
                    self.compact_error = None if outcome == "success" else str(line.get("compact_error") or outcome)
                    self.summary_lost = self.summary_lost and outcome != "success"
                if self.compacts:
                    return [_note("compacting", "The conversation is being shortened to fit the model.")]
            case "compact_boundary":
                self.compacts, self._summary_follows = False, True
                return [_note("compacted", "The conversation was shortened; the model goes on from a summary.")]
            case "api_retry":
                status = line.get("error_status")
                self._refused = status if isinstance(status, int) and 0 < status < 1000 else None
                return [_retry(line)]
            case "task_started":
                return [_note("subagent_started", str(line.get("description", "")))]
            case "task_notification":
                return [_note("subagent_ended", f"{line.get('status')}: {line.get('summary', '')}")]
            case str(subtype) if subtype in _PROGRESS:
                pass
            case str(subtype) if subtype in _WITH_CONTENT:
                return [_for_reader(line)]
            case subtype:
                return self.unknown.note(f"system {subtype}", line)
        return []

    def _note_mode(self, line: dict[str, Any]) -> None:
        mode = line.get("permissionMode")
        self.mode = mode if isinstance(mode, str) else self.mode

    def _init(self, line: dict[str, Any]) -> list[Translated]:
        """The CLI introduces itself in every turn; report it when something changed."""
        session = line.get("session_id")
        self.session = session if isinstance(session, str) else self.session
        named = line.get("messaging_socket_path")
        self.message_socket = named if isinstance(named, str) and named else self.message_socket
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


_LONGEST_DELAY: Final = 1e9
"""Milliseconds of a pause that is worth showing."""
_MCP_FINE: Final = ("connected", "pending")


def _blocks(content: str | list[ContentBlock]) -> list[ContentBlock]:
    return [ContentBlock("text", text=content)] if isinstance(content, str) else content


def _flush(speaker: _Speaker, parent: str | None) -> list[Translated]:
    """Return the half of a character that waited in vain, as a delta."""
    if speaker.held is None:
        return []
    (kind, block, half), speaker.held = speaker.held, None
    return [(kind, Text(valid_text(half), block, parent))]


_TEXTS: Final = ("content", "text", "message", "error")
_LABELS: Final = ("subtype", "level", "tag", "key")


def _for_reader(line: dict[str, Any]) -> Translated:
    """Return what the CLI wrote for a person, with its level."""
    content = next((text for name in _TEXTS if isinstance(text := line.get(name), str)), "")
    details = {name: text[:100] for name in _LABELS if isinstance(text := line.get(name), str)}
    return _note("agent_note", content or f"Claude Code says {line.get('subtype')!r}.", details)


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
    wait = f" in {delay / 1000:.1f} s" if isinstance(delay, int | float) and abs(delay) < _LONGEST_DELAY else ""
    message = f"The model did not answer ({what}); attempt {line.get('attempt')} of {line.get('max_retries')}{wait}."
    return _note("retrying", message, {"status": status, "error": word})


def _rate_limit(line: dict[str, Any]) -> list[Translated]:
    info = line.get("rate_limit_info")
    if not isinstance(info, dict) or info.get("status") == "allowed":
        return []
    return [_note("rate_limit", f"The provider's limit: {info.get('status')}.", bounded(info))]
