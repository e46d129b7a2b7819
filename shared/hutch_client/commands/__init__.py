"""The commands of `hutch`: which module has which. A module is imported when one of its commands is called."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from hutch_client import exits
from hutch_client.streams import columns

__all__ = ["GROUPS", "MODULES", "Command", "Parser", "group", "number", "output", "seconds"]


class Parser(argparse.ArgumentParser):
    """argparse as the commands want it: options in full, and what is wrong said once, with the usage that it breaks."""

    def __init__(self, **settings: Any) -> None:
        """Take what ArgumentParser takes."""
        super().__init__(
            allow_abbrev=False, formatter_class=lambda prog: argparse.HelpFormatter(prog, width=_WIDTH), **settings
        )

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse; words too many are refused by the verb that they were given to, and not repeated where it says so."""
        given, surplus = self.parse_known_args(args, namespace)
        if surplus:
            parser = getattr(given, "parser", self)
            parser.error(getattr(given, "surplus", None) or f"this is too much: {' '.join(surplus)}")
        return given


_WIDTH: Final = max(40, min(100, columns(1, 102) - 2))


class Command(NamedTuple):
    """What a module says of each of its commands: its arguments, and what it does (returns the exit code)."""

    arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    doc: str


GROUPS: Final[dict[str, dict[str, tuple[str, str]]]] = {
    "Prompts": {
        "run": ("run", "run a prompt in a new session, or in one that is there"),
        "attach": ("follow", "watch a session live and answer its questions"),
        "logs": ("follow", "print what happened in a session"),
        "wait": ("follow", "wait until a session is idle"),
    },
    "Questions": {
        "pending": ("questions", "list what waits for an answer"),
        "approve": ("questions", "let a tool call happen, or a plan go on"),
        "deny": ("questions", "refuse it, with a message to the agent"),
        "answer": ("questions", "answer an agent's question"),
    },
    "Sessions": {
        "ps": ("sessions", "list sessions"),
        "inspect": ("sessions", "show all that is known of a session"),
        "mode": ("sessions", "change a session's permission mode"),
        "interrupt": ("sessions", "stop the running turn"),
        "stop": ("sessions", "close a session and end its processes"),
        "rm": ("sessions", "remove a closed session and its record"),
        "fork": ("sessions", "open a session that goes on from another's conversation"),
    },
    "Rules, keys and the record": {
        "policy": ("policy", "show, explain, test and change the rules"),
        "audit": ("record", "who decided what"),
        "usage": ("record", "tokens and dollars"),
        "key": ("keys", "add, list and remove model keys"),
    },
    "The daemon": {
        "status": ("daemon", "health of hutchd"),
        "doctor": ("daemon", "find what is wrong and say what to do"),
        "daemon": ("daemon", "start, stop, run and back up hutchd"),
        "service": ("service", "have systemd or launchd run hutchd"),
        "config": ("config", "show hutchd's settings, and where each is from"),
        "completion": ("completion", "print what lets your shell complete all this"),
        "version": ("daemon", "versions of both sides"),
    },
}
MODULES: Final = {name: module for group in GROUPS.values() for name, (module, _) in group.items()}


def group(verbs: dict[str, Command], doc: str) -> Command:
    """Return the command that has `verbs` (`hutch key add`) and does what the chosen one does."""

    def arguments(parser: argparse.ArgumentParser) -> None:
        choices = parser.add_subparsers(title="what to do", metavar="VERB")
        for name, command in verbs.items():
            child = choices.add_parser(name, help=command.doc, description=command.doc)
            command.arguments(child)
            child.set_defaults(verb=command.run, parser=child)
        parser.set_defaults(verb=None, parser=parser)

    def run(given: argparse.Namespace) -> int:
        if given.verb is None:
            given.parser.print_help(sys.stderr)
            return exits.USAGE
        return int(given.verb(given))

    return Command(arguments, run, doc)


def output(parser: argparse.ArgumentParser, *forms: str) -> None:
    """Add `-o`, with the forms that the command knows; the first is the default."""
    words = ", ".join(_FORMS[form] for form in forms)
    parser.add_argument("-o", "--output", choices=forms, default=forms[0], help=f"{words} (default: %(default)s)")


_FORMS: Final = {
    "text": "text for people",
    "json": "one JSON value",
    "jsonl": "JSON lines",
}


def seconds(text: str) -> float:
    """Read a length of time that an option gives; argparse says what is wrong."""
    try:
        length = float(text)
    except ValueError:
        length = math.nan
    if not 0 < length < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds above 0")
    return length


def number(text: str) -> int:
    """Read a number of 0 or more."""
    if not (text.isascii() and text.isdecimal() and len(text) < _DIGITS):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of 0 or more")
    return int(text)


_DIGITS: Final = 16
