"""Records of requests: numbered, kept until hutchd acknowledges them, reported again after a reconnect.

When the log is full, the broker refuses requests, because it could not record them. Equal refusals within a second
share one record, so that an agent in a loop does not fill the log.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Final

import msgspec

from hutch_shared.broker_link import Record
from hutch_shared.latch import Latch

__all__ = ["RequestLog"]

_WINDOW_MS: Final = 1000
_KINDS: Final = 256


@dataclass(slots=True)
class _Counted:
    record: Record
    until: int


class RequestLog:
    """Records in order, numbered from 1."""

    def __init__(self, limit: int, now_ms: Callable[[], int]) -> None:
        """Keep at most `limit` unacknowledged records of forwarded requests, and up to 512 refusals beyond that."""
        self._limit = limit
        self._now = now_ms
        self._kept: deque[Record] = deque()
        self._kept_of: Counter[str] = Counter()
        self.last = 0
        """The number of the newest record."""
        self._open: dict[tuple[str, str, int | None], _Counted] = {}
        self._added = Latch()
        self.requests = 0
        self.refused = 0

    @property
    def full(self) -> bool:
        """True if there is no space for another record, so that requests must be refused."""
        return len(self._kept) >= self._limit

    @property
    def unacknowledged(self) -> int:
        """The number of records that hutchd has not acknowledged."""
        return len(self._kept) + len(self._open)

    def forwarded(self, record: Record) -> None:
        """Add the record of a forwarded request."""
        self.requests += 1
        self._keep(record)

    def refuse(self, record: Record) -> None:
        """Add the record of a refusal, or count it in an equal record of the same second."""
        self.refused += 1
        kind = (record.lease, record.refused or "", record.uid)
        counted = self._open.get(kind)
        if counted is not None:
            counted.record = msgspec.structs.replace(counted.record, times=counted.record.times + 1)
        elif len(self._open) < _KINDS and len(self._kept) < self._limit + _KINDS:
            self._open[kind] = _Counted(record, self._now() + _WINDOW_MS)
            self._added.notify()

    def close_windows(self) -> float | None:
        """Add the refusals whose second is over to the log; return the seconds until more are due, or None."""
        now = self._now()
        for kind, counted in list(self._open.items()):
            if counted.until <= now:
                del self._open[kind]
                self._keep(counted.record)
        return min(((counted.until - now) / 1000 for counted in self._open.values()), default=None)

    def after(self, n: int, limit: int = 200) -> tuple[Record, ...]:
        """Return at most `limit` records with numbers above `n`."""
        start = max(0, n - self._kept[0].n + 1) if self._kept else 0
        return tuple(islice(self._kept, start, start + limit))

    def acknowledge(self, n: int) -> None:
        """Drop the records up to number `n`."""
        while self._kept and self._kept[0].n <= n:
            session = self._kept.popleft().session
            self._kept_of[session] -= 1
            if not self._kept_of[session]:
                del self._kept_of[session]

    def reported(self, session: str) -> bool:
        """Return whether hutchd acknowledged all records of a session's requests."""
        return session not in self._kept_of

    async def wait(self) -> None:
        """Wait until a record is added; return at once if one was added since the last `wait` returned."""
        await self._added.wait()

    def _keep(self, record: Record) -> None:
        self.last += 1
        self._kept.append(msgspec.structs.replace(record, n=self.last))
        self._kept_of[record.session] += 1
        self._added.notify()

    def __repr__(self) -> str:
        return f"<RequestLog at {self.last}, {len(self._kept)} unacknowledged>"
