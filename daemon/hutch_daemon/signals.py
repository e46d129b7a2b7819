"""A signal: an emitter calls its subscribers without knowing them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, ParamSpec

__all__ = ["Signal"]

P = ParamSpec("P")


class Signal(Generic[P]):
    """A list of subscribers, called in the order of subscription. Only its owner calls `emit`."""

    def __init__(self) -> None:
        """Start without subscribers."""
        self._subscribers: list[Callable[P, object]] = []

    def subscribe(self, subscriber: Callable[P, object]) -> None:
        """Call `subscriber` at each `emit`. It must not block. Its exceptions reach the emitter."""
        self._subscribers.append(subscriber)

    def emit(self, *args: P.args, **kwargs: P.kwargs) -> None:
        """Call all subscribers."""
        for subscriber in self._subscribers:
            subscriber(*args, **kwargs)
