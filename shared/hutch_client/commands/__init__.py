"""The commands of `hutch`: which module has which. A module is imported when one of its commands is called."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, Final, NamedTuple

__all__ = ["GROUPS", "MODULES", "Command", "Parser", "group"]


class Parser(argparse.ArgumentParser):
    """argparse as the commands want it: options in full, and no search for the terminal's width at each start."""

    def __init__(self, **settings: Any) -> None:
        """Take what ArgumentParser takes."""
        super().__init__(
            allow_abbrev=False, formatter_class=lambda prog: argparse.HelpFormatter(prog, width=100), **settings
        )


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
        "version": ("daemon", "versions of both sides"),
    },
}
MODULES: Final = {name: module for group in GROUPS.values() for name, (module, _) in group.items()}


def group(verbs: dict[str, Command], doc: str) -> Command:
    """Return the command that has `verbs` (`hutch key add`) and does what the chosen one does."""

    def arguments(parser: argparse.ArgumentParser) -> None:
        choices = parser.add_subparsers(title="what to do", metavar="VERB", required=True)
        for name, command in verbs.items():
            child = choices.add_parser(name, help=command.doc, description=command.doc)
            command.arguments(child)
            child.set_defaults(verb=command.run)

    return Command(arguments, lambda given: int(given.verb(given)), doc)
