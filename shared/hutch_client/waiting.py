"""Reports what a command waits for, if the wait is long."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

import anyio

from hutch_client.streams import columns
from hutch_client.untrusted import one_line

__all__ = ["two_seconds", "waiting_for"]

_LOOKS: Final = 20
_BETWEEN: Final = 0.1
_ERASE: Final = "\r\x1b[2K"


async def two_seconds() -> None:
    """Return after about 2 s of running time: while the whole machine stalls, the time does not count."""
    for _ in range(_LOOKS):
        await anyio.sleep(_BETWEEN)


@asynccontextmanager
async def waiting_for(what: Callable[[], str]) -> AsyncIterator[None]:
    """While the body runs longer than 2 s, print what the command waits for on standard error.

    On a terminal it is one line that is updated, and erased at the end; elsewhere one line is printed once.
    """
    failure = None
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_report, what)
        try:
            yield
        except Exception as error:  # noqa: BLE001 - raised again below, as it is and not in a group
            failure = error
        tasks.cancel_scope.cancel()
    if failure is not None:
        raise failure


async def _report(what: Callable[[], str]) -> None:
    await two_seconds()
    if not sys.stderr.isatty():
        print(f"Waiting for {one_line(what())}", file=sys.stderr, flush=True)
        return
    waited = _LOOKS * _BETWEEN
    try:
        while True:
            line = one_line(f"Waiting ({waited:.0f} s) for {what()}", max(20, columns(2) - 1))
            print(f"{_ERASE}{line}", end="", file=sys.stderr, flush=True)
            await anyio.sleep(1)
            waited += 1
    finally:
        print(_ERASE, end="", file=sys.stderr, flush=True)
