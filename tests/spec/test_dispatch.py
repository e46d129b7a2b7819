"""The dispatcher: requests that run, requests that are refused, and texts that never cross the wire."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from hutch_shared.errors import HutchError, Reason
from hutch_shared.rpc.dispatch import Dispatcher, Invocation
from hutch_shared.rpc.envelope import Request, parse
from tests.spec.words import ASKED, Text, ask


async def echo(context: str, params: Text) -> Text:
    return Text(context + params.text)


def dispatch(method: str, params: Any = None, handler: Any = echo) -> Any:
    request = parse(ask(method, 1, params))
    assert isinstance(request, Request)
    return Dispatcher(ASKED, {"echo": handler}).dispatch(request, "at home: ")


async def test_a_request_becomes_its_handler_with_typed_parameters() -> None:
    """`dispatch` runs nothing; it returns the handler with the typed parameters."""
    invocation = dispatch("echo", {"text": "hi"})

    assert invocation == Invocation("echo", echo, "at home: ", Text("hi"))
    assert await invocation.run() == Text("at home: hi")


@pytest.mark.parametrize("method", ["nonsense", "subtract", "update", "__init__", ""])
def test_a_method_without_a_handler_is_not_found(method: str) -> None:
    """Unknown methods, notifications and methods without a handler are `method_not_found`."""
    assert dispatch(method).reason is Reason.METHOD_NOT_FOUND


def test_parameters_are_checked_before_anything_runs() -> None:
    """The types are checked, and duplicate keys are refused."""
    assert dispatch("echo", {"text": 5}).reason is Reason.INVALID_PARAMS
    request = parse(b'{"jsonrpc":"2.0","method":"echo","params":{"text":"a","text":"b"},"id":1}')
    assert isinstance(request, Request)
    refusal = Dispatcher(ASKED, {"echo": echo}).dispatch(request, "")
    assert "duplicate key" in str(refusal)


async def test_the_text_of_an_exception_stays_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """The answer has only an id, under which the log has the text."""

    async def fail(context: str, params: Text) -> Text:
        raise ValueError("the key is sk-123")

    with caplog.at_level(logging.ERROR):
        error = await dispatch("echo", handler=fail).run()

    assert isinstance(error, HutchError)
    assert error.reason is Reason.INTERNAL
    assert "sk-123" not in f"{error} {error.details}"
    assert error.details["id"] in caplog.text


async def test_an_expected_error_is_the_answer() -> None:
    """The caller gets its reason and its sentence."""

    async def refuse(context: str, params: Text) -> Text:
        raise HutchError(Reason.NOT_ALLOWED, "Not today.")

    assert str(await dispatch("echo", handler=refuse).run()) == "Not today."


def test_a_handler_for_no_method_of_the_table_is_a_bug() -> None:
    """The error comes when the dispatcher is built, not at a request."""
    with pytest.raises(KeyError):
        Dispatcher(ASKED, {"nonsense": echo})
