"""Lying executors at a real executor socket: each gets an error that names its fault, and nothing changes."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
from anyio.abc import ByteStream
from anyio.streams.buffered import BufferedByteReceiveStream

from hutch_client.client import HutchClient
from hutch_shared import messages as m
from tests.system.host import Host, host
from tests.system.log import DEADLINE, wait_for

pytestmark = pytest.mark.system

PROGRAM = Path(__file__).parent / "programs" / "evil_hutchd.py"
LONGEST = 1 << 20


class Line:
    """A connection to hutchd that the test reads and writes itself."""

    def __init__(self, stream: ByteStream) -> None:
        self._stream = stream
        self._lines = BufferedByteReceiveStream(stream)
        self._ids = 0

    async def send(self, data: bytes) -> None:
        """Send raw bytes. A closed connection is noticed at the next read."""
        with suppress(anyio.BrokenResourceError):
            await self._stream.send(data)

    async def tell(self, method: str, **params: Any) -> None:
        """Send a notification."""
        await self.send(msgspec.json.encode({"jsonrpc": "2.0", "method": method, "params": params}) + b"\n")

    async def next(self) -> dict[str, Any] | None:
        """Return the next message; None if hutchd has closed the connection."""
        with anyio.fail_after(DEADLINE):
            try:
                line = await self._lines.receive_until(b"\n", LONGEST)
            except (anyio.IncompleteRead, anyio.EndOfStream, anyio.BrokenResourceError):
                return None
        found: dict[str, Any] = msgspec.json.decode(line)
        return found

    async def until(self, method: str) -> dict[str, Any]:
        """Return the next request of hutchd by that method."""
        while (message := await self.next()) is not None:
            if message.get("method") == method:
                return message
        raise AssertionError(f"hutchd hung up and asked no {method}")

    async def ask(self, method: str, **params: Any) -> str:
        """Make a request; return the refusal's reason, or `done`. Requests of hutchd are skipped."""
        self._ids += 1
        call = {"jsonrpc": "2.0", "id": self._ids, "method": method, "params": params}
        await self.send(msgspec.json.encode(call) + b"\n")
        while (message := await self.next()) is not None:
            if message.get("id") == self._ids and "method" not in message:
                return _reason(message)
        return "hung up"

    async def over(self) -> bool:
        """Read to the end of the connection, which must come."""
        while await self.next() is not None:
            pass
        return True


@dataclass(frozen=True, slots=True)
class Evil:
    """An executor that the test controls, with the session that it was started for."""

    host: Host
    hutch: HutchClient
    session: m.Session
    boot: m.Boot
    socket: Path

    @property
    def hello(self) -> dict[str, Any]:
        """Return the parameters of an honest hello."""
        return {
            "executor": self.boot.executor,
            "token": self.boot.token,
            "protocol": m.PROTOCOL,
            "version": "0",
            "epoch_seen": self.boot.daemon_epoch,
        }

    @asynccontextmanager
    async def line(self, path: Path | str | None = None) -> AsyncIterator[Line]:
        """Connect to hutchd as the executor's process, or at `path` as the test's process."""
        async with await anyio.connect_unix(path or self.socket) as stream:
            yield Line(stream)

    async def holds(self) -> bool:
        """Check that the token still admits the executor, and that nothing it sent was stored."""
        page: m.EventsPage = await self.hutch.call("read_events", m.ReadEvents(self.session.id))
        async with self.line() as line:
            admitted = await line.ask("hello", **self.hello)
        return admitted == "done" and page.head == 0


@pytest.fixture(scope="module")
async def evil_host() -> AsyncIterator[Host]:
    """A host whose executors do nothing by themselves."""
    async with host("[executors]\nspares = 0\nstart_attempts = 100\n", start=False) as made:
        made.program = (sys.executable, str(PROGRAM))
        made.extra_env["EVIL_DIR"] = str(made.folder("evil"))
        await made.start()
        yield made


@asynccontextmanager
async def evil_of(made: Host, hutch: HutchClient) -> AsyncIterator[Evil]:
    """Open a session and take over its executor."""
    folder = made.folder("evil")
    before = set(folder.glob("*.json"))
    session = await made.script(hutch, [{"text": "never"}])
    (told,) = await wait_for(lambda: set(folder.glob("*.json")) - before)
    boot = msgspec.json.decode(told.read_bytes(), type=m.Boot)
    try:
        yield Evil(made, hutch, session, boot, told.with_suffix(".sock"))
    finally:
        await hutch.close_session(session.id, force=True)


@pytest.fixture
async def evil(evil_host: Host) -> AsyncIterator[Evil]:
    """An executor that has sent nothing yet."""
    async with evil_host.client() as hutch, evil_of(evil_host, hutch) as made:
        yield made


def _reason(message: dict[str, Any] | None) -> str:
    assert message is not None
    return str(message["error"]["data"]["reason"]) if "error" in message else "done"


