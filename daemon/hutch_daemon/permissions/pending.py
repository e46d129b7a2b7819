"""The permission requests that wait for a decision, in memory: what the event loop knows beside the store.

Every pending request of the store is here from the moment its commit is announced until its settlement is, so that the
executor's call that waits for it can be woken. A denial that could not be stored is kept here, too, until it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import anyio

from hutch_daemon.permissions.requests import PendingRequest, Settlement
from hutch_daemon.store.rows import PermissionRow

__all__ = ["PendingAsks", "UnstoredDenial"]


@dataclass(frozen=True, slots=True)
class UnstoredDenial:
    """A denial that holds although it could not be stored yet: the record as it will be, and how to store it."""

    row: PermissionRow
    settlement: Settlement


@dataclass(slots=True, eq=False)
class _Ask:
    request: PendingRequest
    settled: anyio.Event = field(default_factory=anyio.Event)


class PendingAsks:
    """For the event loop alone, except `denial`, which a unit of work may call."""

    def __init__(self) -> None:
        """Start without requests."""
        self._asks: dict[str, _Ask] = {}
        self._denials: dict[str, UnstoredDenial] = {}

    def __repr__(self) -> str:
        return f"<PendingAsks {len(self._asks)} pending, {len(self._denials)} denials to store>"

    def __contains__(self, permission: str) -> bool:
        return permission in self._asks

    def __iter__(self) -> Iterator[PendingRequest]:
        """Iterate over the requests as they are now; they may be settled meanwhile."""
        return iter([ask.request for ask in self._asks.values()])

    def add(self, request: PendingRequest) -> None:
        """Let a request wait."""
        self._asks[request.row.id] = _Ask(request)

    def settle(self, row: PermissionRow) -> None:
        """Wake the call that waits for this request, which is settled and stored."""
        self._denials.pop(row.id, None)
        self._wake(row)

    def deny(self, denial: UnstoredDenial) -> None:
        """Let a denial hold now and keep it until it is stored."""
        self._denials[denial.row.id] = denial
        self._wake(denial.row)

    def denial(self, permission: str) -> UnstoredDenial | None:
        """Return the denial of this request that is not stored yet."""
        return self._denials.get(permission)

    def denials(self) -> list[UnstoredDenial]:
        """Return the denials that are not stored yet."""
        return list(self._denials.values())

    async def settled(self, permission: str) -> PermissionRow | None:
        """Return the request when it is settled; None if it is not here, and so settled before.

        Cancelled, the request waits on.
        """
        if (denial := self._denials.get(permission)) is not None:
            return denial.row
        if (ask := self._asks.get(permission)) is None:
            return None
        await ask.settled.wait()
        return ask.request.row

    def _wake(self, row: PermissionRow) -> None:
        if (ask := self._asks.pop(row.id, None)) is not None:
            ask.request.row = row
            ask.settled.set()
