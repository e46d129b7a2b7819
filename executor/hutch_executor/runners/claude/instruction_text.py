"""What Claude Code's instruction files mean: imports, and the files that a rule applies to. Pure."""

from __future__ import annotations

import re
from typing import Final

__all__ = ["imports_of", "rule_of"]

_FENCE: Final = re.compile(r" {0,3}(`{3,}|~{3,})")
_MARKS: Final = re.compile("`+")
_IMPORT: Final = re.compile(r"(?:^|(?<=\s))@((?:\\ |[^\s\\])+)", re.MULTILINE)
_BEGINS: Final = re.compile(r"\./|\.\./|~/|/.|[A-Za-z0-9._-]")
_HEAD: Final = re.compile(r"\A---[ \t]*\r?\n(.*?)^---[ \t]*(?:\r?\n|\Z)", re.DOTALL | re.MULTILINE)
_PATHS: Final = re.compile(r"^paths[ \t]*:[ \t]*(.*)((?:\n[ \t]*-[ \t].*)*)", re.MULTILINE)
_AT_END: Final = ".,;:!?)]}\"'"


def imports_of(text: str) -> list[str]:
    """Return the paths that a file imports with `@path`, in their order, each once. Code is not searched."""
    found = (one[1].replace("\\ ", " ").partition("#")[0] for one in _IMPORT.finditer(_without_code(text)))
    return list(dict.fromkeys(path.rstrip(_AT_END) for path in found if _BEGINS.match(path) and path.rstrip(_AT_END)))


def _without_code(text: str) -> str:
    lines: list[str] = []
    fence = ""
    for line in text.splitlines():
        mark = _FENCE.match(line)
        if fence:
            if mark and mark[1].startswith(fence):
                fence = ""
        elif mark:
            fence = mark[1]
        else:
            lines.append(line)
    return _without_spans("\n".join(lines))


def _without_spans(text: str) -> str:
    """Return the text without its code spans: from some backticks to the next as many. Takes linear time."""
    marks = [(one.start(), one.end()) for one in _MARKS.finditer(text)]
    later: dict[int, list[int]] = {}
    for number in range(len(marks) - 1, -1, -1):
        begin, end = marks[number]
        later.setdefault(end - begin, []).append(number)
    kept, at, number = [], 0, 0
    while number < len(marks):
        begin, end = marks[number]
        same = later[end - begin]
        while same and same[-1] <= number:
            same.pop()
        if same:
            kept.append(text[at:begin])
            number = same.pop()
            at = marks[number][1]
        number += 1
    return " ".join([*kept, text[at:]])


def rule_of(text: str) -> tuple[tuple[str, ...], str]:
    """Return the patterns of the files that a rule applies to, and its text without the head. None: all files."""
    head = _HEAD.match(text)
    if head is None:
        return (), text
    found = _PATHS.search(head[1])
    if found is None:
        return (), text[head.end() :]
    inline = found[1].strip().removeprefix("[").removesuffix("]")
    listed = [line.strip()[1:] for line in found[2].splitlines() if line.strip()]
    patterns = [*_split(inline), *listed]
    return tuple(one.strip().strip("\"'") for one in patterns if one.strip().strip("\"'")), text[head.end() :]


def _split(inline: str) -> list[str]:
    """Split at commas, except those in braces."""
    parts, depth = [""], 0
    for char in inline:
        depth += (char == "{") - (char == "}")
        if char == "," and depth <= 0:
            parts.append("")
        else:
            parts[-1] += char
    return parts
