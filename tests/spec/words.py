"""A small protocol for tests: two tables of methods, and functions that write its frames as JSON."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from hutch_shared.methods import Method, Table


class Empty(msgspec.Struct, frozen=True):
    """Nothing."""


class Numbers(msgspec.Struct, frozen=True):
    """The parameters of `subtract`."""

    minuend: int
    subtrahend: int


class Values(msgspec.Struct, frozen=True):
    """The parameters of `sum` and `update`, which may also come by position."""

    a: int = 0
    b: int = 0
    c: int = 0
    d: int = 0
    e: int = 0


class Text(msgspec.Struct, frozen=True):
    """A text."""

    text: str = ""


def _table(*rows: Method) -> Table:
    return {row.name: row for row in rows}


def request(name: str, params: type[msgspec.Struct], result: type[msgspec.Struct] = Text) -> Method:
    return Method(name, "request", params, result, "")


ASKED: Table = _table(
    request("subtract", Numbers),
    request("sum", Values),
    request("get_data", Empty),
    request("echo", Text),
    request("ping", Empty, Empty),
    Method("update", "notification", Values, None, ""),
    Method("notify_sum", "notification", Values, None, ""),
    Method("stream", "notification", Text, None, "", control=False, hot=True),
)
"""The methods that the side under test serves."""

ASKING: Table = _table(
    request("echo", Text),
    request("ping", Empty, Empty),
    Method("stream", "notification", Text, None, "", control=False, hot=True),
)
"""The methods that it calls."""


def line(value: Any) -> bytes:
    """Return a frame without its newline, as most libraries write it."""
    return json.dumps(value).encode()


def ask(method: str, number: Any, params: Any = None) -> bytes:
    """Return a request."""
    return line({"jsonrpc": "2.0", "method": method, "id": number} | ({} if params is None else {"params": params}))


def tell(method: str, params: Any = None) -> bytes:
    """Return a notification."""
    return line({"jsonrpc": "2.0", "method": method} | ({} if params is None else {"params": params}))


def reason_of(answer: Any) -> str:
    """Return the reason of an error response."""
    word = answer["error"]["data"]["reason"]
    assert isinstance(word, str)
    return word
