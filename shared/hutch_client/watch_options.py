"""The options of watching a session: what to print, and whether to ask the user."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from typing import Final, Literal

import msgspec

from hutch_client.console import Console
from hutch_client.streams import columns
from hutch_client.untrusted import escaped_json
from hutch_shared.events import KINDS, Event

__all__ = ["WatchOptions", "json_line"]

_NEEDED: Final = ("permission_asked", "permission_settled", "turn_ended")
_DELTAS: Final = ("text_delta", "thinking_delta")


@dataclass(frozen=True, slots=True)
class WatchOptions:
    """How to watch a session."""

    output: str = "text"
    """`text`, `jsonl` (the events) or `json` (the watch prints nothing; its caller prints the result)."""
    questions: Literal["inline", "tell", "refuse"] = "inline"
    """Ask the user here; print the command that answers; or end the watch with exit code 5."""
    prompts: bool = True

    @property
    def interactive(self) -> bool:
        """Whether the user is asked in this terminal."""
        return self.questions == "inline" and self.output == "text" and sys.stdin.isatty() and sys.stderr.isatty()

    @property
    def skip(self) -> tuple[str, ...]:
        """The kinds of events that are not needed."""
        if self.interactive:
            return ()  # the last event of the history triggers the pending requests, so no kind may be skipped
        if self.output == "json":
            return tuple(kind for kind in KINDS if kind not in _NEEDED)
        return () if self.output == "jsonl" or sys.stdout.isatty() else _DELTAS

    def console(self) -> Console:
        """Return a console that fits the output streams."""
        colour = sys.stderr.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
        width = columns(2) - 8 if sys.stderr.isatty() else 100
        return Console(colour=colour, live=sys.stdout.isatty(), prompts=self.prompts, width=max(width, 20))


def json_line(event: Event) -> str:
    """Return an event as one JSON line that is safe to print."""
    line = escaped_json(msgspec.json.encode(msgspec.structs.replace(event, follow=None)).decode())
    if line.isascii() or (sys.stdout.encoding or "utf-8").lower().replace("-", "") == "utf8":
        return line
    return json.dumps(json.loads(line))  # another encoding may lack a character; ASCII escapes keep all
