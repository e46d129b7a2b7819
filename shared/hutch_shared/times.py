"""Times: RFC 3339 in UTC with milliseconds on the wire, whole milliseconds since 1970 inside.

Recent conversions are cached, since many events share a second, and many a millisecond.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from functools import lru_cache

__all__ = ["awake_ms", "from_wire", "now_ms", "to_wire"]

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def now_ms() -> int:
    """Return the wall clock in milliseconds since 1970. For records only; lifetimes use monotonic time."""
    return time.time_ns() // 1_000_000


def awake_ms() -> int:
    """Return the milliseconds since boot, without those in which the machine slept. Lifetimes use this clock."""
    return time.monotonic_ns() // 1_000_000


def to_wire(ms: int) -> str:
    """Return `2026-01-31T12:00:00.000Z`."""
    return f"{_to_seconds(ms // 1000)}.{ms % 1000:03d}Z"


@lru_cache(maxsize=16)
def _to_seconds(seconds: int) -> str:
    return (_EPOCH + timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%S")


@lru_cache(maxsize=1024)
def from_wire(text: str) -> int:
    """Return the milliseconds of an RFC 3339 time with an offset; ValueError on anything else."""
    when = datetime.fromisoformat(text)
    if when.tzinfo is None:
        raise ValueError(f"no offset in {text!r}")
    return (when - _EPOCH) // timedelta(milliseconds=1)
