"""Records as tables for users. Columns are as wide as needed; untrusted text stays on one line."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

from hutch_client.untrusted import one_line

__all__ = [
    "ago",
    "cost_remarks",
    "count",
    "counted_words",
    "fields",
    "print_json",
    "print_lines",
    "prompt_words",
    "table",
    "usage_words",
]

_UNITS = ((86400, "d"), (3600, "h"), (60, "min"))


def table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return the lines of a table, without trailing blanks. Each cell is one line."""
    cells = [list(heads), *([one_line(str(cell)) for cell in row] for row in rows)]
    widths = [max(len(line[at]) for line in cells) for at in range(len(heads) - 1)]
    return "\n".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(line, widths, strict=False)), line[-1]]).rstrip()
        for line in cells
    )


def fields(pairs: Iterable[tuple[str, object]]) -> str:
    """Return `name  value` lines; pairs with an empty value or None are left out."""
    kept = [(name, one_line(str(value))) for name, value in pairs if value not in (None, "", ())]
    width = max((len(name) for name, _ in kept), default=0)
    return "\n".join(f"{name.ljust(width)}  {value}" for name, value in kept)


def ago(at: str | None, now: float) -> str:
    """Return how long before `now` (seconds since 1970) the RFC 3339 time `at` was: `12 s`, `5 min`, `3 d`."""
    if not at:
        return ""
    seconds = max(0, int(now - datetime.fromisoformat(at).astimezone(UTC).timestamp()))
    for size, unit in _UNITS:
        if seconds >= size:
            return f"{seconds // size} {unit}"
    return f"{seconds} s"


def count(number: int, noun: str) -> str:
    """Return `1 turn`, `2 turns`, `2 processes`."""
    plural = "es" if noun.endswith("s") else "s"
    return f"{number:,} {noun}{'' if number == 1 else plural}"


def prompt_words(prompt: str, kind: str) -> str:
    """Return a turn's prompt; before it, in brackets, what the turn does if it runs no prompt."""
    return prompt if kind == "prompt" else f"[{kind}] {prompt}".rstrip()


def usage_words(usage: dict[str, Any] | None) -> str:
    """Return a `UsageSeen` as `1,234 tokens in, 56 out, $0.0123`; cached input counts as input.

    Unknown dollars are `cost unknown`.
    """
    if not usage:
        return ""
    taken = sum(usage.get(name, 0) for name in ("input_tokens", "cache_read_tokens", "cache_write_tokens"))
    words = f"{taken:,} tokens in, {usage.get('output_tokens', 0):,} out"
    usd = usage.get("usd")
    return f"{words}, cost unknown" if usd is None else f"{words}, ${usd:.4f}"


def cost_remarks(line: dict[str, Any]) -> list[str]:
    """Return why dollars of a `UsageLine` are unknown, for how many requests or turns, and its web searches."""
    remarks, broker = [], line.get("broker")
    if unknown := line.get("unknown", 0):
        what = f"{unknown} of {line.get('requests', 0)} requests" if broker else f"{unknown} turns"
        rest = (broker or line["usage"]).get("usd") or 0.0
        remarks.append(f"{line.get('why_unknown', '').rstrip('.') or 'no price'} ({what}; the others ${rest:.4f})")
    if searches := line.get("searches", 0):
        remarks.append(f"{searches} web searches")
    return remarks


def counted_words(line: dict[str, Any] | None) -> str:
    """Return what the broker counted in a `UsageLine`, with the reason if dollars are unknown; "" without a count."""
    if line is None or line.get("broker") is None:
        return ""
    usage = dict(line["broker"])
    if line.get("unknown"):
        usage.pop("usd", None)
    return "; ".join([usage_words(usage) or "nothing", *cost_remarks(line)])


def print_json(value: object) -> None:
    """Print one JSON value on standard output, indented on a terminal."""
    print(json.dumps(value, indent=2 if sys.stdout.isatty() else None))


def print_lines(values: Iterable[object]) -> None:
    """Print JSON lines on standard output."""
    for value in values:
        print(json.dumps(value))
