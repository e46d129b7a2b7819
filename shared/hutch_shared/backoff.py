"""The pauses before an operation that failed is tried again."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

__all__ = ["Backoff"]


class Backoff:
    """Pauses that double from `first` to `longest` seconds, each shortened by a random part. If two calls of `next` lie
    `steady` seconds or more apart, the pauses start over with `first`. The random part keeps many clients of one server
    from coming back at the same moment.
    """

    def __init__(
        self,
        first: float,
        longest: float,
        *,
        jitter: float = 0.5,
        steady: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        rand: Callable[[], float] = random.random,
    ) -> None:
        """`jitter`, from 0 to 1: the largest part by which a pause is shortened. `steady`: twice `longest` by default.

        `clock` returns seconds; `rand` returns a number from 0 up to, but not including, 1.
        """
        if not 0 < first <= longest or not 0 <= jitter <= 1:
            raise ValueError("a back-off needs 0 < first <= longest and 0 <= jitter <= 1")
        self._first = first
        self._longest = longest
        self._jitter = jitter
        self._steady = 2 * longest if steady is None else steady
        self._clock = clock
        self._rand = rand
        self._pause = first
        self._until: float | None = None

    def __repr__(self) -> str:
        return f"<Backoff next {self._pause:g} s of {self._first:g} to {self._longest:g} s>"

    def next(self) -> float:
        """Return the seconds to wait after a failure that happened now."""
        now = self._clock()
        if self._until is not None and now - self._until >= self._steady:
            self.reset()
        pause = self._pause * (1 - self._jitter * self._rand())
        self._pause = min(self._pause * 2, self._longest)
        self._until = now + pause
        return pause

    def reset(self) -> None:
        """Start over with the first pause: call it after a success."""
        self._pause, self._until = self._first, None