async def test_a_false_hello_is_refused_and_ends_the_connection(evil: Evil) -> None:
    """The error has the reason, and the real executor continues."""
    lies: list[tuple[dict[str, Any], str]] = [
        ({"protocol": m.PROTOCOL + 1}, "protocol_mismatch"),
        ({"protocol": -1}, "protocol_mismatch"),
        ({"token": "guessed"}, "token_unknown"),
        ({"executor": "x-0000000000000000"}, "token_unknown"),
        ({"session": "s-0000000000000000"}, "lease_lost"),
    ]
    told = []
    for lie, _ in lies:
        async with evil.line() as line:
            told.append(await line.ask("hello", **(evil.hello | lie)))
            assert await line.over()

    assert told == [reason for _, reason in lies]
    assert await evil.holds()


async def test_a_token_is_valid_only_in_its_own_process(evil: Evil) -> None:
    """Another process of the same account is refused."""
    async with evil.line(evil.boot.socket) as line:
        told = await line.ask("hello", **evil.hello)
        over = await line.over()

    assert (told, over) == ("not_allowed", True)
    assert await evil.holds()


async def test_another_executors_token_is_refused(evil: Evil) -> None:
    """The token is refused under either executor's name."""
    async with evil_of(evil.host, evil.hutch) as other:
        told = []
        for lie in ({"token": other.boot.token}, {"token": other.boot.token, "executor": other.boot.executor}):
            async with evil.line() as line:
                told.append(await line.ask("hello", **(evil.hello | lie)))
                assert await line.over()

        assert told == ["token_unknown", "not_allowed"]
        assert await evil.holds()  # checked first, because a ready executor serves the session that has waited longest
        assert await other.holds()


async def test_garbage_before_hello_gets_an_error_per_line(evil: Evil) -> None:
    """Each malformed line gets its error; the next line is handled normally."""
    async with evil.line() as line:
        for garbage in (b"{}\n", b"\x00\xff\xfe\n", b"[" * 100_000 + b"\n", b"GET / HTTP/1.1\r\n"):
            await line.send(garbage)
        told = [_reason(await line.next()) for _ in range(4)]
        no_hello = await line.ask("hello", **(evil.hello | {"epoch_seen": "none"}))
        admitted = await line.ask("hello", **evil.hello)

    assert set(told) <= {"parse_error", "invalid_request"}
    assert (no_hello, admitted) == ("invalid_params", "done")


async def test_nothing_is_done_before_hello(evil: Evil) -> None:
    """hutchd refuses a request and closes the connection after a report. It stores nothing and asks no user."""
    call = {"call_id": "c", "action": "run_command", "agent_tool": "Bash", "input": {"command": "id"}, "command": "id"}
    session = evil.session.id
    async with evil.line() as line:
        told = [
            await line.ask("get_api_key", session=session, provider="anthropic"),
            await line.ask(
                "request_permission", ask="a", session=session, turn="t", kind="tool", call=call, cwd=evil.session.cwd
            ),
        ]
        await line.tell("report_message", session=session, events=[_event(1)])
        over = await line.over()

    assert (told, over) == (["hello_first", "hello_first"], True)
    assert await evil.hutch.list_permissions(m.ListPermissions(session, None)) == ()
    assert await evil.holds()


async def test_a_connection_without_hello_in_time_is_closed(evil: Evil) -> None:
    """Silence, half a line and pings do not extend the deadline."""
    async with evil.line() as silent, evil.line() as slow, evil.line() as busy:
        await slow.send(b'{"jsonrpc"')
        pings = 0
        with anyio.fail_after(DEADLINE):
            while await busy.ask("ping") == "done":
                pings += 1
        over = [await line.over() for line in (silent, slow)]

    assert pings > 0
    assert over == [True, True]
    assert await evil.holds()


async def test_a_second_hello_is_refused(evil: Evil) -> None:
    """The connection goes on."""
    async with evil.line() as line:
        told = [await line.ask("hello", **evil.hello) for _ in range(2)]
        alive = await line.ask("ping")

    assert (told, alive) == (["done", "wrong_state"], "done")


async def test_an_executor_speaks_for_no_other_session(evil: Evil) -> None:
    """Although leased to its own session, it gets no key and no decision for another; a report ends the connection."""
    async with evil.line() as line, evil_of(evil.host, evil.hutch) as other:
        call = {"call_id": "c", "action": "other", "agent_tool": "X", "input": {}}
        await line.ask("hello", **evil.hello)
        prepare = await line.until("prepare_session")
        told = [
            await line.ask("get_api_key", session=other.session.id, provider="anthropic"),
            await line.ask(
                "request_permission", ask="a", session=other.session.id, turn="t", kind="tool", call=call, cwd="/"
            ),
        ]
        await line.tell("report_message", session=other.session.id, events=[_event(1)])
        over = await line.over()

        assert prepare["params"]["session"] == evil.session.id
        assert (told, over) == (["lease_lost", "lease_lost"], True)
        assert await evil.hutch.list_permissions(m.ListPermissions(None, None)) == ()
        assert await other.holds()


def _event(n: int) -> dict[str, Any]:
    return {"n": n, "at": "2026-01-31T12:00:00.000Z", "kind": "text", "data": {"text": "a lie"}, "turn": None}
