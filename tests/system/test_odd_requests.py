"""Every field of every request of a client, replaced by every kind of value: each is answered, and hutchd serves on."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any, Final

import msgspec
import pytest

from hutch_client.client import HutchClient
from hutch_shared.methods import CLIENT
from tests.golden.examples import example
from tests.sampling import seed
from tests.system.host import Host, host

pytestmark = [pytest.mark.system, pytest.mark.timeout(120)]

_ABSENT: Final = object()
_VALUES: Final[tuple[Any, ...]] = (
    _ABSENT,
    *(None, True, False, 0, 1, -1, 12.5, -(10**12), 2**53, 2**64, 10**30, 1e308),
    *("", "x", "12", "half \ud83d", "\ude00 half", "\x00", "/", "..", "*", "~", "x" * 100_000),
    *([], [1], ["\ud83d"], [None], [[]], {}, {"a": 1}, {"\ud83d": 1}, [{}]),
    json.loads("[" * 70 + "]" * 70),
)
_LEFT_OUT: Final = frozenset({"follow_events", "unfollow", "stop_daemon"})
"""Methods whose answers are no single response, or that end hutchd."""


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from _paths(item, (*path, key))


def _replaced(value: Any, path: tuple[Any, ...], odd: Any) -> Any:
    if not path:
        return {} if odd is _ABSENT else odd
    copy = value.copy()
    if len(path) == 1 and odd is _ABSENT:
        del copy[path[0]]
    else:
        copy[path[0]] = _replaced(value[path[0]], path[1:], odd)
    return copy


def _known(params: Any, known: dict[str, str]) -> Any:
    """Return the parameters with things that exist, so that they get past the first check."""
    return {name: known.get(name, value) for name, value in params.items()}


class _Line:
    """A connection of bytes to hutchd."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(30)
        self._socket.connect(str(path))
        self._read = self._socket.makefile("rb")
        self._number = 0
        assert "result" in self.call("get_version", {"protocol": 1, "client": "odd"}, "version")

    def call(self, method: Any, params: Any, what: str) -> dict[str, Any]:
        """Send a request and return its answer."""
        self._number += 1
        request = {"jsonrpc": "2.0", "method": method, "params": params, "id": self._number}
        self._socket.sendall(json.dumps(request).encode() + b"\n")
        while line := self._read.readline():
            answer = msgspec.json.decode(line)
            if "method" not in answer:
                assert answer["id"] in (self._number, None), what
                return dict(answer)
        raise AssertionError(f"hutchd closed the connection: {what}")

    def close(self) -> None:
        """Close it."""
        self._read.close()
        self._socket.close()


async def _opened(made: Host, hutch: HutchClient) -> dict[str, str]:
    """Open a session with a turn, and return what requests may name."""
    session = await made.script(hutch, [{"say": "hi"}])
    turn = await hutch.submit_prompt(session.id, "go")
    return {"session": session.id, "turn": turn.id, "cwd": session.cwd, "agent": "script", "path": session.cwd}


async def _play(made: Host, count: int) -> None:
    random = Random(seed())
    async with made.client() as hutch:
        known = await _opened(made, hutch)
        line = _Line(made.socket)
        methods = sorted(name for name, row in CLIENT.items() if row.kind == "request" and name not in _LEFT_OUT)
        for number in range(count):
            name = random.choice(methods)
            params = _known(json.loads(msgspec.json.encode(example(CLIENT[name].params))), known)
            path, value = random.choice([*_paths(params)]), random.choice(_VALUES)
            shown = "absent" if value is _ABSENT else ascii(value)[:60]
            what = f"{number}: {name}, {path} = {shown}"

            answer = line.call(name, _replaced(params, path, value), what)

            assert ("result" in answer) != ("error" in answer), what
            reason = answer.get("error", {}).get("data", {}).get("reason")
            assert reason != "internal", f"{what}: {answer}"
            if name in ("close_session", "delete_session") and "result" in answer:
                known = await _opened(made, hutch)
        line.close()
        after = await made.script(hutch, [{"say": "still here"}], "after")
        ended = await hutch.submit_prompt(after.id, "go")
        assert ended.state in ("queued", "dispatching", "running", "completed")
        await hutch.list_sessions()
        await hutch.list_permissions()


async def test_no_odd_request_costs_an_answer_or_hutchd() -> None:
    """500 variants; the header of the run prints the seed."""
    async with host("[executors]\nspares = 0\n") as made:
        await _play(made, 500)


@pytest.mark.full
@pytest.mark.timeout(3600)
async def test_no_odd_request_of_twenty_thousand_costs_an_answer_or_hutchd() -> None:
    """The same with more variants."""
    async with host("[executors]\nspares = 0\n") as made:
        await _play(made, 20_000)
