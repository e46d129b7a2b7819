"""run: a prompt, its stream, its questions, its end."""

from __future__ import annotations

import argparse
import os
import sys

import anyio
import msgspec

from hutch_client import exits, starting
from hutch_client.client import HutchClient
from hutch_client.commands import Command
from hutch_client.commands.sessions import MODES
from hutch_client.endpoint import socket_path
from hutch_client.tables import print_json
from hutch_client.untrusted import one_line
from hutch_client.watch import Manner, Watch
from hutch_shared import messages as m
from hutch_shared.errors import HutchError, Reason

__all__ = ["COMMANDS"]


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", metavar="PROMPT", nargs="?", help="- (or nothing, in a pipe): from standard input")
    parser.add_argument("-C", "--directory", metavar="DIR", help="work there (default: the present directory)")
    parser.add_argument("--session", metavar="SESSION", help="go on in this session: id, beginning of an id, or name")
    parser.add_argument("--agent", help="claude (the default), script, …")
    parser.add_argument("--name", help="name of the new session")
    parser.add_argument("--mode", choices=MODES, help="what may happen without asking")
    parser.add_argument("--allow", action="append", default=[], metavar="RULE", help="such as 'Bash(npm test:*)'")
    parser.add_argument("--ask", action="append", default=[], metavar="RULE")
    parser.add_argument("--deny", action="append", default=[], metavar="RULE")
    parser.add_argument("--model")
    parser.add_argument("--script", metavar="FILE", help="with --agent script: the JSON lines that it plays")
    parser.add_argument("--when-nobody", choices=("wait", "deny", "stop"), help="when nobody is there to answer")
    parser.add_argument("-d", "--detach", action="store_true", help="print the session's id and leave")
    parser.add_argument("-o", "--output", choices=("text", "jsonl", "json"), default="text")
    parser.add_argument("--no-input", action="store_true", help="exit 5 when something is asked")
    parser.add_argument("--timeout", type=float, metavar="S", help="stop the turn after so many seconds")


_OF_NEW_SESSIONS = ("directory", "agent", "name", "mode", "allow", "ask", "deny", "model", "script", "when_nobody")


def _run(given: argparse.Namespace) -> int:
    misplaced = [name for name in _OF_NEW_SESSIONS if getattr(given, name)] if given.session else []
    if misplaced:
        option = misplaced[0].replace("_", "-")
        raise HutchError(Reason.INVALID_PARAMS, f"--{option} is for a new session; {given.session} has its own.")
    prompt = _read_prompt(given.prompt)
    _ensure_daemon()
    return anyio.run(_talk, given, prompt)


def _read_prompt(prompt: str | None) -> str:
    if prompt is None and sys.stdin.isatty():
        raise HutchError(Reason.INVALID_PARAMS, "What is to be done? Give a prompt: `hutch run 'fix the tests'`.")
    text = sys.stdin.buffer.read().decode(errors="replace") if prompt in (None, "-") else prompt
    if not text or not text.strip():
        raise HutchError(Reason.INVALID_PARAMS, "The prompt is empty.")
    return text


def _ensure_daemon() -> None:
    """Start the user's hutchd when there is none; what HUTCH_HOST names is somebody else's to start."""
    if "HUTCH_HOST" not in os.environ and not starting.is_running(socket_path()):
        pid = starting.start()
        if pid is not None:
            print(f"Started hutchd (pid {pid}); `hutch daemon stop` ends it.", file=sys.stderr)


async def _talk(given: argparse.Namespace, prompt: str) -> int:
    async with HutchClient.connect() as hutch:
        if given.session:
            session = await hutch.get_session(given.session)
        else:
            session = await hutch.open_session(_new_session(given))
        if session.warning:
            print(f"! {one_line(session.warning)}", file=sys.stderr)
        turn = await hutch.submit_prompt(session.id, prompt, timeout=given.timeout)
        if session.active_turn is not None:
            print("Queued: another turn of this session runs.", file=sys.stderr)
        if given.detach:
            print_json({"session": session.id, "turn": turn.id}) if given.output == "json" else print(session.id)
            return exits.OK
        print(f"{session.id}  {one_line(session.name)}  {session.agent}  keys: {session.keys}", file=sys.stderr)
        if session.keys == "exposed" and session.isolation.keys_why:
            print(f"! {one_line(session.isolation.keys_why)}", file=sys.stderr)
        manner = Manner(given.output, "refuse" if given.no_input else "inline", prompts=False)
        code = await Watch(hutch, session.id, manner, turn=turn.id).run(session.head_seq, session.journal)
        if given.output == "json":
            print_json(msgspec.to_builtins(await hutch.get_turn(turn.id)))
        return code


def _new_session(given: argparse.Namespace) -> m.OpenSession:
    cwd = os.path.realpath(given.directory or ".")
    if not os.path.isdir(cwd):
        raise HutchError(Reason.INVALID_PARAMS, f"There is no directory {cwd}.")
    script = given.script and os.path.abspath(given.script)
    return m.OpenSession(
        agent=given.agent or ("script" if script else "claude"),
        cwd=cwd,
        name=given.name,
        permission_mode=given.mode,
        when_nobody=given.when_nobody,
        rules=m.Rules(tuple(given.allow), tuple(given.ask), tuple(given.deny)),
        options=m.AgentOptions(model=given.model, script=script),
    )


COMMANDS = {"run": Command(_arguments, _run, "Run a prompt in a new session, or in one that is there.")}
