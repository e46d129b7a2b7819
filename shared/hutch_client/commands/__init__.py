"""The commands of `hutch` and their modules. A module is imported when one of its commands is called."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from hutch_client import exits
from hutch_client.streams import columns

__all__ = ["GROUPS", "MODULES", "PRIVATE", "PRIVATE_DOC", "Command", "Parser", "group", "number", "output", "seconds"]


PRIVATE: Final = "--private"
"""The option of every command that chooses the caller's own hutchd."""
PRIVATE_DOC: Final = "use a hutchd of your own, also on a host that has one for everybody"


class Parser(argparse.ArgumentParser):
    """argparse without abbreviated options; an error is printed once, with the usage of the verb it belongs to."""

    def __init__(self, **settings: Any) -> None:
        """Take the arguments of ArgumentParser."""
        super().__init__(
            allow_abbrev=False, formatter_class=lambda prog: argparse.HelpFormatter(prog, width=_WIDTH), **settings
        )
        # without a default, since that of a verb's parser would replace what stands before the verb
        self.add_argument(PRIVATE, action="store_true", default=argparse.SUPPRESS, help=PRIVATE_DOC)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse. Surplus words are an error of the verb that got them; its default `surplus` replaces the message."""
        given, surplus = self.parse_known_args(args, namespace)
        if surplus:
            parser = getattr(given, "parser", self)
            parser.error(getattr(given, "surplus", None) or f"unexpected: {' '.join(surplus)}")
        return given


_WIDTH: Final = max(40, min(100, columns(1, 102) - 2))


class Command(NamedTuple):
    """A command: its arguments, its function (which returns the exit code), and one sentence about it."""

    arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    doc: str


GROUPS: Final[dict[str, dict[str, tuple[str, str]]]] = {
    "Prompts": {
        "run": ("run", "run a prompt in a new or an existing session"),
        "attach": ("follow", "watch a session live and decide its permission requests"),
        "logs": ("follow", "print what happened in a session"),
        "wait": ("follow", "wait until a session is idle"),
    },
    "Permission requests": {
        "pending": ("questions", "list the pending requests"),
        "approve": ("questions", "allow a tool call or a plan"),
        "deny": ("questions", "deny it, with a message to the agent"),
        "answer": ("questions", "answer an agent's question"),
    },
    "Sessions": {
        "ps": ("sessions", "list sessions"),
        "inspect": ("sessions", "show everything about a session"),
        "mode": ("control", "change a session's permission mode"),
        "interrupt": ("control", "stop the running turn"),
        "stop": ("control", "close a session and end its processes"),
        "rm": ("control", "remove a closed session and its record"),
        "fork": ("control", "open a session that continues another's conversation"),
        "compact": ("conversation", "replace a session's conversation by a summary"),
        "clear": ("conversation", "begin an empty conversation in a session"),
    },
    "Rules, keys and the record": {
        "policy": ("policy", "show, explain, test and change the rules"),
        "audit": ("record", "who decided what"),
        "usage": ("record", "tokens and dollars"),
        "key": ("keys", "add, list and remove model keys"),
    },
    "The daemon": {
        "status": ("daemon", "health of hutchd"),
        "doctor": ("doctor", "find problems and say what to do"),
        "daemon": ("daemon", "start, stop, run and back up hutchd"),
        "service": ("service", "let systemd or launchd run hutchd"),
        "config": ("config", "show hutchd's settings and their origins"),
        "completion": ("completion", "print the completion script for your shell"),
        "version": ("daemon", "versions of client and daemon"),
    },
}
MODULES: Final = {name: module for group in GROUPS.values() for name, (module, _) in group.items()}


def group(verbs: dict[str, Command], doc: str) -> Command:
    """Return a command with verbs (`hutch key add`); it runs the chosen verb."""

    def arguments(parser: argparse.ArgumentParser) -> None:
        choices = parser.add_subparsers(title="verbs", metavar="VERB")
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
    """Add `-o` with the formats of this command; the first is the default."""
    words = ", ".join(_FORMS[form] for form in forms)
    parser.add_argument("-o", "--output", choices=forms, default=forms[0], help=f"{words} (default: %(default)s)")


_FORMS: Final = {
    "text": "text to read",
    "json": "one JSON value",
    "jsonl": "JSON lines",
}


def seconds(text: str) -> float:
    """Parse a duration for argparse."""
    try:
        length = float(text)
    except ValueError:
        length = math.nan
    if not 0 < length < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return length


def number(text: str) -> int:
    """Parse a whole number of 0 or more for argparse."""
    if not (text.isascii() and text.isdecimal() and len(text) < _DIGITS):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 0 or more")
    return int(text)


_DIGITS: Final = 16
