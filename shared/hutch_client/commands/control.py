"""mode, interrupt, stop, rm, fork: commands that change or end a session."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from typing import Any

from hutch_client import exits
from hutch_client.blocking import BlockingConnection
from hutch_client.commands import Command, output
from hutch_client.commands.sessions import MODES, left_words, one_session
from hutch_client.tables import print_json
from hutch_client.untrusted import plain
from hutch_shared.errors import HutchError, Reason

__all__ = ["COMMANDS"]


def _mode_arguments(parser: argparse.ArgumentParser) -> None:
    one_session(parser)
    parser.add_argument("mode", choices=MODES, help="what runs without a permission request")


def _mode(given: argparse.Namespace) -> int:
    with BlockingConnection() as hutch:
        session = hutch.call("get_session", session=given.session)
        hutch.call("set_permission_mode", session=session["id"], mode=given.mode)
    return exits.OK


def _interrupt_arguments(parser: argparse.ArgumentParser) -> None:
    one_session(parser)
    parser.add_argument("--queued", action="store_true", help="also cancel the queued turns")


def _interrupt(given: argparse.Namespace) -> int:
    with BlockingConnection() as hutch:
        session = hutch.call("get_session", session=given.session)
        if session["state"] == "closed":
            raise HutchError(Reason.SESSION_CLOSED, f"{given.session} is closed, so no turn of it runs.")
        cancelled = 0
        if given.queued:
            for turn in hutch.call("list_turns", session=session["id"])["turns"]:
                if turn["state"] == "queued":
                    hutch.call("cancel_turn", turn=turn["id"])
                    cancelled += 1
        try:
            turn = hutch.call("interrupt_turn", session=session["id"])
        except HutchError as error:
            if error.reason is not Reason.WRONG_STATE:
                raise
            if not cancelled:
                raise HutchError(error.reason, f"{given.session} is idle: there is no turn to stop.") from None
        else:
            if turn.get("reason") == "not_verified":
                print(f"hutch: {plain(turn.get('message', ''))}", file=sys.stderr)
                return exits.FAILED
    return exits.OK


def _many_sessions(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("sessions", metavar="SESSION", nargs="+", help="id, prefix of an id, or name")


def _stop_arguments(parser: argparse.ArgumentParser) -> None:
    _many_sessions(parser)
    parser.add_argument("-f", "--force", action="store_true", help="even if a turn runs")
    output(parser, "text", "json")


def _stop(given: argparse.Namespace) -> int:
    stopped: list[dict[str, Any]] = []
    with BlockingConnection(timeout=120.0) as hutch:

        def stop(ref: str) -> None:
            try:
                session = hutch.call("close_session", session=ref, force=given.force)
            except HutchError as error:
                if error.reason is not Reason.WRONG_STATE or given.force:
                    raise
                raise HutchError(
                    error.reason, f"A turn of {ref} runs or is queued. `hutch stop -f {ref}` (--force) stops it too."
                ) from None
            stopped.append(session)
            if (left := left_words(session)) is not None:
                sentence = f"{ref} is closed, but {left}. `hutch status` shows its executor until it is gone."
                raise HutchError(Reason.WRONG_STATE, sentence)

        code = _for_each(given.sessions, stop)
    if given.output == "json":
        print_json(stopped)
    return code


def _for_each(refs: Iterable[str], act: Callable[[str], None]) -> int:
    """Act on each session. Report an error and go on; return the exit code of the first error."""
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
    parser.add_argument("-f", "--force", action="store_true", help="close it first, even if a turn runs")


def _rm(given: argparse.Namespace) -> int:
    with BlockingConnection(timeout=120.0) as hutch:

        def remove(ref: str) -> None:
            session = hutch.call("get_session", session=ref)
            if session["state"] == "open":
                if not given.force:
                    raise HutchError(
                        Reason.WRONG_STATE,
                        f"{ref} is open. Close it with `hutch stop {ref}`; `hutch rm -f {ref}` (--force) closes and"
                        " removes it, even if a turn runs.",
                    )
                closed = hutch.call("close_session", session=session["id"], force=True)
                if (left := left_words(closed)) is not None:
                    sentence = f"{ref} is closed, but {left}. Its record stays; `hutch rm {ref}` removes it anyway."
                    raise HutchError(Reason.WRONG_STATE, sentence)
            hutch.call("delete_session", session=session["id"])

        return _for_each(given.sessions, remove)


def _fork_arguments(parser: argparse.ArgumentParser) -> None:
    one_session(parser)
    parser.add_argument("--name", help="name of the new session")


def _fork(given: argparse.Namespace) -> int:
    with BlockingConnection() as hutch:
        print(hutch.call("fork_session", session=given.session, name=given.name)["id"])
    return exits.OK


COMMANDS = {
    "mode": Command(_mode_arguments, _mode, "Change a session's permission mode, also during a turn."),
    "interrupt": Command(_interrupt_arguments, _interrupt, "Stop the running turn; it then starts nothing more."),
    "stop": Command(_stop_arguments, _stop, "Close sessions and end their processes; their record stays."),
    "rm": Command(_rm_arguments, _rm, "Remove closed sessions and their record."),
    "fork": Command(_fork_arguments, _fork, "Open a session that continues this one's conversation; print its id."),
}
