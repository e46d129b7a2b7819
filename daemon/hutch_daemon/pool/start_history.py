"""Decides when a failed start may be tried again: after a pause, and after too many failures a longer one. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["NO_FAILURES", "StartHistory"]


@dataclass(frozen=True, slots=True)
class StartHistory:
    """The latest failed starts of one key, oldest first, in seconds on the pool's clock."""

    failures: tuple[float, ...] = ()
    error: str = ""
    """The message of the last failure."""
    retry_at: float = 0.0

    def failed(self, now: float, error: str, window: float, pause: float) -> StartHistory:
        """Return the history with another failure, after which the next start waits for `pause` seconds.

        Failures older than `window` seconds are dropped.
        """
        return StartHistory((*(at for at in self.failures if now - at < window), now), error, now + pause)

    def not_before(self, limit: int, window: float) -> float:
        """Return the time when the next start may be tried; 0 if there was no failure."""
        return self.failures[-limit] + window if self.blocked(limit) else self.retry_at

    def blocked(self, limit: int) -> bool:
        """Return whether there were `limit` failures, so that no start is tried until the window has passed."""
        return len(self.failures) >= limit


NO_FAILURES: Final = StartHistory()
