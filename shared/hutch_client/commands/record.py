"""audit and usage: the record of decisions, and the tokens and dollars used.

Usage is the broker's count where there is one, since an agent cannot change it.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any, Final

from hutch_client import exits
from hutch_client.blocking import BlockingConnection
from hutch_client.commands import Command, output
from hutch_client.since import FORMS, read_since
from hutch_client.tables import cost_remarks, print_json, print_lines, table, usage_words

__all__ = ["COMMANDS"]


def _audit_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--session", metavar="SESSION", help="only this session: id, prefix of an id, or name")
    parser.add_argument("--action", help="only this action, such as permission, set_permission_mode, change_rules")
    parser.add_argument("--outcome", help="only this outcome, such as allowed, denied, expired")
    parser.add_argument("--since", metavar="TIME", help=f"only since then: {FORMS}")
    output(parser, "text", "jsonl")


def _audit(given: argparse.Namespace) -> int:
    since = given.since and read_since(given.since)
    with BlockingConnection() as hutch:
        session = given.session and hutch.call("get_session", session=given.session)["id"]
        entries = _entries(hutch, session=session, action=given.action, outcome=given.outcome, since=since)
        if given.output == "jsonl":
            print_lines(entries)
        else:
            print(table((*_HEADS, *(name.upper() for name in _COLUMNS), "INPUT", "DETAILS"), map(_audit_row, entries)))
    return exits.OK


_HEADS: Final = ("NUMBER", "AT", "ACTOR", "USER")
_COLUMNS: Final = ("action", "outcome", "session", "subject", "rule")


def _audit_row(entry: dict[str, Any]) -> list[object]:
    """Return the cells of a line. Users are shown with their names as of then; lines of earlier versions have none."""
    actor, owner = entry["actor"], entry.get("owner")
    name = entry.get("actor_account")
    return [
        entry["number"],
        entry["at"],
        actor if name is None else f"{name}, {actor}",
        "" if owner is None else ", ".join(filter(None, (entry.get("account"), f"uid {owner}"))),
        *(entry.get(column, "") for column in _COLUMNS),
        entry.get("digest", "")[:12],
        _details(entry),
    ]


def _details(entry: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in entry.get("details", {}).items() if value)


def _entries(hutch: BlockingConnection, **filters: str | None) -> Iterator[dict[str, Any]]:
    after, more = 0, True
    while more:
        page = hutch.call("read_audit", after=after, **filters)
        yield from page["entries"]
        more = page["more"] and page["entries"]
        after = page["entries"][-1]["number"] if more else after


def _usage_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--by",
        choices=("session", "account", "day", "model"),
        default="session",
        help="one row for each (default: %(default)s)",
    )
    parser.add_argument("--session", metavar="SESSION", help="only this session: id, prefix of an id, or name")
    parser.add_argument("--since", metavar="TIME", help=f"only since then: {FORMS}")
    output(parser, "text", "json")


def _usage(given: argparse.Namespace) -> int:
    since = given.since and read_since(given.since)
    with BlockingConnection() as hutch:
        session = given.session and hutch.call("get_session", session=given.session)["id"]
        rows = hutch.call("get_usage", by=given.by, session=session, since=since)["rows"]
    if given.output == "json":
        print_json(rows)
        return exits.OK
    lines = []
    for row in rows:
        seen = row.get("broker") or row["usage"]
        usd = "unknown" if row.get("unknown") else f"{seen.get('usd') or 0.0:.4f}"
        tokens = (f"{seen.get(name, 0):,}" for name in _TOKENS)
        remarks = [*cost_remarks(row), *filter(None, [_difference(row)])]
        lines.append([row["of"], row["turns"], *tokens, usd, "; ".join(remarks)])
    print(table((given.by.upper(), "TURNS", "INPUT", "CACHE READ", "CACHE WRITE", "OUTPUT", "USD", ""), lines))
    return exits.OK


_TOKENS: Final = ("input_tokens", "cache_read_tokens", "cache_write_tokens", "output_tokens")
_CENT: Final = 0.01


def _difference(row: dict[str, Any]) -> str:
    """Return the agent's own count as text, if it differs from the broker's."""
    counted, reported = row.get("broker"), row["usage"]
    if counted is None:
        return "as the agent reports it"
    known = not row.get("unknown") and reported.get("usd") is not None
    dollars = known and abs((counted.get("usd") or 0.0) - (reported.get("usd") or 0.0)) > _CENT
    if not dollars and all(counted.get(name, 0) == reported.get(name, 0) for name in _TOKENS):
        return ""
    return f"the agent reports {usage_words(reported) or 'nothing'}"


COMMANDS = {
    "audit": Command(
        _audit_arguments, _audit, "Decisions, each with its user or rule and its time; `-o jsonl` exports them."
    ),
    "usage": Command(
        _usage_arguments,
        _usage,
        "Tokens and dollars, and where an agent's count differs from the broker's.",
    ),
}
