"""run: a prompt, its stream, its questions, its end. What it does is in `running`."""

from __future__ import annotations

import argparse

from hutch_client.commands import Command, output, seconds
from hutch_client.commands.sessions import LEVELS, MODES
from hutch_shared.agents import AGENTS, DEFAULT_AGENT

__all__ = ["COMMANDS"]


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "prompt", metavar="PROMPT", nargs="?", help="what is to be done; - (or nothing, in a pipe): from standard input"
    )
    parser.add_argument("-C", "--directory", metavar="DIR", help="work there (default: the present directory)")
    parser.add_argument("--session", metavar="SESSION", help="go on in this session: id, beginning of an id, or name")
    parser.add_argument("--agent", metavar="AGENT", help=f"{', '.join(AGENTS)} (default: {DEFAULT_AGENT})")
    parser.add_argument("--name", help="name of the new session")
    parser.add_argument(
        "--account", metavar="ACCOUNT", help="run as this Unix account (default: the one that the settings map you to)"
    )
    parser.add_argument(
        "--isolation",
        choices=LEVELS,
        help="the least that must separate it from others; refused where the host cannot give that (default: the"
        " settings' isolation.require)",
    )
    parser.add_argument("--mode", choices=MODES, help="what may happen without asking")
    parser.add_argument(
        "--allow", action="append", default=[], metavar="RULE", help="lets it happen: 'Bash(npm test:*)'"
    )
    parser.add_argument("--ask", action="append", default=[], metavar="RULE", help="asks, whatever allows it")
    parser.add_argument("--deny", action="append", default=[], metavar="RULE", help="refuses it, whatever allows it")
    parser.add_argument("--model", help="the agent's model (default: the agent's own choice)")
    parser.add_argument("--script", metavar="FILE", help="with --agent script: the JSON lines that it plays")
    parser.add_argument(
        "--when-nobody",
        choices=("wait", "deny", "stop"),
        help="what becomes of a question when nobody is there to answer (default: the settings' when_nobody)",
    )
    parser.add_argument("-d", "--detach", action="store_true", help="print the session's id and leave")
    output(parser, "text", "jsonl", "json")
    parser.add_argument("--no-input", action="store_true", help="exit 5 when something is asked")
    parser.add_argument("--timeout", type=seconds, metavar="S", help="stop the turn after so many seconds")


def _run(given: argparse.Namespace) -> int:
    from hutch_client.commands import running  # late: help and completion come without it

    return running.run(given)


COMMANDS = {"run": Command(_arguments, _run, "Run a prompt in a new session, or in one that is there.")}
