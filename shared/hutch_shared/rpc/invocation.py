"""What a request turns into: a handler with what it is given, and how that ends in an answer."""

from __future__ import annotations

import inspect
import logging
import secrets
from collections.abc import Awaitable, Callable
from functools import lru_cache
from typing import Any, Final, Generic, NamedTuple, TypeVar

from hutch_shared.errors import HutchError, Reason

__all__ = ["Handler", "Invocation", "internal_error", "is_instant"]

_log: Final = logging.getLogger(__name__)

C = TypeVar("C")
Handler = Callable[[C, Any], Awaitable[Any] | Any]
"""Takes the connection's context and the typed parameters; returns the result of the table or raises HutchError.

An async function runs in a task that nothing else runs in meanwhile, but the next request may: it resets context
variables that it sets. A plain function is called by the reader itself: it must be quick.
"""


@lru_cache(512)  # it is asked about the same handlers at each connection
def is_instant(handler: Handler[Any]) -> bool:
    """Tell whether a handler answers at once: it is no async function."""
    return not inspect.iscoroutinefunction(handler)


class Invocation(NamedTuple, Generic[C]):
    """A request that may run."""

    name: str
    handler: Handler[C]
    context: C
    params: Any

    def at_once(self) -> Any:
        """Run an instant handler; return its result, or the HutchError that answers instead."""
        try:
            return self.handler(self.context, self.params)
        except HutchError as error:
            return error
        except Exception:  # noqa: BLE001  # the border: a bug in one handler is answered, and the connection goes on
            return internal_error(self.name)

    async def run(self) -> Any:
        """Run an async handler; return its result, or the HutchError that answers instead. Cancellation passes."""
        try:
            return await self.handler(self.context, self.params)
        except HutchError as error:
            return error
        except Exception:  # noqa: BLE001  # the border: a bug in one handler is answered, and the connection goes on
            return internal_error(self.name)


def internal_error(name: str) -> HutchError:
    """Log the exception under way under a fresh id, and return the error that says no more than that id."""
    mark = secrets.token_hex(4)
    _log.exception("%s failed inside (%s)", name, mark)
    return HutchError(Reason.INTERNAL, id=mark)
