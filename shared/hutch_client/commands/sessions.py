"""ps, inspect, mode, interrupt, stop, rm, fork: records of sessions, and what ends or changes one."""

from __future__ import annotations

import argparse
import json
import os
import pwd
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

from hutch_client import exits
from hutch_client.blocking import BlockingConnection
from hutch_client.commands import Command, number, output
from hutch_client.tables import ago, fields, print_json, print_lines, table, usage_words
from hutch_client.untrusted import one_line, plain
from hutch_shared.errors import HutchError, Reason

__all__ = ["COMMANDS", "LEVELS", "MODES", "is_other_account", "isolation_fields", "real_directory"]

MODES = ("ask", "accept_edits", "plan", "bypass", "unattended")
LEVELS = ("strict", "account", "reduced")


def real_directory(given: str | None, *, other: bool = False) -> str:
    """Return the real path of the directory that an option names, else of the present one; INVALID_PARAMS.

    One that only an `other` account may look at is returned as it is given: that account finds out what is there.
    """
    cwd = os.path.realpath(given or ".")
    try:
        os.stat(cwd)
    except PermissionError:
        if other:
            return os.path.abspath(given or ".")
        raise HutchError(Reason.INVALID_PARAMS, f"{cwd} is not yours to look at.") from None
    except OSError:
        pass  # said below
    if not os.path.isdir(cwd):
        what = "is no directory" if os.path.exists(cwd) else "is not there"
        raise HutchError(Reason.INVALID_PARAMS, f"{cwd} {what}.")
    return cwd


