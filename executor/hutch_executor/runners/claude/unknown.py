"""The lines of the CLI that Hutch does not know: each kind is reported once, with its content, and counted. Pure."""

from __future__ import annotations

from collections import Counter
from typing import Any, Final

import msgspec

from hutch_shared.events import EventKind, Notice
from hutch_shared.text import valid_text

__all__ = ["UnknownLines", "bounded"]

_KINDS: Final = 20
"""The kinds that are reported by name; all others share one name, so that a hostile agent cannot fill the record."""
_OTHERS: Final = "other kinds"
_UNREADABLE: Final = "not readable"
_NAME_LIMIT: Final = 100
_CONTENT_LIMIT: Final = 1000
"""Characters of a line that a notice shows."""


class UnknownLines:
    """Counts unknown lines by kind, for one session."""

    def __init__(self) -> None:
        """Start with no line."""
        self._seen: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"<UnknownLines {dict(self._seen)}>"

    def note(self, kind: str, line: dict[str, Any]) -> list[tuple[EventKind, msgspec.Struct]]:
        """Count a line of an unknown kind; return its notice if it is the first of its kind."""
        kind = valid_text(kind)[:_NAME_LIMIT]
        return self._count(kind, f"Claude Code sent a message that Hutch does not know: {kind!r}.", _beginning(line))

    def unreadable(self, why: str, line: bytes) -> list[tuple[EventKind, msgspec.Struct]]:
        """Count a line that is not a message; return its notice if it is the first one."""
        text = line[:_CONTENT_LIMIT].decode(errors="replace")
        message = f"Claude Code wrote something that is not a message: {valid_text(why)[:_NAME_LIMIT]}."
        return self._count(_UNREADABLE, message, text)

    def _count(self, kind: str, message: str, content: str) -> list[tuple[EventKind, msgspec.Struct]]:
        if kind not in self._seen and len(self._seen) >= _KINDS:
            kind = _OTHERS
        self._seen[kind] += 1
        if self._seen[kind] > 1:
            return []
        return [("notice", Notice("agent_note", message, {"kind": kind, "content": content}))]

    def summary(self) -> Notice | None:
        """Return how often the kinds came that came more than once; None if there are none. Starts counting again."""
        again = {kind: count for kind, count in self._seen.most_common() if count > 1}
        if not again:
            return None
        for kind in again:
            self._seen[kind] = 1
        counts = ", ".join(f"{kind!r} {count} times" for kind, count in again.items())
        return Notice("agent_note", f"Claude Code sent messages that Hutch does not know: {counts}.", {"counts": again})


def bounded(value: dict[str, Any]) -> dict[str, Any]:
    """Return `value` for the details of a notice; its beginning as text if it is long or has no JSON form."""
    text = _beginning(value, _CONTENT_LIMIT + 1)
    return value if len(text) <= _CONTENT_LIMIT else {"content": text[:_CONTENT_LIMIT]}


def _beginning(value: dict[str, Any], limit: int = _CONTENT_LIMIT) -> str:
    try:
        return msgspec.json.encode(value).decode()[:limit]
    except (ValueError, TypeError, RecursionError, OverflowError):
        return valid_text(repr(value))[:limit]
