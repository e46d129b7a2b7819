"""completion: prints the completion script of a shell, and answers that script's requests.

At each Tab the script runs `hutch` with the line in the environment (argcomplete's protocol). `answer` reads the parser
of the command on that line, so every option is known. The metavar of an argument gives its values: a SESSION or REQUEST
from hutchd, a FILE or DIR from the disk, an ACCOUNT from the system.

What is always true: only the module of the command is imported; only completions are printed; if hutchd does not answer
within half a second, it gives no values.
"""

from __future__ import annotations

import argparse
import importlib
import os
import pwd
from collections.abc import Callable, Iterator
from typing import Any, Final, NoReturn

import argcomplete
from argcomplete.completers import SuppressCompleter
from argcomplete.lexers import split_line
from argcomplete.shell_integration import shellcode

from hutch_client import exits
from hutch_client.commands import GROUPS, MODULES, Command, Parser
from hutch_client.untrusted import one_line
from hutch_shared.agents import AGENTS
from hutch_shared.errors import HutchError

__all__ = ["COMMANDS", "answer"]

_SHELLS: Final = {
    "bash": "echo 'source <(hutch completion bash)' >> ~/.bashrc",
    "fish": "hutch completion fish > ~/.config/fish/completions/hutch.fish",
    "zsh": "hutch completion zsh > DIR/_hutch, with a DIR of your $fpath",
}


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "\n".join(["permanently:", *(f"  {line}" for line in _SHELLS.values())])
    parser.add_argument("shell", metavar="SHELL", choices=tuple(_SHELLS), help=", ".join(_SHELLS))


def _print(given: argparse.Namespace) -> int:
    print(shellcode(["hutch"], shell=given.shell, complete_arguments=["-o", "nospace"]))
    return exits.OK


def answer() -> NoReturn:
    """Write the completions of the line in the environment to the descriptor of argcomplete's script, and exit."""
    words = split_line(os.environ["COMP_LINE"], int(os.environ["COMP_POINT"]))[3]
    argcomplete.autocomplete(
        _parser(words[1] if len(words) > 1 else ""),
        always_complete_options=False,
        default_completer=SuppressCompleter(),
    )
    raise SystemExit(exits.FAILED)  # unreachable: argcomplete ends the process


def _parser(chosen: str) -> Parser:
    """Return a parser of the line, with the arguments of the command `chosen` only."""
    root = Parser(prog="hutch")
    if chosen in MODULES:
        table: dict[str, Command] = importlib.import_module(f"hutch_client.commands.{MODULES[chosen]}").COMMANDS
        command = root.add_subparsers(prog="hutch").add_parser(chosen)
        table[chosen].arguments(command)
        _offer_values(command, chosen)
    elif chosen == "help":
        root.add_argument("help")
        root.add_argument("command", choices=tuple(MODULES))
    else:
        commands = {name: doc for group in GROUPS.values() for name, (_, doc) in group.items()}
        first: Any = root.add_argument("command")
        first.completer = lambda **_: {**commands, "help": "explain a command"}
        root.add_argument("--version", action="store_true", help="versions of client and daemon")
    return root


def _offer_values(parser: argparse.ArgumentParser, command: str) -> None:
    """Give each argument, also of verbs, a function that offers its values."""
    for action in parser._actions:  # noqa: SLF001 - as argcomplete does: argparse has no public list
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001 - the same
            for verb in action.choices.values():
                _offer_values(verb, command)
        elif isinstance(action.metavar, str) and action.metavar in _OFFERS:
            action.completer = _OFFERS[action.metavar](command)  # type: ignore[attr-defined]  # argcomplete reads it


Offer = Callable[..., dict[str, str]]
"""Called with `prefix` and other arguments; returns the values, each with a short description."""

_TIMEOUT: Final = 0.5
_WITH_CLOSED: Final = ("audit", "fork", "inspect", "logs", "rm", "usage")


def _sessions(command: str) -> Offer:
    def offer(**_: Any) -> dict[str, str]:
        from hutch_client.commands.sessions import state_words

        state = None if command in _WITH_CLOSED else "open"
        offered = {}
        for one in _listed("list_sessions", "sessions", state=state):
            description = f"{state_words(one)}, {one['agent']} in {one_line(one['cwd'], 60)}"
            offered[one["id"]] = f"{one_line(one['name'], 40)}: {description}"
            if _is_plain(one["name"]):
                offered.setdefault(one["name"], description)
        return offered

    return offer


def _requests(_: str) -> Offer:
    def offer(**_: Any) -> dict[str, str]:
        from hutch_client.questions import headline

        return {one["id"]: one_line(headline(one), 60) for one in _listed("list_permissions", "permissions")}

    return offer


def _listed(method: str, what: str, **params: Any) -> list[dict[str, Any]]:
    """Return the records that hutchd lists; none if it does not answer in time."""
    from hutch_client.blocking import BlockingConnection  # late: most completions need no hutchd

    try:
        with BlockingConnection(timeout=_TIMEOUT) as hutch:
            found: list[dict[str, Any]] = hutch.call(method, **params)[what]
            return found
    except (HutchError, OSError):
        return []


def _is_plain(name: str) -> bool:
    """Return whether no shell would run code in the name when it completes it: other users choose names."""
    return bool(name) and name[0] != "-" and all(one.isalnum() or one in "-_.+@" for one in name)


def _accounts(_: str) -> Offer:
    def offer(**_: Any) -> dict[str, str]:
        people = (one for one in pwd.getpwall() if _FIRST_PERSON <= one.pw_uid < _NOBODY)
        return {one.pw_name: f"uid {one.pw_uid}" for one in people if _is_plain(one.pw_name)}

    return offer


_FIRST_PERSON: Final = 1000
_NOBODY: Final = 65534


def _files(_: str) -> Offer:
    return lambda prefix, **_: dict.fromkeys(_paths_with_prefix(prefix, directories=False), "")


def _directories(_: str) -> Offer:
    return lambda prefix, **_: dict.fromkeys(_paths_with_prefix(prefix, directories=True), "")


def _paths_with_prefix(prefix: str, *, directories: bool) -> Iterator[str]:
    """Yield the paths with this prefix, as they are typed; a directory ends with a slash."""
    above, slash, begun = prefix.rpartition("/")
    try:
        with os.scandir(os.path.expanduser(above + slash) or ".") as there:
            for entry in there:
                if entry.name.startswith(begun) and (begun or not entry.name.startswith(".")):
                    if entry.is_dir():
                        yield f"{above}{slash}{entry.name}/"
                    elif not directories:
                        yield f"{above}{slash}{entry.name}"
    except OSError:
        return


def _agents(_: str) -> Offer:
    return lambda **_: {name: agent.summary for name, agent in AGENTS.items()}


_OFFERS: Final[dict[str, Callable[[str], Offer]]] = {
    "ACCOUNT": _accounts,
    "AGENT": _agents,
    "DIR": _directories,
    "FILE": _files,
    "REQUEST": _requests,
    "SESSION": _sessions,
}

COMMANDS = {"completion": Command(_arguments, _print, "Print a script with which your shell completes `hutch`.")}
