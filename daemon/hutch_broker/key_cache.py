"""Secrets, just in time: asked of hutchd when a lease is first used, held in memory while the lease lives.

One question is under way for a lease, however many requests wait for it; a request that goes away takes nothing from
the others. The owner may have to unlock something first, so a request waits for up to a minute, its body unread.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import anyio
from anyio.abc import TaskGroup

from hutch_broker.leases import HeldLease
from hutch_shared.broker_link import Key, NeedKey
from hutch_shared.errors import HutchError, Reason

__all__ = ["KeyCache"]

_EARLY = 60.0
"""Seconds before its end a token is exchanged for a fresh one."""


@dataclass(slots=True)
class _Flight:
    landed: anyio.Event = field(default_factory=anyio.Event)
    outcome: Key | HutchError = field(default_factory=lambda: HutchError(Reason.TIMED_OUT))


class KeyCache:
    """Asks `ask`, for at most `timeout` seconds; flights run in `tasks`."""

    def __init__(
        self,
        ask: Callable[[NeedKey], Awaitable[Key]],
        timeout: float,
        tasks: TaskGroup,
        clock: Callable[[], float],
    ) -> None:
        """Begin without any."""
        self._ask = ask
        self._timeout = timeout
        self._tasks = tasks
        self._clock = clock
        self._flights: dict[str, _Flight] = {}

    async def of(self, held: HeldLease) -> Key:
        """Return the lease's key, waiting for it; HutchError when it is not to be had."""
        if held.key is not None and (held.key_until is None or self._clock() < held.key_until):
            return held.key
        flight = self._flights.get(held.lease.id)
        if flight is None:
            flight = self._flights[held.lease.id] = _Flight()
            self._tasks.start_soon(self._fly, held, flight)
        await flight.landed.wait()
        if isinstance(flight.outcome, HutchError):
            raise flight.outcome
        return flight.outcome

    async def _fly(self, held: HeldLease, flight: _Flight) -> None:
        try:
            with anyio.move_on_after(self._timeout):
                key = await self._ask(NeedKey(lease=held.lease.id, rejected=held.rejected))
                held.key, held.rejected = key, False
                held.key_until = None
                if key.expires_in is not None:
                    held.key_until = self._clock() + max(key.expires_in - _EARLY, key.expires_in / 2)
                flight.outcome = key
        except HutchError as error:
            flight.outcome = error
        finally:
            del self._flights[held.lease.id]
            flight.landed.set()
