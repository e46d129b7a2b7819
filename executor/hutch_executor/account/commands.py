"""Runs a command as the account, in a session of its own; its process group is killed when it ends.

The output comes through a pipe made here, not through asyncio's. asyncio (Python 3.12 and 3.13) waits until every
holder of the pipe has closed it, and a background child may hold it forever.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import IO, Any, Final

import anyio

__all__ = ["run_command"]

_LINGER: Final = 1.0
_CHUNK: Final = 1 << 16


async def run_command(
    argv: Sequence[str],
    take: Callable[[bytes], object],
    *,
    stdin: bytes = b"",
    errors_only: bool = False,
    **options: Any,
) -> int:
    """Run `argv` with `stdin` as its standard input, pass its output to `take`, and return its exit code.

    The output is standard output and error together, or standard error alone with `errors_only`. If a background child
    still holds the output when the command ends, reading goes on for a second. Then, and on cancel, the process group
    is killed. `options` go to the process. OSError or ValueError if the command cannot be started.
    """
    reading, writing = os.pipe()
    try:
        os.set_blocking(reading, False)
        try:
            # shielded: cancelled half-way, asyncio would leave a process that no code waits for
            with _as_file(stdin) as stdin_file, anyio.CancelScope(shield=True):
                process = await anyio.open_process(
                    argv,
                    stdin=stdin_file,
                    stdout=subprocess.DEVNULL if errors_only else writing,
                    stderr=writing,
                    start_new_session=True,
                    **options,
                )
        finally:
            os.close(writing)
        try:
            async with anyio.create_task_group() as group:
                all_read = anyio.Event()
                group.start_soon(_read, reading, take, all_read)
                code = await process.wait()
                with anyio.move_on_after(_LINGER):
                    await all_read.wait()
                group.cancel_scope.cancel()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with anyio.CancelScope(shield=True):
                await process.wait()
    finally:
        os.close(reading)
    return code


def _as_file(content: bytes) -> IO[bytes]:
    if not content:
        return open(os.devnull, "rb")
    file = tempfile.TemporaryFile()  # noqa: SIM115  # the caller closes it
    file.write(content)
    file.seek(0)
    return file


async def _read(reading: int, take: Callable[[bytes], object], all_read: anyio.Event) -> None:
    while True:
        await anyio.wait_readable(reading)
        with suppress(BlockingIOError):
            chunk = os.read(reading, _CHUNK)
            if not chunk:
                break
            take(chunk)
    all_read.set()
