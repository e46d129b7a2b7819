"""Commands that the executor starts: each leads a session of its own, and its process group ends with its use."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import anyio
from anyio.abc import Process

__all__ = ["running"]


@asynccontextmanager
async def running(argv: Sequence[str], **options: Any) -> AsyncIterator[Process]:
    """Run `argv` while the body runs; on leaving, however, its process group is killed.

    OSError or ValueError when it cannot be started. Starting is not cancelled half-way: that would leave a process
    that nobody knows.
    """
    with anyio.CancelScope(shield=True):
        process = await anyio.open_process(argv, start_new_session=True, **options)
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with anyio.CancelScope(shield=True):
            await process.aclose()
