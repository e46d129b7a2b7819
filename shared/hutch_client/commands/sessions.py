"""ps, inspect: the records of sessions."""

from __future__ import annotations

import argparse
import json
import os
import pwd
import sys
import time
from typing import Any

from hutch_client import exits
from hutch_client.blocking import BlockingConnection
from hutch_client.commands import Command, number, output
from hutch_client.endpoint import Endpoint, find_endpoint
from hutch_client.private import private_record
from hutch_client.questions import decided_by, headline
from hutch_client.tables import ago, counted_words, fields, print_json, print_lines, prompt_words, table, usage_words
from hutch_client.untrusted import one_line
from hutch_shared.encoding import require_utf8
from hutch_shared.errors import HutchError, Reason
from hutch_shared.host_mark import host_socket

__all__ = [
    "COMMANDS",
    "LEVELS",
    "MODES",
    "is_other_account",
    "isolation_fields",
    "left_words",
    "limits_words",
    "one_session",
    "real_directory",
]

MODES = ("ask", "accept_edits", "plan", "bypass", "unattended")
_DECISIONS = 20
"""The number of permission requests, the newest, that `inspect` shows."""
LEVELS = ("strict", "account", "reduced")


def real_directory(given: str | None, *, other: bool = False) -> str:
    """Return the real path of the directory `given`, by default the current one. HutchError INVALID_PARAMS.

    With `other` the session runs as another account, which checks the directory: the caller need not be able to read
    it, if the path is absolute.
    """
    cwd = require_utf8(os.path.realpath(given or "."))
    try:
        os.stat(cwd)
    except PermissionError:
        if other:
            return require_utf8(os.path.abspath(given or "."))
        raise HutchError(Reason.INVALID_PARAMS, f"You may not read {cwd}: choose another directory.") from None
    except OSError:
        pass  # reported below
    if not os.path.isdir(cwd):
        what = "is not a directory" if os.path.exists(cwd) else "does not exist"
        raise HutchError(Reason.INVALID_PARAMS, f"{cwd} {what}.")
    return cwd


def is_other_account(name: str) -> bool:
    """Return whether `name` is another account than the caller's."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name != name
    except KeyError:
        return True


def _ps_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-a", "--all", action="store_true", help="closed sessions too")
    parser.add_argument("--everyone", action="store_true", help="sessions of all accounts (administrators)")
    _limit_argument(parser, "sessions")
    parser.add_argument("-q", "--quiet", action="store_true", help="only the ids")
    output(parser, "text", "json", "jsonl")


def _ps(given: argparse.Namespace) -> int:
    endpoint = find_endpoint()
    with BlockingConnection(endpoint.socket) as hutch:
        found = hutch.call(
            "list_sessions", state=None if given.all else "open", all_owners=given.everyone, limit=given.limit
        )
    sessions = found["sessions"]
    _report_older(found)
    if given.output == "json":
        print_json(sessions)
    elif given.output == "jsonl":
        print_lines(sessions)
    elif given.quiet:
        print("".join(f"{one['id']}\n" for one in sessions), end="")
    else:
        now = time.time()
        accounts = given.everyone or given.all or any(is_other_account(one["account"]) for one in sessions)
        heads = ("SESSION", "NAME", *(["ACCOUNT"] if accounts else []), *_HEADS)
        print(table(heads, (_row(one, now, accounts=accounts) for one in sessions)))
        _report_other(endpoint)
    return exits.OK


def _report_other(endpoint: Endpoint) -> None:
    """Name the sessions that are not in the list because another hutchd has them."""
    if endpoint.kind == "private" and host_socket() is not None:
        print("! These are the sessions of your own hutchd; `hutch ps` lists those of the host's.", file=sys.stderr)
    elif endpoint.kind == "host" and (own := private_record()) is not None:
        print(f"! Not listed: {own}.", file=sys.stderr)


_HEADS = ("AGENT", "STATE", "ISOLATION", "KEYS", "AGE", "DIRECTORY")


def _limit_argument(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument(
        "-n", "--limit", type=number, default=200, metavar="N", help=f"the newest N {what} (default: %(default)d)"
    )


def _report_older(found: dict[str, Any]) -> None:
    if found.get("more"):
        print("Only the newest are listed. `-n N` lists more, up to the size limit of an answer.", file=sys.stderr)


def _row(session: dict[str, Any], now: float, *, accounts: bool) -> list[object]:
    return [
        session["id"],
        session["name"],
        *([session["account"]] if accounts else []),
        session["agent"],
        state_words(session),
        session["isolation"]["level"],
        session["keys"],
        ago(session["created_at"], now),
        session["cwd"],
    ]


def state_words(session: dict[str, Any]) -> str:
    """Return the state: closed, idle, or that of the active turn, with the numbers of pending requests and prompts.

    It says too whether the session is in the mode `plan`, which an agent can enter by itself, and whether processes of
    a closed session may be left.
    """
    if session["state"] == "closed":
        return "closed" if left_words(session) is None else "closed, not verified"
    words = session.get("active_state", "idle")
    if pending := session.get("pending", 0):
        words = f"{words} ({pending})"
    if queued := session.get("queued", 0):
        words += f" +{queued} queued"
    if session.get("permission_mode") == "plan":
        words += ", plans"
    return str(words)


def left_words(session: dict[str, Any]) -> str | None:
    """Return a clause about what is, or may be, left of a session's processes; None if hutchd knows of nothing."""
    killed = session.get("killed")
    return None if killed is None or killed["outcome"] == "gone" else str(killed["message"])


