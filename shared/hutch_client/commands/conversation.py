"""compact, clear: commands that change a session's conversation. The work is in `running`."""

from __future__ import annotations

import argparse

from hutch_client.commands import Command, output, seconds
from hutch_client.commands.sessions import one_session

__all__ = ["COMMANDS"]


def _arguments(parser: argparse.ArgumentParser) -> None:
    one_session(parser)
    parser.add_argument("-d", "--detach", action="store_true", help="print the turn's id and return at once")
    output(parser, "text", "jsonl", "json")


def _compact_arguments(parser: argparse.ArgumentParser) -> None:
    _arguments(parser)
    parser.add_argument("words", metavar="WORDS", nargs="*", help="what the summary must keep")
    parser.add_argument("--timeout", type=seconds, metavar="S", help="stop the turn after S seconds")


def _compact(given: argparse.Namespace) -> int:
    from hutch_client.commands import running  # late, here and below: help and completion do not need it

    return running.compact(given)


def _clear(given: argparse.Namespace) -> int:
    from hutch_client.commands import running

    return running.clear(given)


COMMANDS = {
    "compact": Command(
        _compact_arguments,
        _compact,
        "Replace a session's conversation by a summary, so that the model reads less with each prompt. It costs one"
        " request over the whole conversation.",
    ),
    "clear": Command(
        _arguments, _clear, "Begin an empty conversation in a session. It costs nothing; the session's record stays."
    ),
}
