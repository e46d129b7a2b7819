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
class _Condition:
    since: float
    logged_at: float
    lasts: bool = True
    shown: bool = True
    """Whether the last line in the log says that it lasts."""
    times: int = 1
    unlogged: int = 0


class Conditions:
    """The conditions that last, by name. Its methods neither block nor raise.

    One that begins again within `repeat` seconds of its last line is the same one, which flaps: it gets no line before.
    """

    def __init__(
        self, log: logging.Logger, *, clock: Callable[[], float] = time.monotonic, repeat: float = REPEAT
    ) -> None:
        """Log to `log`: as warnings, and the end as info. `clock` returns seconds."""
        self._log = log
        self._clock = clock
        self._repeat = repeat
        self._known: dict[str, _Condition] = {}

    def __repr__(self) -> str:
        return f"<Conditions {', '.join(name for name in self._known if name in self) or 'none'}>"

    def __contains__(self, name: str) -> bool:
        known = self._known.get(name)
        return known is not None and known.lasts

    def begin(self, name: str, sentence: str) -> None:
        """Report that the condition `name` began, or that it still lasts. Call it at each failed attempt."""
        now = self._clock()
        self._forget(now)
        known = self._known.get(name)
        if known is None:
            self._known[name] = _Condition(now, now)
            self._log.warning("%s", sentence)
            return
        known.lasts = True
        known.times += 1
        known.unlogged += 1
        if now - known.logged_at >= self._repeat:
            self._log.warning("%s (%d more times, for %d s now)", sentence, known.unlogged, now - known.since)
            known.logged_at, known.unlogged, known.shown = now, 0, True

    def failed(self, name: str, error: HutchError) -> None:
        """Report that `name`, the words for what was attempted, failed with an error.

        Not for `store_unavailable`: the store logs that itself, once for all that need it.
        """
        if error.reason is not Reason.STORE_UNAVAILABLE:
            self.begin(name, f"{name}: {error.message}")

    def end(self, name: str, sentence: str) -> None:
        """Report that the condition `name` ended. Does nothing if it did not last."""
        known = self._known.get(name)
        if known is None or not known.lasts:
            return
        known.lasts = False
        if known.shown:
            now = self._clock()
            self._log.info("%s (after %d s, %d times)", sentence, now - known.since, known.times)
            known.logged_at, known.unlogged, known.shown = now, 0, False

    def _forget(self, now: float) -> None:
        """Forget the conditions that ended and whose last line is old enough."""
        for name in [
            name for name, one in self._known.items() if not one.lasts and now - one.logged_at >= self._repeat
        ]:
            del self._known[name]