def one_session(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("session", metavar="SESSION", help="id, prefix of an id, or name")


def _inspect_arguments(parser: argparse.ArgumentParser) -> None:
    one_session(parser)
    _limit_argument(parser, "turns")
    output(parser, "text", "json")


def _inspect(given: argparse.Namespace) -> int:
    with BlockingConnection() as hutch:
        session = hutch.call("get_session", session=given.session)
        found = hutch.call("list_turns", session=session["id"], limit=given.limit)
        asked = hutch.call("list_permissions", session=session["id"], state=None, limit=_DECISIONS, newest=True)
        counted = next(iter(hutch.call("get_usage", by="session", session=session["id"])["rows"]), None)
    turns, requests = found["turns"], asked["permissions"]
    _report_older(found)
    if given.output == "json":
        print_json({**session, "all_turns": turns, "permissions": requests, "counted": counted})
        return exits.OK
    isolation, options, rules = session["isolation"], session["options"], session.get("rules", {})
    print(
        fields(
            [
                *((name, session.get(name)) for name in ("id", "name", "agent", "account", "cwd")),
                ("owner", _user_name(session["owner"])),
                ("state", state_words(session)),
                ("created", session["created_at"]),
                ("mode", session["permission_mode"]),
                ("when nobody answers", session["when_nobody"]),
                (
                    "keys",
                    f"{session['keys']}: {isolation['keys_why']}" if isolation.get("keys_why") else session["keys"],
                ),
                ("credential", session.get("credential")),
                ("environment", session["environment"]),
                *isolation_fields(isolation, session.get("executor_limits")),
                ("who may answer", isolation.get("insiders")),
                ("turn limits", _limits_words(session.get("limits", {}))),
                ("executor", " ".join(filter(None, (session.get("executor"), session.get("executor_state"))))),
                ("processes", session.get("killed", {}).get("message")),
                ("agent's own id", session.get("agent_session")),
                ("forked from", session.get("forked_from")),
                *((name, json.dumps(value)) for name, value in options.items()),
                *((name, ", ".join(value)) for name, value in rules.items()),
                *_instruction_fields(session.get("instructions", {})),
                ("usage", usage_words(session.get("usage"))),
                ("counted by the broker", counted_words(counted)),
                ("events", session["head_seq"]),
            ]
        )
    )
    if turns:
        print()
        print(table(("TURN", "STATE", "QUEUED AT", "USAGE", "PROMPT"), map(_turn_row, turns)))
    if requests:
        print()
        print(table(("REQUEST", "STATE", "DECIDED BY", "WHAT"), map(_request_row, requests)))
    return exits.OK


def _request_row(asked: dict[str, Any]) -> list[object]:
    return [asked["id"], asked["state"], decided_by(asked), one_line(headline(asked), 60)]


def isolation_fields(isolation: dict[str, Any], limits: dict[str, Any] | None = None) -> list[tuple[str, object]]:
    """Return the shown fields of an `Isolation`: level and reason, what the sandbox is and leaves open, and the rest.

    The limits are those that were applied to the session's executor, if `limits` has them.
    """
    return [
        ("isolation", f"{isolation['level']}: {isolation['why']}"),
        *_sandbox_fields(isolation),
        ("at least", isolation.get("asked")),
        ("for more", isolation.get("missing")),
        ("its limits", isolation.get("limits") if limits is None else limits_words(limits)),
    ]


def _sandbox_fields(isolation: dict[str, Any]) -> list[tuple[str, object]]:
    """Return the kind of sandbox and the attacks that remain open; hutchd of an earlier version reports neither."""
    kind, left = isolation.get("sandbox"), isolation.get("open", ())
    if kind is None:
        return [("sandbox", f"none: {len(left)} of the attacks in docs/security.md are open")] if left else []
    return [("sandbox", kind), ("remains open", ", ".join(left))]


def limits_words(limits: dict[str, Any]) -> str:
    """Return the limits that were applied to an executor, and beside each differing one what was asked for."""
    applied, asked = limits["applied"], limits["asked"]
    parts = []
    for name, unit, label, suffix in _APPLIED:
        now, wanted = applied.get(name), asked.get(name)
        if now is None and wanted is None:
            continue
        part = f"{label} not applied" if now is None else f"{label} {now // unit:,}{suffix}"
        is_same = now is not None and wanted is not None and abs(now - wanted) < max(unit, 2)
        if wanted is not None and not is_same:
            part += f" ({wanted // unit:,}{suffix} asked for)"
        parts.append(part)
    return ", ".join(parts)


def _instruction_fields(read: dict[str, Any]) -> list[tuple[str, object]]:
    """Return a field for each instruction file that the agent was given or that was left out."""
    given = [("instructions", f"{file['path']} ({file.get('bytes', 0):,} bytes)") for file in read.get("given", ())]
    cut = [("cut", f"{file['path']}: {file['why']}") for file in read.get("given", ()) if file.get("why")]
    return [*given, *cut, *(("left out", f"{file['path']}: {file['why']}") for file in read.get("left_out", ()))]


def _limits_words(limits: dict[str, Any]) -> str:
    return ", ".join(_LIMITS[name].format(value) for name, value in limits.items() if name in _LIMITS)


_APPLIED = (
    ("memory", 1 << 20, "memory", " MiB"),
    ("pids", 1, "processes and threads", ""),
    ("cpu_weight", 1, "cpu weight", ""),
    ("open_files", 1, "open files of each process", ""),
)
_LIMITS = {"turn_timeout": "{:g} s", "max_turns": "{} requests to the model", "max_usd": "${:g} for the session"}


def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"


def _turn_row(turn: dict[str, Any]) -> list[object]:
    state = (
        turn["state"] if "reason" not in turn or turn["state"] == "completed" else f"{turn['state']}: {turn['reason']}"
    )
    words = prompt_words(turn["prompt"], turn.get("kind", "prompt"))
    return [turn["id"], state, turn["queued_at"], usage_words(turn.get("usage")), one_line(words, 60)]


COMMANDS = {
    "ps": Command(_ps_arguments, _ps, "List sessions, newest first."),
    "inspect": Command(_inspect_arguments, _inspect, "Show everything about a session."),
}
