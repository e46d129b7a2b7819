"""The notify command: tells a person, in a way of their own, that a question waits. It runs as the account."""

from __future__ import annotations

from typing import Final

import anyio
import msgspec

from hutch_executor.account.commands import run_command
from hutch_executor.account.setup import Setup
from hutch_shared import messages as m

__all__ = ["ENVIRONMENT", "run_notify"]

ENVIRONMENT: Final = ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR")
"""Names that the command always gets, where they are set."""
_STDERR_LIMIT: Final = 2000


async def run_notify(params: m.RunNotify, setup: Setup) -> m.Notified:
    """Run the command with the question as one JSON line on its standard input; never raises for what it does.

    It has the account's set-up as the agent has it. It gets `timeout` seconds; then, as on cancel, its whole process
    group is killed.
    """
    if not params.command:
        return m.Notified(ok=False, detail="There is no command.")
    given = setup.environ()
    env = {name: given[name] for name in (*ENVIRONMENT, *params.env) if name in given} | params.values
    said = bytearray()
    code: int | None = None

    def keep_end(chunk: bytes) -> None:
        said.extend(chunk)
        del said[:-_STDERR_LIMIT]

    question = msgspec.json.encode(params.question) + b"\n"
    try:
        with anyio.move_on_after(params.timeout):
            code = await run_command(
                params.command, keep_end, question=question, errors_only=True, env=env, umask=setup.umask
            )
    except (OSError, ValueError) as error:
        return m.Notified(ok=False, detail=f"{params.command[0]!r} cannot be started: {error}")
    if code is None:
        return m.Notified(ok=False, detail=f"It did not end within {params.timeout:g} s and was killed.")
    return m.Notified(ok=code == 0, detail=said.decode(errors="replace").strip() or f"exit code {code}")
