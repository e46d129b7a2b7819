"""The events that hutchd has not acknowledged: numbered, in order, in memory or (an older part) in the spool.

Pure. Always true, for the executor's own numbers n:

    1 … acked | acked+1 … spooled | spooled+1 … last        (each part may be empty)
    gone      | in the spool file | in memory

`sent` is what went to hutchd on the present connection; it starts anew at `acked` on each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["BATCH_BYTES", "BATCH_COUNT", "Outbox", "Stretch"]

BATCH_COUNT: Final = 256
BATCH_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Stretch:
    """Events `first` … in order, as the bytes that go on the wire."""

    first: int
    events: tuple[bytes, ...]

    @property
    def last(self) -> int:
        """The number of the last one."""
        return self.first + len(self.events) - 1


class Outbox:
    """Keeps what is not acknowledged. `count_limit` and `bytes_limit` bound the part in memory."""

    def __init__(self, count_limit: int = 8192, bytes_limit: int = 32 << 20) -> None:
        """Start empty; the first event will be number 1."""
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
        """How many are kept, in memory and spool."""
        return self.last - self.acked

    @property
    def in_memory(self) -> int:
        """How many are kept in memory."""
        return len(self._memory)

    def has_room(self, size: int) -> bool:
        """Tell whether an event of `size` bytes may be put; one of any size may when memory is empty."""
        return not self._memory or (
            len(self._memory) < self.count_limit and self._memory_bytes + size <= self.bytes_limit
        )

    def put(self, event: bytes) -> None:
        """Keep `event`, which carries the number `last + 1`."""
        self.last += 1
        self._memory[self.last] = event
        self._memory_bytes += len(event)

    def rewind(self, acked: int) -> bool:
        """Start a connection whose other side has all up to `acked`; False when it claims what was never made."""
        if acked > self.last:
            return False
        self.sent = max(acked, self.acked)
        self.ack(acked)
        return True

    def ack(self, n: int) -> None:
        """Forget all up to `n`. A number not sent yet acknowledges what was sent."""
        n = min(n, self.sent)
        if n <= self.acked:
            return
        self._forget(n)
        self.acked = n
        self.spooled = max(self.spooled, n)

    def unsent_in_spool(self) -> bool:
        """Tell whether the next event to send has to be read from the spool."""
        return max(self.sent, self.acked) < self.spooled

    def to_send(self) -> Stretch | None:
        """Return the next events to send that are in memory, a batch at most; None when all were sent."""
        return self._stretch(max(self.sent, self.spooled) + 1)

    def fills_batch(self) -> bool:
        """Tell whether what is not sent is a batch or more."""
        first = max(self.sent, self.acked) + 1
        return (
            first <= self.spooled
            or self.last - first >= BATCH_COUNT - 1
            or sum(len(self._memory[n]) for n in range(first, self.last + 1)) >= BATCH_BYTES
        )

    def to_spool(self) -> Stretch | None:
        """Return the next events to write to the spool, a batch at most; None when memory is empty."""
        return self._stretch(self.spooled + 1)

    def moved_to_spool(self, stretch: Stretch) -> None:
        """Forget in memory what is in the spool now."""
        self._forget(stretch.last)
        self.spooled = max(self.spooled, stretch.last)

    def _stretch(self, first: int) -> Stretch | None:
        events: list[bytes] = []
        size = 0
        for n in range(first, min(first + BATCH_COUNT, self.last + 1)):
            event = self._memory[n]
            if events and size + len(event) > BATCH_BYTES:
                break
            events.append(event)
            size += len(event)
        return Stretch(first, tuple(events)) if events else None

    def _forget(self, n: int) -> None:
        for gone in range(self.last - len(self._memory) + 1, n + 1):
            self._memory_bytes -= len(self._memory.pop(gone))
