"""The notify command: tells a person, in a way of their own, that a question waits. It runs as the account."""

from __future__ import annotations

import os
import subprocess
from contextlib import suppress
from typing import Final

import anyio
import msgspec
from anyio.abc import ByteReceiveStream, Process

from hutch_executor.commands import running
from hutch_shared import messages as m

__all__ = ["ENVIRONMENT", "run_notify"]

ENVIRONMENT: Final = ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR")
"""Names that the command always gets, where they are set."""
_STDERR_LIMIT: Final = 2000


async def run_notify(params: m.RunNotify) -> m.Notified:
    """Run the command with the question as one JSON line on its standard input; never raises for what it does.

    It gets `timeout` seconds; then, as on cancel, its whole process group is killed.
    """
    if not params.command:
        return m.Notified(ok=False, detail="There is no command.")
    names = (*ENVIRONMENT, *params.env)
    env = {name: os.environ[name] for name in names if name in os.environ}
    said = b""
    try:
        async with running(params.command, stdout=subprocess.DEVNULL, env=env) as process:
            with anyio.move_on_after(params.timeout) as deadline:
                said = await _converse(process, msgspec.json.encode(params.question) + b"\n")
    except (OSError, ValueError) as error:
        return m.Notified(ok=False, detail=f"{params.command[0]!r} cannot be started: {error}")
    if deadline.cancelled_caught:
        return m.Notified(ok=False, detail=f"It did not end within {params.timeout:g} s and was killed.")
    text = said.decode(errors="replace").strip()
    return m.Notified(ok=process.returncode == 0, detail=text or f"exit code {process.returncode}")


async def _converse(process: Process, question: bytes) -> bytes:
    """Give it the question, return the end of what it says on standard error, and wait for its end."""
    assert process.stdin is not None
    assert process.stderr is not None
    said = bytearray()

    async def listen(stream: ByteReceiveStream) -> None:
        async for chunk in stream:
            said.extend(chunk)
            del said[:-_STDERR_LIMIT]

    async with anyio.create_task_group() as group:
        group.start_soon(listen, process.stderr)
        with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
            await process.stdin.send(question)
        with suppress(anyio.BrokenResourceError, OSError):
            await process.stdin.aclose()
        await process.wait()
        group.cancel_scope.cancel()
    return bytes(said)
