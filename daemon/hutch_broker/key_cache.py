"""The keys behind leases: requested from hutchd at first use, kept in memory while the lease lives.

All requests of a lease wait for the same call to hutchd. A cancelled request does not cancel that call. The key's owner
may have to replace the key first, so a request can wait up to a minute; its body stays unread meanwhile.
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
"""Seconds before a token expires when the broker requests a new one."""


@dataclass(slots=True)
class _KeyCall:
    done: anyio.Event = field(default_factory=anyio.Event)
    outcome: Key | HutchError = field(default_factory=lambda: HutchError(Reason.TIMED_OUT))


class KeyCache:
    """The keys of live leases, and the running calls for keys that are missing."""

    def __init__(
        self,
        ask: Callable[[NeedKey], Awaitable[Key]],
        timeout: float,
        tasks: TaskGroup,
        clock: Callable[[], float],
    ) -> None:
        """`ask` requests a key; each call runs in `tasks` and may take `timeout` seconds."""
        self._ask = ask
        self._timeout = timeout
        self._tasks = tasks
        self._clock = clock
        self._calls: dict[str, _KeyCall] = {}

    async def of(self, held: HeldLease) -> Key:
        """Return the lease's key, requesting it from hutchd if necessary. HutchError if it is not available."""
        if held.key is not None and (held.key_until is None or self._clock() < held.key_until):
            return held.key
        call = self._calls.get(held.lease.id)
        if call is None:
            call = self._calls[held.lease.id] = _KeyCall()
            self._tasks.start_soon(self._request, held, call)
        await call.done.wait()
        if isinstance(call.outcome, HutchError):
            raise call.outcome
        return call.outcome

    async def _request(self, held: HeldLease, call: _KeyCall) -> None:
        try:
            with anyio.move_on_after(self._timeout):
                key = await self._ask(NeedKey(lease=held.lease.id, rejected=held.rejected))
                held.key, held.rejected = key, False
                held.key_until = None
                if key.expires_in is not None:
                    held.key_until = self._clock() + max(key.expires_in - _EARLY, key.expires_in / 2)
                call.outcome = key
        except HutchError as error:
            call.outcome = error
        finally:
            del self._calls[held.lease.id]
            call.done.set()