def is_other_account(name: str) -> bool:
    """Tell whether `name` is not the account of who calls."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name != name
    except KeyError:
        return True


def _ps_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-a", "--all", action="store_true", help="closed sessions too")
    parser.add_argument("--everyone", action="store_true", help="sessions of all accounts (administrators)")
    _newest(parser, "sessions")
    parser.add_argument("-q", "--quiet", action="store_true", help="ids alone")
    output(parser, "text", "json", "jsonl")


def _ps(given: argparse.Namespace) -> int:
    with BlockingConnection() as hutch:
        found = hutch.call(
            "list_sessions", state=None if given.all else "open", all_owners=given.everyone, limit=given.limit
        )
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
        accounts = given.everyone or given.all or any(is_other_account(one["account"]) for one in sessions)
        heads = ("SESSION", "NAME", *(["ACCOUNT"] if accounts else []), *_HEADS)
        print(table(heads, (_row(one, now, accounts=accounts) for one in sessions)))
    return exits.OK


_HEADS = ("AGENT", "STATE", "ISOLATION", "KEYS", "AGE", "DIRECTORY")


def _newest(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument(
        "-n", "--limit", type=number, default=200, metavar="N", help=f"the newest N {what} (default: %(default)d)"
    )


def _tell_older(found: dict[str, Any]) -> None:
    if found.get("more"):
        print("Only the newest are listed here; `-n N` lists more, as far as an answer can hold them.", file=sys.stderr)


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
    _newest(parser, "turns")
    output(parser, "text", "json")


def _inspect(given: argparse.Namespace) -> int:
    with BlockingConnection() as hutch:
        session = hutch.call("get_session", session=given.session)
        found = hutch.call("list_turns", session=session["id"], limit=given.limit)
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
                ("owner", _person(session["owner"])),
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
                *isolation_fields(isolation),
                ("who may answer", isolation.get("insiders")),
                ("a turn's limits", _limits_words(session.get("limits", {}))),
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


def isolation_fields(isolation: dict[str, Any]) -> list[tuple[str, object]]:
    """Return what a person is told of an `Isolation`: what it is and why, what it must be, the way to more, bounds."""
    return [
        ("isolation", f"{isolation['level']}: {isolation['why']}"),
        ("at least", isolation.get("asked")),
        ("for more", isolation.get("missing")),
        ("its limits", isolation.get("limits")),
    ]


def _limits_words(limits: dict[str, Any]) -> str:
    return ", ".join(_LIMITS[name].format(value) for name, value in limits.items() if name in _LIMITS)


_LIMITS = {"turn_timeout": "{:g} s", "max_turns": "{} requests to the model", "max_usd": "${:g} for the session"}


def _person(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"


def _turn_row(turn: dict[str, Any]) -> list[object]:
    state = (
        turn["state"] if "reason" not in turn or turn["state"] == "completed" else f"{turn['state']}: {turn['reason']}"
    )
    return [turn["id"], state, turn["queued_at"], usage_words(turn.get("usage")), one_line(turn["prompt"], 60)]


def _mode_arguments(parser: argparse.ArgumentParser) -> None:
    _one_session(parser)
    parser.add_argument("mode", choices=MODES, help="what may happen without asking")


def _mode(given: argparse.Namespace) -> int:
    with BlockingConnection() as hutch:
        session = hutch.call("get_session", session=given.session)
        hutch.call("set_permission_mode", session=session["id"], mode=given.mode)
    return exits.OK


def _interrupt_arguments(parser: argparse.ArgumentParser) -> None:
    _one_session(parser)
    parser.add_argument("--queued", action="store_true", help="also take what is queued out of the queue")


def _interrupt(given: argparse.Namespace) -> int:
    with BlockingConnection() as hutch:
        session = hutch.call("get_session", session=given.session)
        if session["state"] == "closed":
            raise HutchError(Reason.SESSION_CLOSED, f"{given.session} is closed: nothing of it runs.")
        taken = 0
        if given.queued:
            for turn in hutch.call("list_turns", session=session["id"])["turns"]:
                if turn["state"] == "queued":
                    hutch.call("cancel_turn", turn=turn["id"])
                    taken += 1
        try:
            hutch.call("interrupt_turn", session=session["id"])
        except HutchError as error:
            if error.reason is not Reason.WRONG_STATE:
                raise
            if not taken:
                raise HutchError(error.reason, f"{given.session} is idle: nothing of it runs.") from None
    return exits.OK


def _many_sessions(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("sessions", metavar="SESSION", nargs="+", help="id, beginning of an id, or name")


def _stop_arguments(parser: argparse.ArgumentParser) -> None:
    _many_sessions(parser)
    parser.add_argument("-f", "--force", action="store_true", help="also when a turn is running")


def _stop(given: argparse.Namespace) -> int:
    with BlockingConnection(timeout=120.0) as hutch:

        def stop(ref: str) -> None:
            try:
                hutch.call("close_session", session=ref, force=given.force)
            except HutchError as error:
                if error.reason is not Reason.WRONG_STATE or given.force:
                    raise
                raise HutchError(
                    error.reason, f"A turn of {ref} runs or waits. `hutch stop -f {ref}` (--force) stops it too."
                ) from None

        return _each(given.sessions, stop)


def _each(refs: Iterable[str], act: Callable[[str], None]) -> int:
    """Do it to each; what is refused is told and does not spare the others. Return the first refusal's exit code."""
    code = exits.OK
    for ref in refs:
        try:
            act(ref)
        except HutchError as error:
            if error.reason in (Reason.CONNECTION_LOST, Reason.TIMED_OUT):
                raise
            print(f"hutch: {plain(error.message)}", file=sys.stderr)
            code = code or exits.of_error(error)
    return code


def _rm_arguments(parser: argparse.ArgumentParser) -> None:
    _many_sessions(parser)
    parser.add_argument("-f", "--force", action="store_true", help="close it first, also when a turn is running")


def _rm(given: argparse.Namespace) -> int:
    with BlockingConnection(timeout=120.0) as hutch:

        def remove(ref: str) -> None:
            session = hutch.call("get_session", session=ref)
            if session["state"] == "open":
                if not given.force:
                    raise HutchError(
                        Reason.WRONG_STATE,
                        f"{ref} is open. `hutch stop {ref}` closes it; `hutch rm -f {ref}` (--force) does both, also"
                        " while a turn runs.",
                    )
                hutch.call("close_session", session=session["id"], force=True)
            hutch.call("delete_session", session=session["id"])

        return _each(given.sessions, remove)


def _fork_arguments(parser: argparse.ArgumentParser) -> None:
    _one_session(parser)
    parser.add_argument("--name", help="name of the new session")


def _fork(given: argparse.Namespace) -> int:
    with BlockingConnection() as hutch:
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
