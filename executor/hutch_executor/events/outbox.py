"""The events that hutchd has not acknowledged: numbered, in order; the older ones in the spool, the rest in memory.

Pure. Always true, for the executor's own numbers n:

    1 … acked | acked+1 … spooled | spooled+1 … last        (each part may be empty)
    gone      | in the spool file | in memory

`sent` is the last number written to the current connection. Each new connection resets it to `acked`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["BATCH_BYTES", "BATCH_COUNT", "EventBatch", "Outbox"]

BATCH_COUNT: Final = 256
BATCH_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class EventBatch:
    """Consecutive events from number `first` on, as the bytes that go on the wire."""

    first: int
    events: tuple[bytes, ...]

    @property
    def last(self) -> int:
        """The number of the last event."""
        return self.first + len(self.events) - 1


class Outbox:
    """Keeps unacknowledged events. `count_limit` and `bytes_limit` bound the part in memory; see `has_room`."""

    def __init__(self, count_limit: int = 8192, bytes_limit: int = 32 << 20) -> None:
        """Start empty; the first event gets number 1."""
        self.count_limit = count_limit
        self.bytes_limit = bytes_limit
        self.acked = 0
        self.spooled = 0
        self.last = 0
        self.sent = 0
        self._memory: dict[int, bytes] = {}
        self._memory_bytes = 0

    def __repr__(self) -> str:
        return f"<Outbox acked {self.acked}, spooled to {self.spooled}, sent {self.sent}, last {self.last}>"

    @property
    def unacked(self) -> int:
        """The number of events kept, in memory and in the spool."""
        return self.last - self.acked

    @property
    def in_memory(self) -> int:
        """The number of events kept in memory."""
        return len(self._memory)

    def has_room(self, size: int) -> bool:
        """Whether memory can take an event of `size` bytes. Empty memory takes an event of any size."""
        return not self._memory or (
            len(self._memory) < self.count_limit and self._memory_bytes + size <= self.bytes_limit
        )

    def put(self, event: bytes) -> None:
        """Keep `event`. Its number must be `last + 1`."""
        self.last += 1
        self._memory[self.last] = event
        self._memory_bytes += len(event)

    def rewind(self, acked: int) -> bool:
        """Start a connection on which hutchd has every event up to `acked`; False if no event has that number yet."""
        if acked > self.last:
            return False
        self.sent = max(acked, self.acked)
        self.ack(acked)
        return True

    def ack(self, n: int) -> None:
        """Forget every event up to `n`. A number that was not sent yet counts as the last one sent."""
        n = min(n, self.sent)
        if n <= self.acked:
            return
        self._forget(n)
        self.acked = n
        self.spooled = max(self.spooled, n)

    def unsent_in_spool(self) -> bool:
        """Whether the next event to send lies in the spool."""
        return max(self.sent, self.acked) < self.spooled

    def to_send(self) -> EventBatch | None:
        """Return the next unsent events in memory, a batch at most; None if there are none."""
        return self._batch(max(self.sent, self.spooled) + 1)

    def fills_batch(self) -> bool:
        """Whether the unsent events fill a batch."""
        first = max(self.sent, self.acked) + 1
        return (
            first <= self.spooled
            or self.last - first >= BATCH_COUNT - 1
            or sum(len(self._memory[n]) for n in range(first, self.last + 1)) >= BATCH_BYTES
        )

    def to_spool(self) -> EventBatch | None:
        """Return the next events to spool, a batch at most; None if memory is empty."""
        return self._batch(self.spooled + 1)

    def moved_to_spool(self, batch: EventBatch) -> None:
        """Forget in memory the events of `batch`, which are in the spool now."""
        self._forget(batch.last)
        self.spooled = max(self.spooled, batch.last)

    def _batch(self, first: int) -> EventBatch | None:
        events: list[bytes] = []
        size = 0
        for n in range(first, min(first + BATCH_COUNT, self.last + 1)):
            event = self._memory[n]
            if events and size + len(event) > BATCH_BYTES:
                break
            events.append(event)
            size += len(event)
        return EventBatch(first, tuple(events)) if events else None

    def _forget(self, n: int) -> None:
        for gone in range(self.last - len(self._memory) + 1, n + 1):
            self._memory_bytes -= len(self._memory.pop(gone))
