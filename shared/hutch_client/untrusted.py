"""Makes untrusted text safe to print: agents, repositories and web pages must not control the terminal.

What is always true: the result has no control character except newline and tab, and no character that changes the
writing direction. `plain` removes whole escape sequences from prose. `visible` keeps everything and shows control
characters as escapes: it is for text that a user decides about, in which nothing may be hidden.
"""

from __future__ import annotations

import re

__all__ = ["escaped_json", "one_line", "plain", "visible"]

_SEQUENCE = re.compile(
    "(?:\x1b\\[|\x9b)[0-?]*[ -/]*[@-~]"  # CSI: colours, movement, modes
    "|(?:\x1b[]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x9c\n]*(?:\x07|\x1b\\\\|\x9c)"  # OSC, DCS, APC …, if terminated
    "|\x1b[ -/]*[0-~]?"
)
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_BLANKS = re.compile(r"\s+")


def plain(text: str) -> str:
    """Return `text` without escape sequences, control characters (but newline and tab) and direction marks."""
    return _CONTROL.sub("", _SEQUENCE.sub("", text))


def visible(text: str) -> str:
    r"""Return `text` with control characters and direction marks written as escapes, such as `\x1b`."""
    return _CONTROL.sub(lambda found: found.group().encode("unicode_escape").decode(), text)


def one_line(text: str, width: int = 0) -> str:
    """Return `text` on one line, nothing hidden, cut to `width` characters (0: whole) with an ellipsis."""
    line = visible(_BLANKS.sub(" ", text)).strip()
    return line[: width - 1] + "…" if width and len(line) > width else line


def escaped_json(text: str) -> str:
    """Return a JSON text with such characters written as escapes: the same value, harmless on a terminal."""
    return _CONTROL.sub(lambda found: f"\\u{ord(found.group()):04x}", text)
