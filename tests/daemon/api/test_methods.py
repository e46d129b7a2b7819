"""The table of methods: it is whole, and what carries a method out takes and gives what the wire says."""

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
"""The classes of the services in place of objects: what carries a method out is then a plain function."""


def annotations_of(call: Any) -> tuple[Any, Any]:
    """Return the types of a function's last parameter and of its result."""
    hints = typing.get_type_hints(call)
    *_, last = inspect.signature(call).parameters
    return hints[last], hints["return"]


def test_the_tables_name_the_methods_of_the_wire() -> None:
    """Each method of the wire has one line and one row of the gate; the peer answers `ping` by itself."""
    assert {*CLIENT_METHODS, "ping"} == set(CLIENT) == set(CLIENT_GATE)
    assert {*EXECUTOR_METHODS, HELLO, "ping"} == set(EXECUTOR) == set(EXECUTOR_GATE)


@pytest.mark.parametrize("name", CLIENT_METHODS)
def test_a_clients_method_takes_and_gives_what_the_wire_says(name: str) -> None:
    """Its line, the table of the wire and the annotations of the function name the same types."""
    line, wire = CLIENT_METHODS[name], CLIENT[name]

    assert line.params is wire.params
    call = line.call_of(ClientConnection if isinstance(line, OwnMethod) else SERVICES)  # type: ignore[arg-type]
    assert annotations_of(call) == (
        wire.params,
        wire.result,
    )


@pytest.mark.parametrize("name", EXECUTOR_METHODS)
def test_an_executors_method_takes_and_gives_what_the_wire_says(name: str) -> None:
    """The same for executors; a notification gives nothing."""
    line, wire = EXECUTOR_METHODS[name], EXECUTOR[name]
    nothing = type(None)

    assert line.params is wire.params
    assert annotations_of(line.call_of(SERVICES)) == (wire.params, wire.result or nothing)  # type: ignore[arg-type]


def test_hello_takes_and_gives_what_the_wire_says() -> None:
    """It is the connection's own."""
    assert annotations_of(ExecutorConnection.hello) == (EXECUTOR[HELLO].params, EXECUTOR[HELLO].result)


def test_the_tables_have_no_line_by_string() -> None:
    """No line looks a method up by its name."""
    source = inspect.getsource(methods)

    assert "getattr" not in source
