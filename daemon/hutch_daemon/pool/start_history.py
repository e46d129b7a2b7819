"""When a start that failed may be tried again: after a pause, and after too many failures not before a while. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["NO_FAILURES", "StartHistory"]


@dataclass(frozen=True, slots=True)
class StartHistory:
    """The latest failed starts of one key, oldest first, in seconds on the pool's clock."""

    failures: tuple[float, ...] = ()
    error: str = ""
    """What the last failure said."""
    retry_at: float = 0.0

    def failed(self, now: float, error: str, window: float, pause: float) -> StartHistory:
        """Add a failure after which the next start waits for `pause` seconds; forget those older than `window`."""
        return StartHistory((*(at for at in self.failures if now - at < window), now), error, now + pause)

    def not_before(self, limit: int, window: float) -> float:
        """Return when the next start may be tried; 0 if there was no failure."""
        return self.failures[-limit] + window if self.blocked(limit) else self.retry_at

    def blocked(self, limit: int) -> bool:
        """Tell whether there were `limit` failures: then no start is tried until the window has passed."""
        return len(self.failures) >= limit


NO_FAILURES: Final = StartHistory()
