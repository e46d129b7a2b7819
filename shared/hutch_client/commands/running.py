"""`hutch run`, `hutch compact`, `hutch clear`: open or find a session, queue a turn and watch it."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Awaitable, Callable
from typing import Literal

import anyio
import msgspec

from hutch_client import exits, starting
from hutch_client.client import HutchClient
from hutch_client.commands.sessions import is_other_account, real_directory
from hutch_client.endpoint import socket_path
from hutch_client.tables import print_json
from hutch_client.untrusted import one_line
from hutch_client.waiting import waiting_for
from hutch_client.watch import TurnWatch
from hutch_client.watch_options import WatchOptions
from hutch_shared import messages as m
from hutch_shared.agents import DEFAULT_AGENT
from hutch_shared.encoding import require_utf8
from hutch_shared.errors import HutchError, Reason

__all__ = ["clear", "compact", "run"]

_OF_NEW_SESSIONS = (
    *("directory", "agent", "name", "account", "isolation", "mode", "allow", "ask", "deny", "model", "script"),
    "when_nobody",
)


def run(given: argparse.Namespace) -> int:
    """Run the command with the arguments of `commands.run`; return the exit code."""
    misplaced = [name for name in _OF_NEW_SESSIONS if getattr(given, name)] if given.session else []
    if misplaced:
        option = misplaced[0].replace("_", "-")
        raise HutchError(Reason.INVALID_PARAMS, f"--{option} is for a new session; {given.session} has its own.")
    opened = None if given.session else _new_session(given)  # first, so that wrong arguments start nothing
    prompt = _read_prompt(given.prompt)
    _report_command(prompt)
    _ensure_daemon()
    return anyio.run(_talk, given, opened, prompt)


def compact(given: argparse.Namespace) -> int:
    """Replace the session's conversation by a summary; return the exit code."""
    words = " ".join(given.words)
    return anyio.run(_change, given, lambda hutch, id_: hutch.compact_session(id_, words, timeout=given.timeout))


def clear(given: argparse.Namespace) -> int:
    """Begin an empty conversation in the session; return the exit code."""
    return anyio.run(_change, given, lambda hutch, id_: hutch.clear_session(id_))


async def _change(given: argparse.Namespace, queue: Callable[[HutchClient, str], Awaitable[m.Turn]]) -> int:
    async with HutchClient.connect() as hutch:
        session = await _find(hutch, given.session)
        turn = await queue(hutch, session.id)
        if given.detach:
            print_json({"session": session.id, "turn": turn.id}) if given.output == "json" else print(turn.id)
            return exits.OK
        return await _watch(hutch, given, session, turn, "inline")


def _read_prompt(prompt: str | None) -> str:
    if prompt is None and sys.stdin.isatty():
        raise HutchError(Reason.INVALID_PARAMS, "There is no prompt. Give one: `hutch run 'fix the tests'`.")
    text = sys.stdin.buffer.read().decode(errors="replace") if prompt in (None, "-") else prompt
    if not text or not text.strip():
        raise HutchError(Reason.INVALID_PARAMS, "The prompt is empty. Give the task in words.")
    return text


def _report_command(prompt: str) -> None:
    """Name the command that does what the prompt would do in the agent's own program; the model gets it as words."""
    if (command := prompt.strip()) in ("/compact", "/clear"):
        verb = command[1:]
        print(f"! {command} goes to the model as words; `hutch {verb} SESSION` is the command.", file=sys.stderr)


def _ensure_daemon() -> None:
    """Start the user's hutchd if that is the one to talk to and it does not run. `starting.start` refuses any other."""
    if not starting.is_running(socket_path()):
        pid = starting.start()
        if pid is not None:
            print(f"Started hutchd (pid {pid}); `hutch daemon stop` stops it.", file=sys.stderr)


async def _talk(given: argparse.Namespace, opened: m.OpenSession | None, prompt: str) -> int:
    async with HutchClient.connect() as hutch:
        async with waiting_for(lambda: _refusal(hutch)):
            session = await (hutch.open_session(opened) if opened else _find(hutch, given.session))
        if session.warning:
            print(f"! {one_line(session.warning)}", file=sys.stderr)
        async with waiting_for(lambda: _refusal(hutch)):
            turn = await hutch.submit_prompt(session.id, prompt, timeout=given.timeout)
        if given.detach:
            _report_queued(session)
            print_json({"session": session.id, "turn": turn.id}) if given.output == "json" else print(session.id)
            return exits.OK
        print(_headline(session), file=sys.stderr)
        if session.keys == "exposed" and session.isolation.keys_why:
            print(f"! {one_line(session.isolation.keys_why)}", file=sys.stderr)
        return await _watch(hutch, given, session, turn, "refuse" if given.no_input else "inline")


async def _watch(
    hutch: HutchClient,
    given: argparse.Namespace,
    session: m.Session,
    turn: m.Turn,
    questions: Literal["inline", "refuse"],
) -> int:
    """Watch the turn to its end; return the exit code."""
    _report_queued(session)
    options = WatchOptions(given.output, questions, prompts=False)
    code = await TurnWatch(hutch, session.id, options, turn=turn.id).run(session.head_seq, session.journal)
    if given.output == "json":
        print_json(msgspec.to_builtins(await hutch.get_turn(turn.id)))
    return code


def _report_queued(session: m.Session) -> None:
    if session.active_turn is not None:
        print("Queued: another turn of this session is running.", file=sys.stderr)


def _headline(session: m.Session) -> str:
    words = [session.id, one_line(session.name), session.agent]
    if is_other_account(session.account):
        words.append(f"as {one_line(session.account)}")
    return "  ".join([*words, f"isolation: {session.isolation.level}", f"keys: {session.keys}"])


async def _find(hutch: HutchClient, ref: str) -> m.Session:
    """Return the session to continue. HutchError SESSION_CLOSED, with the alternatives, if it is closed."""
    session = await hutch.get_session(ref)
    if session.state == "closed":
        fork = f"`hutch fork {ref}` opens one that continues its conversation, and " if session.agent_session else ""
        raise HutchError(
            Reason.SESSION_CLOSED, f"{ref} is closed: {fork}`hutch run` without --session opens a new one."
        )
    return session


def _refusal(hutch: HutchClient) -> str:
    return f"hutchd: {hutch.refusal.message}" if hutch.refusal else "hutchd, which has not answered yet"


def _new_session(given: argparse.Namespace) -> m.OpenSession:
    cwd = real_directory(given.directory, other=given.account is not None)
    script = given.script and require_utf8(os.path.abspath(given.script))
    if script and given.agent not in (None, "script"):
        raise HutchError(Reason.INVALID_PARAMS, f"--script is for `--agent script`, not for {given.agent}.")
    if script and not given.account:  # another account may be able to read a script that the caller cannot
        try:
            open(script, "rb").close()
        except OSError as error:
            raise HutchError(Reason.INVALID_PARAMS, f"{script} cannot be read: {error.strerror}.") from None
    return m.OpenSession(
        agent=given.agent or ("script" if script else DEFAULT_AGENT),
        cwd=cwd,
        real_cwd=os.path.isdir(cwd) and os.path.realpath(cwd) == cwd,
        name=given.name,
        account=given.account,
        isolation=given.isolation,
        permission_mode=given.mode,
        when_nobody=given.when_nobody,
        rules=m.Rules(tuple(given.allow), tuple(given.ask), tuple(given.deny)),
        options=m.AgentOptions(model=given.model, script=script),
    )
