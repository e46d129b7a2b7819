"""Runs a request's work in a task of the executor, so that a lost connection cancels only the wait for the result."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

import anyio

from hutch_shared.errors import HutchError
from hutch_shared.rpc.dispatch import internal_error

__all__ = ["BackgroundCall"]

R = TypeVar("R")


class BackgroundCall(Generic[R]):
    """One run of `work`, and its result for every caller that waits."""

    def __init__(self, work: Callable[[], Awaitable[R]]) -> None:
        """Keep `work`; the caller starts `run` in a task."""
        self._work = work
        self._done = anyio.Event()
        self._result: R
        self._error: HutchError | None = None

    async def run(self) -> None:
        """Run the work and keep its result or its HutchError. Any other exception is logged and becomes `internal`."""
        try:
            self._result = await self._work()
        except HutchError as error:
            self._error = error
        except Exception:  # noqa: BLE001  # the boundary: the caller gets an id that the log explains
            self._error = internal_error("a request")
        except BaseException:
            self._error = internal_error("a cancelled request")
            raise
        finally:
            self._done.set()

    async def wait(self) -> R:
        """Return the result when the work is done, or raise its HutchError. A cancel stops only this wait."""
        await self._done.wait()
        if self._error is not None:
            raise self._error
        return self._result
