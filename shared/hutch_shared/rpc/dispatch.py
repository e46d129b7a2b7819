"""From a request to what must be run: jsonrpcserver, called so that its faults cannot show.

jsonrpcserver 5.0.9 chooses the method, binds the arguments and gives the standard refusals. It is used as a pure
function: what it "calls" only types the parameters and returns an `Invocation`; the peer runs that in a task of its
own. Its faults, and what is done here about each:

- It puts the text of any exception into the reply: nothing that it calls raises, and what a handler raises is turned
  into an answer by `Invocation`.
- It does not check parameter types: `read_params` does, by the methods table, before the handler sees them.
- It refuses a whole batch for one bad member, and gathers batches in tasks that cancel scopes do not know; it reads
  and validates slowly: it is entered at `dispatch_request`, with one request that `envelope` has read and validated.
- It warns while it is imported and takes long for it: it is imported here only, and this module late.
"""

from __future__ import annotations

import inspect
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, Final, Generic, TypeVar, cast

from hutch_shared.errors import HutchError, Reason
from hutch_shared.methods import Method, Table
from hutch_shared.rpc.conversation import read_params
from hutch_shared.rpc.envelope import Request
from hutch_shared.rpc.invocation import Handler, Invocation

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from jsonrpcserver import Error, Success
    from jsonrpcserver.dispatcher import dispatch_request
    from jsonrpcserver.request import Request as Bound
    from oslash.either import Left  # type: ignore[import-untyped]  # what jsonrpcserver answers with

__all__ = ["Dispatcher"]

C = TypeVar("C")

_REASONS: Final = {-32601: Reason.METHOD_NOT_FOUND, -32602: Reason.INVALID_PARAMS}


class _ContextAndParams(inspect.Signature):
    """The signature of every entry. It is always called with these two, so that there is nothing to bind."""

    def bind(self, *args: Any, **kwargs: Any) -> inspect.BoundArguments:
        """Accept."""
        return inspect.BoundArguments(self, OrderedDict())


class _Entry(Generic[C]):
    """What jsonrpcserver calls: types the parameters. Its signature is given, since finding it out is slow."""

    __signature__ = _ContextAndParams()

    def __init__(self, method: Method, handler: Handler[C]) -> None:
        self._method = method
        self._handler = handler

    def __call__(self, context: C, params: Any) -> Any:
        try:
            return Success(Invocation(self._method.name, self._handler, context, read_params(self._method, params)))
        except HutchError as error:
            return Error(error.reason.code, error.message, error)


class Dispatcher(Generic[C]):
    """The requests of one table that have a handler."""

    def __init__(self, table: Table, handlers: Mapping[str, Handler[C]]) -> None:
        """Serve `handlers`, by method name. A name that is no request of the table is a bug and raises KeyError."""
        requests = {name: row for name, row in table.items() if row.kind == "request"}
        self._entries: dict[str, Callable[..., Any]] = {
            name: _Entry(requests[name], handler) for name, handler in handlers.items()
        }

    def dispatch(self, request: Request, context: C) -> Invocation[C] | HutchError:
        """Return what must run, or why nothing will: `method_not_found`, `invalid_params`. Pure; never raises."""
        _, result = dispatch_request(self._entries, context, Bound(request.method, [request.params], request.id))
        if not isinstance(result, Left):
            return cast("Invocation[C]", result._value.result)  # noqa: SLF001  # oslash has no other way to the value
        refusal = result._error  # noqa: SLF001
        if isinstance(refusal.data, HutchError):
            return refusal.data
        return HutchError(_REASONS.get(refusal.code, Reason.INTERNAL))
