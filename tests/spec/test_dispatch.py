"""The dispatcher: what runs, what is refused, and what never crosses the wire."""

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
    """Nothing runs yet."""
    invocation = dispatch("echo", {"text": "hi"})

    assert invocation == Invocation("echo", echo, "at home: ", Text("hi"))
    assert await invocation.run() == Text("at home: hi")


@pytest.mark.parametrize("method", ["nonsense", "subtract", "update", "__init__", ""])
def test_what_has_no_handler_is_not_found(method: str) -> None:
    """Unknown methods, those without a handler, notifications."""
    assert dispatch(method).reason is Reason.METHOD_NOT_FOUND


def test_parameters_are_checked_before_anything_runs() -> None:
    """By type, and for keys that are there twice."""
    assert dispatch("echo", {"text": 5}).reason is Reason.INVALID_PARAMS
    request = parse(b'{"jsonrpc":"2.0","method":"echo","params":{"text":"a","text":"b"},"id":1}')
    assert isinstance(request, Request)
    refusal = Dispatcher(ASKED, {"echo": echo}).dispatch(request, "")
    assert "duplicate key" in str(refusal)


async def test_the_text_of_an_exception_stays_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """The answer has an id that is found there."""

    async def fail(context: str, params: Text) -> Text:
        raise ValueError("the key is sk-123")

    with caplog.at_level(logging.ERROR):
        error = await dispatch("echo", handler=fail).run()

    assert isinstance(error, HutchError)
    assert error.reason is Reason.INTERNAL
    assert "sk-123" not in f"{error} {error.details}"
    assert error.details["id"] in caplog.text


async def test_an_expected_error_is_the_answer() -> None:
    """It was written for its reader."""

    async def refuse(context: str, params: Text) -> Text:
        raise HutchError(Reason.NOT_ALLOWED, "Not today.")

    assert str(await dispatch("echo", handler=refuse).run()) == "Not today."


def test_a_handler_for_no_method_of_the_table_is_a_bug() -> None:
    """It is found when the server is built."""
    with pytest.raises(KeyError):
        Dispatcher(ASKED, {"nonsense": echo})
