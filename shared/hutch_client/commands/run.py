"""run: the arguments of `hutch run`. The work is in `running`."""

from __future__ import annotations

import argparse
from typing import Final

from hutch_client.commands import Command, output, seconds
from hutch_client.commands.sessions import LEVELS, MODES
from hutch_shared.agents import AGENTS, DEFAULT_AGENT

__all__ = ["COMMANDS"]


_EFFECTS: Final = {
    "allow": "allow it, such as 'Bash(npm test:*)'",
    "ask": "always ask, even where another rule allows it",
    "deny": "deny it, even where another rule allows it",
}


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "prompt", metavar="PROMPT", nargs="?", help="the task; - (or nothing, in a pipe) reads it from standard input"
    )
    parser.add_argument("-C", "--directory", metavar="DIR", help="working directory (default: the current one)")
    parser.add_argument("--session", metavar="SESSION", help="continue this session: id, prefix of an id, or name")
    parser.add_argument("--agent", metavar="AGENT", help=f"{', '.join(AGENTS)} (default: {DEFAULT_AGENT})")
    parser.add_argument("--name", help="name of the new session")
    parser.add_argument(
        "--account", metavar="ACCOUNT", help="run as this Unix account (default: the one that the settings map you to)"
    )
    parser.add_argument(
        "--isolation",
        choices=LEVELS,
        help="the lowest isolation level; the session is refused if the host offers less (default: the setting"
        " isolation.require)",
    )
    parser.add_argument("--mode", choices=MODES, help="what runs without a permission request")
    for name, doc in _EFFECTS.items():
        parser.add_argument(f"--{name}", action="append", default=[], metavar="RULE", help=doc)
    parser.add_argument("--model", help="the agent's model (default: the agent's own choice)")
    parser.add_argument("--script", metavar="FILE", help="with --agent script: the JSON lines to play")
    parser.add_argument(
        "--when-nobody",
        choices=("wait", "deny", "stop"),
        help="what happens to a permission request if no client can answer it (default: the setting when_nobody)",
    )
    parser.add_argument("-d", "--detach", action="store_true", help="print the session's id and return at once")
    output(parser, "text", "jsonl", "json")
    parser.add_argument("--no-input", action="store_true", help="exit with 5 on a permission request")
    parser.add_argument("--timeout", type=seconds, metavar="S", help="stop the turn after S seconds")


def _run(given: argparse.Namespace) -> int:
    from hutch_client.commands import running  # late: help and completion do not need it

    return running.run(given)


COMMANDS = {"run": Command(_arguments, _run, "Run a prompt in a new or an existing session.")}
