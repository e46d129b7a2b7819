"""A signal: what an emitter tells whoever subscribed, without knowing them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, ParamSpec

__all__ = ["Signal"]

P = ParamSpec("P")


class Signal(Generic[P]):
    """Owned by its emitter, which alone calls `emit`. Subscribers are called in the order in which they subscribed."""

    def __init__(self) -> None:
        """Start without subscribers."""
        self._subscribers: list[Callable[P, object]] = []

    def subscribe(self, subscriber: Callable[P, object]) -> None:
        """Call `subscriber` at each emission. It must not block; what it raises reaches the emitter."""
        self._subscribers.append(subscriber)

    def emit(self, *args: P.args, **kwargs: P.kwargs) -> None:
        """Call all subscribers."""
        for subscriber in self._subscribers:
            subscriber(*args, **kwargs)
