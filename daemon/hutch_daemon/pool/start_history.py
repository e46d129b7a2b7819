"""How often starting may fail: a pause that doubles, and a limit after which it is left alone for a while. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["FIRST_PAUSE", "StartHistory"]

FIRST_PAUSE: Final = 0.25
_LONGEST_PAUSE: Final = 30.0


@dataclass(frozen=True, slots=True)
class StartHistory:
    """The latest failed starts of one kind of executor, oldest first, on the awake clock in seconds."""

    failures: tuple[float, ...] = ()
    error: str = ""

    def failed(self, now: float, error: str, window: float) -> StartHistory:
        """Note a failure; what is older than the window is forgotten."""
        return StartHistory((*(at for at in self.failures if now - at < window), now), error)

    def not_before(self, limit: int, window: float) -> float:
        """Return when the next start may be tried."""
        if not self.failures:
            return 0.0
        if self.blocked(limit):
            return self.failures[-limit] + window
        doubled: float = FIRST_PAUSE * 2 ** (len(self.failures) - 1)
        return self.failures[-1] + min(doubled, _LONGEST_PAUSE)

    def blocked(self, limit: int) -> bool:
        """Tell whether so many failed that nothing is tried before the window has passed."""
        return len(self.failures) >= limit
