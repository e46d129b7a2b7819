"""attach, logs, wait: the arguments of the commands that follow events. The work is in `following`."""

from __future__ import annotations

import argparse

from hutch_client.commands import Command, number, output, seconds

__all__ = ["COMMANDS"]

_LOOK_BACK = 50


def _attach_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("session", metavar="SESSION", help="id, prefix of an id, or name")
    parser.add_argument(
        "--since", type=number, metavar="SEQ", help=f"start after this event (default: show the last {_LOOK_BACK})"
    )
    output(parser, "text", "jsonl")
    parser.add_argument("--no-input", action="store_true", help="exit with 5 on a permission request")


def _attach(given: argparse.Namespace) -> int:
    from hutch_client.commands import following  # late, here and below: help and completion do not need it

    return following.attach(given, look_back=_LOOK_BACK)


def _logs_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("session", metavar="SESSION", help="id, prefix of an id, or name")
    parser.add_argument("-f", "--follow", action="store_true", help="continue with new events")
    parser.add_argument(
        "--since", type=number, default=0, metavar="SEQ", help="start after this event (default: at the first)"
    )
    output(parser, "text", "jsonl")


def _logs(given: argparse.Namespace) -> int:
    from hutch_client.commands import following

    return following.logs(given)


def _wait_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("sessions", metavar="SESSION", nargs="+", help="id, prefix of an id, or name")
    parser.add_argument("--timeout", type=seconds, metavar="S", help="give up after S seconds, with exit code 124")


def _wait(given: argparse.Namespace) -> int:
    from hutch_client.commands import following

    return following.wait(given)


COMMANDS = {
    "attach": Command(_attach_arguments, _attach, "Watch a session live and decide its requests; Ctrl-C leaves."),
    "logs": Command(_logs_arguments, _logs, "Print what happened in a session."),
    "wait": Command(_wait_arguments, _wait, "Wait until sessions are idle; the exit code is that of the last turn."),
}
