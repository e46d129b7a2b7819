"""ps, inspect, mode, interrupt, stop, rm, fork: records of sessions, and what ends or changes one."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

from hutch_client import exits
from hutch_client.blocking import Connection
from hutch_client.commands import Command
from hutch_client.tables import ago, fields, print_json, print_lines, table, usage_words
from hutch_client.untrusted import one_line

__all__ = ["COMMANDS", "MODES"]

MODES = ("ask", "accept_edits", "plan", "bypass", "unattended")


def _ps_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-a", "--all", action="store_true", help="closed sessions too")
    parser.add_argument("--everyone", action="store_true", help="sessions of all accounts (administrators)")
    parser.add_argument("-q", "--quiet", action="store_true", help="ids alone")
    parser.add_argument("-o", "--output", choices=("text", "json", "jsonl"), default="text")


def _ps(given: argparse.Namespace) -> int:
    with Connection() as hutch:
        found = hutch.call("list_sessions", state=None if given.all else "open", all_owners=given.everyone)
    sessions = found["sessions"]
    _tell_older(found)
    if given.output == "json":
        print_json(sessions)
    elif given.output == "jsonl":
        print_lines(sessions)
    elif given.quiet:
        print("".join(f"{one['id']}\n" for one in sessions), end="")
    else:
        now = time.time()
        heads = [
            "SESSION",
            "NAME",
            "AGENT",
            "STATE",
            "KEYS",
            "AGE",
            *(["ACCOUNT"] if given.everyone else []),
            "DIRECTORY",
        ]
        print(table(heads, (_row(one, now, given.everyone) for one in sessions)))
    return exits.OK


def _tell_older(found: dict[str, Any]) -> None:
    if found.get("more"):
        print("Only the newest are listed here.", file=sys.stderr)


def _row(session: dict[str, Any], now: float, everyone: bool) -> list[object]:
    return [
        session["id"],
        session["name"],
        session["agent"],
        state_words(session),
        session["keys"],
        ago(session["created_at"], now),
        *([session["account"]] if everyone else []),
        session["cwd"],
    ]


def state_words(session: dict[str, Any]) -> str:
    """Return what a person wants to know first: does it wait for an answer, work, or rest?"""
    if session["state"] == "closed":
        return "closed"
    words = session.get("active_state", "idle")
    if pending := session.get("pending", 0):
        words = f"asks ({pending})"
    if queued := session.get("queued", 0):
        words += f" +{queued} queued"
    return str(words)


def _one_session(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("session", metavar="SESSION", help="id, beginning of an id, or name")


def _inspect_arguments(parser: argparse.ArgumentParser) -> None:
    _one_session(parser)
    parser.add_argument("-o", "--output", choices=("text", "json"), default="text")


def _inspect(given: argparse.Namespace) -> int:
    with Connection() as hutch:
        session = hutch.call("get_session", session=given.session)
        found = hutch.call("list_turns", session=session["id"])
    turns = found["turns"]
    _tell_older(found)
    if given.output == "json":
        print_json({**session, "all_turns": turns})
        return exits.OK
    isolation, options, rules = session["isolation"], session["options"], session.get("rules", {})
    print(
        fields(
            [
                *((name, session.get(name)) for name in ("id", "name", "agent", "account", "cwd")),
                ("state", state_words(session)),
                ("created", session["created_at"]),
                ("mode", session["permission_mode"]),
                ("when nobody is there", session["when_nobody"]),
                (
                    "keys",
                    f"{session['keys']}: {isolation['keys_why']}" if isolation.get("keys_why") else session["keys"],
                ),
                ("credential", session.get("credential")),
                ("environment", session["environment"]),
                ("isolation", f"{isolation['level']}: {isolation['why']}"),
                ("who may answer", isolation.get("insiders")),
                ("executor", " ".join(filter(None, (session.get("executor"), session.get("executor_state"))))),
                ("agent's own id", session.get("agent_session")),
                ("forked from", session.get("forked_from")),
                *((name, json.dumps(value)) for name, value in options.items()),
                *((name, ", ".join(value)) for name, value in rules.items()),
                ("usage", usage_words(session.get("usage"))),
                ("events", session["head_seq"]),
            ]
        )
    )
    if turns:
        print()
        print(table(("TURN", "STATE", "QUEUED AT", "USAGE", "PROMPT"), map(_turn_row, turns)))
    return exits.OK


def _turn_row(turn: dict[str, Any]) -> list[object]:
    state = (
        turn["state"] if "reason" not in turn or turn["state"] == "completed" else f"{turn['state']}: {turn['reason']}"
    )
    return [turn["id"], state, turn["queued_at"], usage_words(turn.get("usage")), one_line(turn["prompt"], 60)]


def _mode_arguments(parser: argparse.ArgumentParser) -> None:
    _one_session(parser)
    parser.add_argument("mode", choices=MODES)


def _mode(given: argparse.Namespace) -> int:
    with Connection() as hutch:
        session = hutch.call("get_session", session=given.session)
        hutch.call("set_permission_mode", session=session["id"], mode=given.mode)
    return exits.OK


def _interrupt_arguments(parser: argparse.ArgumentParser) -> None:
    _one_session(parser)
    parser.add_argument("--queued", action="store_true", help="also take what is queued out of the queue")


def _interrupt(given: argparse.Namespace) -> int:
    with Connection() as hutch:
        session = hutch.call("get_session", session=given.session)["id"]
        if given.queued:
            for turn in hutch.call("list_turns", session=session)["turns"]:
                if turn["state"] == "queued":
                    hutch.call("cancel_turn", turn=turn["id"])
        hutch.call("interrupt_turn", session=session)
    return exits.OK


def _many_sessions(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("sessions", metavar="SESSION", nargs="+", help="id, beginning of an id, or name")


def _stop_arguments(parser: argparse.ArgumentParser) -> None:
    _many_sessions(parser)
    parser.add_argument("-f", "--force", action="store_true", help="also when a turn is running")


def _stop(given: argparse.Namespace) -> int:
    with Connection(timeout=120.0) as hutch:
        for session in given.sessions:
            hutch.call("close_session", session=session, force=given.force)
    return exits.OK


def _rm_arguments(parser: argparse.ArgumentParser) -> None:
    _many_sessions(parser)
    parser.add_argument("-f", "--force", action="store_true", help="close it first, also when a turn is running")


def _rm(given: argparse.Namespace) -> int:
    with Connection(timeout=120.0) as hutch:
        for ref in given.sessions:
            session = hutch.call("get_session", session=ref)
            if given.force and session["state"] == "open":
                hutch.call("close_session", session=session["id"], force=True)
            hutch.call("delete_session", session=session["id"])
    return exits.OK


def _fork_arguments(parser: argparse.ArgumentParser) -> None:
    _one_session(parser)
    parser.add_argument("--name", help="name of the new session")


def _fork(given: argparse.Namespace) -> int:
    with Connection() as hutch:
        print(hutch.call("fork_session", session=given.session, name=given.name)["id"])
    return exits.OK


COMMANDS = {
    "ps": Command(_ps_arguments, _ps, "List sessions, newest first."),
    "inspect": Command(_inspect_arguments, _inspect, "Show all that is known of a session."),
    "mode": Command(_mode_arguments, _mode, "Change a session's permission mode, also in mid-turn."),
    "interrupt": Command(_interrupt_arguments, _interrupt, "Stop the running turn; nothing starts after that."),
    "stop": Command(_stop_arguments, _stop, "Close sessions and end their processes; their record stays."),
    "rm": Command(_rm_arguments, _rm, "Remove closed sessions and their record."),
    "fork": Command(_fork_arguments, _fork, "Open a session that goes on from this one's conversation; prints its id."),
}
