"""The permission requests that wait for a decision, in memory beside the store.

A request is here from the callbacks of the commit that records it until the callbacks of the commit that settles it, so
that the executor's waiting call can be woken. A denial that could not be stored is also kept here until it is stored.
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
    """A denial in force that could not be stored yet: the record after it, and the settlement to store."""

    row: PermissionRow
    settlement: Settlement


@dataclass(slots=True, eq=False)
class _Ask:
    request: PendingRequest
    settled: anyio.Event = field(default_factory=anyio.Event)


class PendingAsks:
    """Pending requests by id. Call it only on the event loop, except `denial`, which a unit of work may call too."""

    def __init__(self) -> None:
        """Start without requests."""
        self._asks: dict[str, _Ask] = {}
        self._denials: dict[str, UnstoredDenial] = {}

    def __repr__(self) -> str:
        return f"<PendingAsks {len(self._asks)} pending, {len(self._denials)} denials to store>"

    def __len__(self) -> int:
        return len(self._asks)

    def __contains__(self, permission: str) -> bool:
        return permission in self._asks

    def __iter__(self) -> Iterator[PendingRequest]:
        """Iterate over a copy of the list of requests; some may be settled during the iteration."""
        return iter([ask.request for ask in self._asks.values()])

    def add(self, request: PendingRequest) -> None:
        """Add a pending request."""
        self._asks[request.row.id] = _Ask(request)

    def settle(self, row: PermissionRow) -> None:
        """Remove a request whose settlement is stored, and wake the call that waits for it."""
        self._denials.pop(row.id, None)
        self._wake(row)

    def deny(self, denial: UnstoredDenial) -> None:
        """Wake the waiting call with a denial, and keep the denial until it is stored."""
        self._denials[denial.row.id] = denial
        self._wake(denial.row)

    def get(self, permission: str) -> PendingRequest | None:
        """Return the pending request with this id, or None."""
        ask = self._asks.get(permission)
        return None if ask is None else ask.request

    def denial(self, permission: str) -> UnstoredDenial | None:
        """Return this request's denial if it is not stored yet, or None."""
        return self._denials.get(permission)

    def denials(self) -> list[UnstoredDenial]:
        """Return the denials that are not stored yet."""
        return list(self._denials.values())

    async def settled(self, permission: str) -> PermissionRow | None:
        """Wait until the request is settled, and return it; None if it was settled before.

        If the caller is cancelled, the request stays pending.
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
