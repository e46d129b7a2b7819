"""The method tables are complete, and each function has the types of the protocol."""

from __future__ import annotations

import inspect
import typing
from types import SimpleNamespace
from typing import Any

import pytest

from hutch_daemon.api import methods
from hutch_daemon.api.clients import ClientConnection
from hutch_daemon.api.executors import ExecutorConnection
from hutch_daemon.api.gate import CLIENT_GATE, EXECUTOR_GATE
from hutch_daemon.api.methods import CLIENT_METHODS, EXECUTOR_METHODS, HELLO, OwnMethod
from hutch_daemon.services.services import Services
from hutch_shared.methods import CLIENT, EXECUTOR

SERVICES = SimpleNamespace(**typing.get_type_hints(Services))
"""The classes of the services instead of objects, so that each row's function is a plain function."""


def annotations_of(call: Any) -> tuple[Any, Any]:
    """Return the types of a function's last parameter and of its result."""
    hints = typing.get_type_hints(call)
    *_, last = inspect.signature(call).parameters
    return hints[last], hints["return"]


def test_each_method_of_the_protocol_has_one_row() -> None:
    """Each method has one row in its table and one in the gate; the peer answers `ping` itself."""
    assert {*CLIENT_METHODS, "ping"} == set(CLIENT) == set(CLIENT_GATE)
    assert {*EXECUTOR_METHODS, HELLO, "ping"} == set(EXECUTOR) == set(EXECUTOR_GATE)


@pytest.mark.parametrize("name", CLIENT_METHODS)
def test_client_methods_have_the_types_of_the_protocol(name: str) -> None:
    """A client method's row, the protocol table and the function's annotations name the same types."""
    line, wire = CLIENT_METHODS[name], CLIENT[name]

    assert line.params is wire.params
    call = line.call_of(ClientConnection if isinstance(line, OwnMethod) else SERVICES)  # type: ignore[arg-type]
    assert annotations_of(call) == (
        wire.params,
        wire.result,
    )


@pytest.mark.parametrize("name", EXECUTOR_METHODS)
def test_executor_methods_have_the_types_of_the_protocol(name: str) -> None:
    """The same holds for executor methods; a notification returns nothing."""
    line, wire = EXECUTOR_METHODS[name], EXECUTOR[name]
    nothing = type(None)

    assert line.params is wire.params
    assert annotations_of(line.call_of(SERVICES)) == (wire.params, wire.result or nothing)  # type: ignore[arg-type]


def test_hello_has_the_types_of_the_protocol() -> None:
    """The connection itself handles `hello`, with the types of the protocol."""
    assert annotations_of(ExecutorConnection.hello) == (EXECUTOR[HELLO].params, EXECUTOR[HELLO].result)


def test_no_table_row_names_its_function_by_string() -> None:
    """Each row refers to its function directly."""
    source = inspect.getsource(methods)

    assert "getattr" not in source
