"""The examples of the JSON-RPC 2.0 specification, section 7, as golden cases for conversation and dispatch together.

Our message texts differ from the specification's, so errors are compared by code and id.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from hutch_shared.errors import HutchError
from hutch_shared.rpc.conversation import Conversation, RequestReceived, SendFrame
from hutch_shared.rpc.dispatch import Dispatcher
from tests.spec.words import ASKED, ASKING

HANDLERS: dict[str, Any] = {
    "subtract": lambda _, params: params.minuend - params.subtrahend,
    "sum": lambda _, params: params.a + params.b + params.c,
    "get_data": lambda _, params: ["hello", 5],
}


def serve(text: str) -> Any:
    """Receive one line; return the value that is sent back, or None if nothing is."""
    conversation = Conversation(ASKED, ASKING)
    dispatcher: Dispatcher[None] = Dispatcher(ASKED, HANDLERS)
    sent = []
    for event in conversation.receive(text.encode()):
        if isinstance(event, RequestReceived):
            outcome = dispatcher.dispatch(event.request, None)
            frame = conversation.answer(event.ticket, outcome if isinstance(outcome, HutchError) else outcome.at_once())
            if frame is not None:
                sent.append(json.loads(frame))
        elif isinstance(event, SendFrame):
            sent.append(json.loads(event.frame))
    assert len(sent) <= 1
    return sent[0] if sent else None


def short(answer: Any) -> Any:
    """Replace each error by its code."""
    if isinstance(answer, list):
        return sorted((short(one) for one in answer), key=str)
    if answer is not None and "error" in answer:
        return {"error": answer["error"]["code"], "id": answer["id"]}
    return None if answer is None else {"result": answer["result"], "id": answer["id"]}


@pytest.mark.parametrize(
    ("sent", "back"),
    [
        ('{"jsonrpc": "2.0", "method": "subtract", "params": [42, 23], "id": 1}', {"result": 19, "id": 1}),
        ('{"jsonrpc": "2.0", "method": "subtract", "params": [23, 42], "id": 2}', {"result": -19, "id": 2}),
        (
            '{"jsonrpc": "2.0", "method": "subtract", "params": {"subtrahend": 23, "minuend": 42}, "id": 3}',
            {"result": 19, "id": 3},
        ),
        (
            '{"jsonrpc": "2.0", "method": "subtract", "params": {"minuend": 42, "subtrahend": 23}, "id": 4}',
            {"result": 19, "id": 4},
        ),
        ('{"jsonrpc": "2.0", "method": "update", "params": [1,2,3,4,5]}', None),
        ('{"jsonrpc": "2.0", "method": "foobar"}', None),
        ('{"jsonrpc": "2.0", "method": "foobar", "id": "1"}', {"error": -32601, "id": "1"}),
        ('{"jsonrpc": "2.0", "method": "foobar, "params": "bar", "baz]', {"error": -32700, "id": None}),
        ('{"jsonrpc": "2.0", "method": 1, "params": "bar"}', {"error": -32600, "id": None}),
        (
            '[{"jsonrpc": "2.0", "method": "sum", "params": [1,2,4], "id": "1"}, {"jsonrpc": "2.0", "method"]',
            {"error": -32700, "id": None},
        ),
        ("[]", {"error": -32600, "id": None}),
        ("[1]", [{"error": -32600, "id": None}]),
        ("[1,2,3]", [{"error": -32600, "id": None}] * 3),
        (
            """[
            {"jsonrpc": "2.0", "method": "sum", "params": [1,2,4], "id": "1"},
            {"jsonrpc": "2.0", "method": "notify_hello", "params": [7]},
            {"jsonrpc": "2.0", "method": "subtract", "params": [42,23], "id": "2"},
            {"foo": "boo"},
            {"jsonrpc": "2.0", "method": "foo.get", "params": {"name": "myself"}, "id": "5"},
            {"jsonrpc": "2.0", "method": "get_data", "id": "9"}
            ]""",
            [
                {"result": 7, "id": "1"},
                {"result": 19, "id": "2"},
                {"error": -32600, "id": None},
                {"error": -32601, "id": "5"},
                {"result": ["hello", 5], "id": "9"},
            ],
        ),
        (
            """[
            {"jsonrpc": "2.0", "method": "notify_sum", "params": [1,2,4]},
            {"jsonrpc": "2.0", "method": "notify_hello", "params": [7]}
            ]""",
            None,
        ),
    ],
)
def test_the_specification_s_examples_hold(sent: str, back: Any) -> None:
    """Each line of section 7 gets the answer that the specification gives."""
    expected = sorted(back, key=str) if isinstance(back, list) else back

    assert short(serve(sent)) == expected
