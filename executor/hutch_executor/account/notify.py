"""Runs the notify command, as the account: the user's own program that reports a waiting permission request.

It needs the user's desktop, so it runs in no sandbox. What an agent could have changed must not matter to it: it runs
in the account's home, and finds programs in no folder of an agent.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final

import anyio
import msgspec

from hutch_executor.account.commands import run_command
from hutch_executor.account.environment import TEMPORARY, without_places
from hutch_executor.account.setup import Setup, enterable
from hutch_shared import messages as m

__all__ = ["ENVIRONMENT", "run_notify"]

ENVIRONMENT: Final = ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR")
"""Variables that the command always gets, if they are set."""
_STDERR_LIMIT: Final = 2000


async def run_notify(params: m.RunNotify, setup: Setup, folders: Sequence[str] = ()) -> m.Notified:
    """Run the command with the request as one JSON line on its standard input.

    A failure of the command is a result, not an error. The command gets the account's umask, and its PATH without
    relative folders and those in a place of agents: `folders`, those of `params`, temporary folders. After `timeout`
    seconds, and on cancel, its whole process group is killed.
    """
    if not params.command:
        return m.Notified(ok=False, detail="There is no command.")
    inherited = setup.environ()
    env = {name: inherited[name] for name in (*ENVIRONMENT, *params.env) if name in inherited} | params.values
    env["PATH"] = without_places(env.get("PATH", ""), (*folders, *params.folders, *TEMPORARY)) or os.defpath
    stderr = bytearray()
    code: int | None = None

    def keep_end(chunk: bytes) -> None:
        stderr.extend(chunk)
        del stderr[:-_STDERR_LIMIT]

    question = msgspec.json.encode(params.question) + b"\n"
    try:
        with anyio.move_on_after(params.timeout):
            code = await run_command(
                params.command,
                keep_end,
                stdin=question,
                errors_only=True,
                cwd=enterable(env.get("HOME", "/")),
                env=env,
                umask=setup.umask,
            )
    except (OSError, ValueError) as error:
        return m.Notified(ok=False, detail=f"{params.command[0]!r} cannot be started: {error}")
    if code is None:
        return m.Notified(ok=False, detail=f"It did not end within {params.timeout:g} s and was killed.")
    return m.Notified(ok=code == 0, detail=stderr.decode(errors="replace").strip() or f"exit code {code}")
