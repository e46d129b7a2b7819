"""A recap of a session's conversation, from its events, for an agent that did not keep the conversation.

It has the prompts, the answers and, in a line each, the tool calls since the conversation was last cleared; those of a
fork begin in the session from which it was forked. If it would be too long, its oldest parts are left out.
"""

from __future__ import annotations

import math
from typing import Any, Final

import msgspec

from hutch_daemon.store import events, sessions
from hutch_daemon.store.records import Executes
from hutch_daemon.store.rows import StoredEvent

__all__ = ["RECAP_LIMIT", "read_recap"]

RECAP_LIMIT: Final = 64 * 1024
"""Bytes of the longest recap."""
_EVENTS: Final = 20_000
"""The number of the newest events that are read."""
_PART_LIMIT: Final = 8_000
"""Characters of a prompt or an answer."""
_LINE_LIMIT: Final = 300
"""Characters of a line about a tool call."""
_SKIPPED: Final = ("text_delta", "thinking_delta", "thinking", "usage", "stderr", "notice")
_HEAD: Final = (
    "<earlier-conversation>\nYour program did not store the earlier conversation of this session. Below is what Hutch,"
    " which runs you, recorded of it, shortened. Go on from there; read files again before you rely on them.\n"
)
_TAIL: Final = "\n</earlier-conversation>"
_CUT: Final = "\n(Older parts are left out.)\n"


class _StoredBody(msgspec.Struct):
    data: dict[str, Any]


def read_recap(on: Executes, session: str) -> str:
    """Return the recap of a session, at most `RECAP_LIMIT` bytes. HutchError(NOT_FOUND) if the session does not exist.

    It contains what the events contain, in which known secrets are masked.
    """
    parts, cut = _parts(on, session)
    room = RECAP_LIMIT - len(f"{_HEAD}{_CUT}{_TAIL}".encode())
    chosen: list[str] = []
    for part in reversed(parts):
        room -= len(part.encode()) + 1
        if room < 0:
            cut = True
            break
        chosen.append(part)
    return f"{_HEAD}{_CUT if cut else ''}{chr(10).join(reversed(chosen))}{_TAIL}"


def _parts(on: Executes, session: str) -> tuple[list[str], bool]:
    """Return what the recap of a session says at most, oldest first, and whether older parts are left out.

    If the session is a fork, this includes what the other session had until then.
    """
    found: list[str] = []
    until = math.inf
    while sum(map(len, found)) < RECAP_LIMIT:
        row = sessions.get(on, session)
        parts, is_cut, is_cleared = _parts_until(on, session, until)
        found = [*parts, *found]
        if is_cut or is_cleared or row is None or row.forked_from is None:
            return found, is_cut
        if sessions.get(on, row.forked_from) is None:
            return found, True
        session, until = row.forked_from, min(until, row.created_at)
    return found, True


def _parts_until(on: Executes, session: str, until: float) -> tuple[list[str], bool, bool]:
    """Return what the events of one session until a time (ms) say, whether older ones are missing, and whether it was
    cleared."""
    kept = events.seq_range(on, session)
    after = max(kept.oldest - 1, kept.head - _EVENTS)
    parts: list[str] = []
    cut, cleared, more = after > 0, False, True
    while more:
        page = events.read(on, session, after, skip=_SKIPPED)
        for event in page.events:
            data = _data_of(event)
            if event.at > until:
                return parts, cut, cleared
            if event.kind == "turn_started" and data.get("kind") == "clear":
                parts, cut, cleared = [], False, True
            elif part := _part(event.kind, data):
                parts.append(part)
        after, more = page.cursor, page.more
    return parts, cut, cleared


def _data_of(event: StoredEvent) -> dict[str, Any]:
    try:
        return msgspec.json.decode(b"{%b}" % event.body, type=_StoredBody).data
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):  # an executor wrote it
        return {}


def _part(kind: str, data: dict[str, Any]) -> str:
    """Return what the recap says of an event, or ""."""
    match kind:
        case "turn_started":
            return f"\n## The user\n{_shortened(data.get('prompt'), _PART_LIMIT)}\n"
        case "text" if not data.get("parent"):
            return f"\n## You\n{_shortened(data.get('text'), _PART_LIMIT)}\n"
        case "tool_call" if not data.get("parent") and isinstance(call := data.get("call"), dict):
            what = next((call[name] for name in ("command", "url", "query") if call.get(name)), None)
            paths = call.get("paths")
            if what is None and isinstance(paths, list) and paths:
                what = ", ".join(map(str, paths))
            return f"- you used {call.get('agent_tool')}: {_line(what or call.get('description'))}"
        case "tool_result" if not data.get("parent"):
            return f"  {'which failed' if data.get('is_error') else 'which gave'}: {_line(data.get('text'))}"
        case "turn_ended" if data.get("state") != "completed":
            return f"\n(This turn ended: {data.get('state')}. {_line(data.get('message'))})\n"
    return ""


def _shortened(text: object, limit: int) -> str:
    """Return the beginning and the end of a text that is too long."""
    words = str(text or "").strip()
    if len(words) <= limit:
        return words
    return f"{words[: limit // 2]}\n(… {len(words) - limit:,} characters …)\n{words[-limit // 2 :]}"


def _line(text: object) -> str:
    words = " ".join(str(text or "nothing").split())
    return words if len(words) <= _LINE_LIMIT else f"{words[:_LINE_LIMIT]}…"
