"""Commands that the executor runs as the account: each leads a session of its own, and its process group ends with it.

Their output comes through a pipe of ours, not of asyncio's: that waits (Python 3.12 and 3.13) until all who hold the
pipe are gone, and a child in the background may hold it for ever.
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
    question: bytes = b"",
    errors_only: bool = False,
    **options: Any,
) -> int:
    """Run `argv` with `question` as its standard input, give `take` what it says, return its exit code.

    That is standard output and error together, or standard error alone with `errors_only`. After the command's end a
    child in the background that holds its output is listened to for a second. At the end, as on cancel, the process
    group is killed. OSError or ValueError when it cannot be started.
    """
    reading, writing = os.pipe()
    try:
        os.set_blocking(reading, False)
        try:
            # shielded: cancelled half-way, asyncio would leave a process that nobody knows
            with _as_file(question) as given, anyio.CancelScope(shield=True):
                process = await anyio.open_process(
                    argv,
                    stdin=given,
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
                group.start_soon(_listen, reading, take, all_read)
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


def _as_file(text: bytes) -> IO[bytes]:
    if not text:
        return open(os.devnull, "rb")
    file = tempfile.TemporaryFile()  # noqa: SIM115  # its user closes it
    file.write(text)
    file.seek(0)
    return file


async def _listen(reading: int, take: Callable[[bytes], object], all_read: anyio.Event) -> None:
    while True:
        await anyio.wait_readable(reading)
        with suppress(BlockingIOError):
            chunk = os.read(reading, _CHUNK)
            if not chunk:
                break
            take(chunk)
    all_read.set()
