"""The handlers of a methods table, and the way from a request to its handler's answer.

jsonrpcserver 5.0.9 chooses the method, binds the arguments and gives the standard refusals. `Dispatcher` uses it as a
pure function: what it "calls" only types the parameters and returns an `Invocation`, which the peer runs in a task.
Its faults, and how this module avoids each:

- It puts the text of any exception into the reply. Nothing that it calls raises, and `Invocation` turns what a handler
  raises into an answer.
- It does not check parameter types. `read_params` checks them by the methods table before the handler sees them.
- It refuses a whole batch for one bad member, and runs batches in tasks outside the cancel scopes; its own reading and
  validation are slow. We enter it at `dispatch_request`, with one request that `envelope` has read and validated.
- Importing all of it warns and loads an HTTP server and jsonschema, which takes a fifth of a second. A `Dispatcher`
  with requests imports the modules that it needs; a client imports none.
"""

from __future__ import annotations

import inspect
import logging
import secrets
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any, Final, Generic, NamedTuple, TypeVar, cast

from hutch_shared.bare_package import bare_package
from hutch_shared.errors import HutchError, Reason
from hutch_shared.methods import Method, Table
from hutch_shared.rpc.conversation import read_params
from hutch_shared.rpc.envelope import Request

__all__ = ["Dispatcher", "Handler", "Invocation", "internal_error"]

_log: Final = logging.getLogger(__name__)
_REASONS: Final = {-32601: Reason.METHOD_NOT_FOUND, -32602: Reason.INVALID_PARAMS}

C = TypeVar("C")
Handler = Callable[[C, Any], Awaitable[Any] | Any]
"""Takes the connection's context and the typed parameters; returns the result of the table or raises HutchError.

An async function runs in a task that serves one request at a time and then the next: it must reset the context
variables that it sets. The reader calls a plain function itself, so it must be quick.
"""


class Invocation(NamedTuple, Generic[C]):
    """A handler with its arguments, ready to run."""

    name: str
    handler: Handler[C]
    context: C
    params: Any

    def at_once(self) -> Any:
        """Run an instant handler; return its result, or the HutchError to answer with."""
        try:
            return self.handler(self.context, self.params)
        except HutchError as error:
            return error
        except Exception:  # noqa: BLE001  # a bug in one handler must not end the connection
            return internal_error(self.name)

    async def run(self) -> Any:
        """Run an async handler; return its result, or the HutchError to answer with. Cancellation passes through."""
        try:
            return await self.handler(self.context, self.params)
        except HutchError as error:
            return error
        except Exception:  # noqa: BLE001  # a bug in one handler must not end the connection
            return internal_error(self.name)


def internal_error(name: str) -> HutchError:
    """Log the current exception under a new id; return the error that carries only that id."""
    mark = secrets.token_hex(4)
    _log.exception("%s failed inside (%s)", name, mark)
    return HutchError(Reason.INTERNAL, id=mark)


class _ContextAndParams(inspect.Signature):
    """The signature of every entry, which is always called with these two arguments: there is nothing to bind."""

    def bind(self, *args: Any, **kwargs: Any) -> inspect.BoundArguments:
        """Accept any arguments."""
        return inspect.BoundArguments(self, OrderedDict())


class _Entry(Generic[C]):
    """A callable for jsonrpcserver that types the parameters. `__signature__` spares it a slow inspection."""

    __signature__ = _ContextAndParams()

    def __init__(
        self, method: Method, handler: Handler[C], success: Callable[..., Any], error: Callable[..., Any]
    ) -> None:
        self._method = method
        self._handler = handler
        self._success, self._error = success, error

    def __call__(self, context: C, params: Any) -> Any:
        try:
            typed = read_params(self._method, params)
        except HutchError as error:
            return self._error(error.reason.code, error.message, error)
        return self._success(Invocation(self._method.name, self._handler, context, typed))


@cache
def _jsonrpcserver() -> tuple[Any, Any, Any, Any, Any]:
    """Import the parts of jsonrpcserver that are used, once."""
    with bare_package("jsonrpcserver"):
        from jsonrpcserver.dispatcher import dispatch_request
        from jsonrpcserver.request import Request as BoundRequest
        from jsonrpcserver.result import Error, Success
        from oslash.either import Left  # type: ignore[import-untyped]  # the type of jsonrpcserver's answers
    return dispatch_request, BoundRequest, Left, Success, Error


class Dispatcher(Generic[C]):
    """A methods table with its handlers. Made once, and used by all connections that are served alike."""

    def __init__(self, table: Table, handlers: Mapping[str, Handler[C]] = MappingProxyType({})) -> None:
        """Serve `handlers`, by method name. KeyError, a bug, for a name that is not in the table."""
        self.table = table
        self.listeners = {name: handler for name, handler in handlers.items() if table[name].kind == "notification"}
        """The handlers of notifications."""
        self.instant = frozenset(name for name, handler in handlers.items() if not inspect.iscoroutinefunction(handler))
        """The methods whose handlers answer at once, that is, are plain functions."""
        self.requests = {name: handler for name, handler in handlers.items() if name not in self.listeners}
        """The handlers of requests."""
        if not self.requests:
            return
        self._dispatch, self._bound, self._left, success, error = _jsonrpcserver()
        self._entries: dict[str, Callable[..., Any]] = {
            name: _Entry(table[name], handler, success, error) for name, handler in self.requests.items()
        }

    def dispatch(self, request: Request, context: C) -> Invocation[C] | HutchError:
        """Return an invocation, or the refusal: `method_not_found`, `invalid_params`. Pure; never raises."""
        if not self.requests:
            return HutchError(Reason.METHOD_NOT_FOUND)
        _, result = self._dispatch(self._entries, context, self._bound(request.method, [request.params], request.id))
        if not isinstance(result, self._left):
            return cast("Invocation[C]", result._value.result)  # noqa: SLF001  # oslash has no public accessor
        refusal = result._error  # noqa: SLF001
        if isinstance(refusal.data, HutchError):
            return refusal.data
        return HutchError(_REASONS.get(refusal.code, Reason.INTERNAL))
