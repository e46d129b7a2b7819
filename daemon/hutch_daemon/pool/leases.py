"""Sessions that wait for an executor, oldest first."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import anyio

from hutch_daemon.pool.executors import Executor
from hutch_daemon.pool.view import ExecutorKey, LeaseView

__all__ = ["LeaseRequest", "WaitingLeases"]


class LeaseRequest:
    """A session's request for an executor. It ends with an executor or an error."""

    def __init__(self, session: str, key: ExecutorKey) -> None:
        self.session = session
        self.key = key
        self.executor: Executor | None = None
        self._error: Exception | None = None
        self._settled = anyio.Event()

    def __repr__(self) -> str:
        return f"<LeaseRequest {self.session} {self.key}: {self.executor or self._error or 'waiting'}>"

    def grant(self, executor: Executor) -> None:
        """End the wait with an executor."""
        self.executor = executor
        self._settled.set()

    def refuse(self, error: Exception) -> None:
        """End the wait with an error, which `wait` raises."""
        self._error = error
        self._settled.set()

    async def wait(self) -> Executor:
        """Wait for the executor and return it, or raise the error. If cancelled, check whether `executor` is set."""
        await self._settled.wait()
        if self.executor is None:
            assert self._error is not None
            raise self._error
        return self.executor


class WaitingLeases:
    """The queue of waiting leases. `changed` is called when a lease joins the queue, or leaves it after its wait."""

    def __init__(self, changed: Callable[[], None]) -> None:
        self._changed = changed
        self._numbers = count(1)
        self._leases: dict[int, LeaseRequest] = {}

    def __repr__(self) -> str:
        return f"<WaitingLeases {len(self._leases)}>"

    def __bool__(self) -> bool:
        return bool(self._leases)

    async def wait(self, lease: LeaseRequest) -> Executor:
        """Queue a lease and wait for its executor. If cancelled, remove the lease from the queue."""
        number = next(self._numbers)
        self._leases[number] = lease
        self._changed()
        try:
            return await lease.wait()
        finally:
            self._leases.pop(number, None)
            self._changed()

    def take(self, number: int) -> LeaseRequest:
        """Remove a lease from the queue and return it."""
        return self._leases.pop(number)

    def take_first(self, key: ExecutorKey) -> LeaseRequest | None:
        """Remove the oldest lease of a key from the queue and return it; None if there is none."""
        number = next((number for number, lease in self._leases.items() if lease.key == key), None)
        return None if number is None else self._leases.pop(number)

    def keys(self) -> set[ExecutorKey]:
        """Return the keys of the waiting leases."""
        return {lease.key for lease in self._leases.values()}

    def view(self) -> tuple[LeaseView, ...]:
        """Return the waiting leases for the plan, oldest first."""
        return tuple(LeaseView(number, lease.key) for number, lease in self._leases.items())
