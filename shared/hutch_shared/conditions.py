"""The log of conditions that last: a line when one begins, once a minute with a count, and when it ends.

What fails is tried again, often many times a minute. A line per attempt would say nothing new, and on a full disk it
would use the space that is missing. So code that retries reports each failure to `Conditions`, and the success to it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from hutch_shared.errors import HutchError, Reason

__all__ = ["REPEAT", "Conditions"]

REPEAT: Final = 60.0
"""Seconds between two lines about a condition that lasts."""


@dataclass(slots=True)
class _Lasting:
    since: float
    logged_at: float
    times: int = 1
    unlogged: int = 0


class Conditions:
    """The conditions that last, by name. Its methods neither block nor raise."""

    def __init__(
        self, log: logging.Logger, *, clock: Callable[[], float] = time.monotonic, repeat: float = REPEAT
    ) -> None:
        """Log to `log`: as warnings, and the end as info. `clock` returns seconds."""
        self._log = log
        self._clock = clock
        self._repeat = repeat
        self._lasting: dict[str, _Lasting] = {}

    def __repr__(self) -> str:
        return f"<Conditions {', '.join(self._lasting) or 'none'}>"

    def __contains__(self, name: str) -> bool:
        return name in self._lasting

    def begin(self, name: str, sentence: str) -> None:
        """Report that the condition `name` began, or that it still lasts. Call it at each failed attempt."""
        now = self._clock()
        lasting = self._lasting.get(name)
        if lasting is None:
            self._lasting[name] = _Lasting(now, now)
            self._log.warning("%s", sentence)
            return
        lasting.times += 1
        lasting.unlogged += 1
        if now - lasting.logged_at >= self._repeat:
            self._log.warning("%s (%d more times, for %d s now)", sentence, lasting.unlogged, now - lasting.since)
            lasting.logged_at, lasting.unlogged = now, 0

    def failed(self, name: str, error: HutchError) -> None:
        """Report that `name`, the words for what was attempted, failed with an error.

        Not for `store_unavailable`: the store logs that itself, once for all that need it.
        """
        if error.reason is not Reason.STORE_UNAVAILABLE:
            self.begin(name, f"{name}: {error.message}")

    def end(self, name: str, sentence: str) -> None:
        """Report that the condition `name` ended. Does nothing if it did not last."""
        lasting = self._lasting.pop(name, None)
        if lasting is not None:
            passed = self._clock() - lasting.since
            self._log.info("%s (after %d s, %d times)", sentence, passed, lasting.times)
