"""Says what a command waits for when it takes long: the person sees that it lives, and what to look at."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

import anyio

from hutch_client.streams import columns
from hutch_client.untrusted import one_line

__all__ = ["long_enough", "telling"]

_LOOKS: Final = 20
_BETWEEN: Final = 0.1
_ERASE: Final = "\r\x1b[2K"


async def long_enough() -> None:
    """Return after about 2 s in which this process had time to work: a machine that stalls has not waited."""
    for _ in range(_LOOKS):
        await anyio.sleep(_BETWEEN)


@asynccontextmanager
async def telling(what: Callable[[], str]) -> AsyncIterator[None]:
    """Say `what` is waited for while the body takes longer than 2 s.

    On a terminal in a line that is kept up to date and taken away at the end, else in one line on standard error.
    """
    failure = None
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_tell, what)
        try:
            yield
        except Exception as error:  # noqa: BLE001 - raised again below, as it is and not in a group
            failure = error
        tasks.cancel_scope.cancel()
    if failure is not None:
        raise failure


async def _tell(what: Callable[[], str]) -> None:
    await long_enough()
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
