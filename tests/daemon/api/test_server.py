"""The listener of a socket: the connections that it admits, when, and their cost until then."""

from __future__ import annotations

import json
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path

import anyio
import pytest

from hutch_daemon.api.server import serve
from hutch_daemon.settings import Settings, SettingsInForce, SocketSettings
from hutch_shared.processes import Credentials
from hutch_shared.rpc.stream import SocketStream
from hutch_shared.unix import listen
from hutch_shared.watched_listener import WatchedListener

BOUND = 30.0
"""Seconds after which a test has failed."""


class Echo:
    """A service that records the first bytes of each connection and echoes everything until the peer leaves."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.first: list[bytes] = []
        self.gone = 0

    async def run(self, stream: SocketStream, credentials: Credentials) -> None:
        try:
            said = await stream.receive()
            self.first.append(said)
            while True:
                await stream.send(said)
                said = await stream.receive()
        except anyio.EndOfStream:
            self.gone += 1

    @contextmanager
    def line(self) -> Iterator[SocketStream]:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(str(self.path))
            yield SocketStream(sock)


@asynccontextmanager
async def echo_server(folder: Path, seconds: float = BOUND, **settings: int) -> AsyncIterator[Echo]:
    """Serve a socket that waits `seconds` for a connection's first message."""
    made = Echo(folder / "x.sock")
    with anyio.fail_after(BOUND), listen(made.path) as listener:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(
                serve,
                WatchedListener(listener, lambda: None),
                made.run,
                SettingsInForce(Settings(sockets=SocketSettings(**settings))),
                lambda _: seconds,
            )
            yield made
            tasks.cancel_scope.cancel()


async def over(stream: SocketStream) -> bool:
    """Return whether the other side closes without sending anything."""
    try:
        return await stream.receive() == b"never"
    except (anyio.EndOfStream, anyio.BrokenResourceError):
        return True


async def test_a_connection_is_served_after_its_first_whole_message(tmp_path: Path) -> None:
    """The service receives every byte from the start, however many pieces they came in."""
    async with echo_server(tmp_path) as made:
        with made.line() as line:
            for piece in (b'["fir', b'st"]', b"\nsec"):
                await line.send(piece)
                await anyio.wait_all_tasks_blocked()
            assert await line.receive() == b'["first"]\nsec'
            await line.send(b"ond\n")
            assert await line.receive() == b"ond\n"

    assert made.first == [b'["first"]\nsec']


@pytest.mark.parametrize("said", [b"", b"half"])
async def test_a_connection_without_a_whole_message_in_time_is_closed(tmp_path: Path, said: bytes) -> None:
    """A silent peer and a slow one are closed before any service sees them."""
    async with echo_server(tmp_path, 0.05) as made:
        with made.line() as line:
            if said:
                await line.send(said)
            assert await over(line)

    assert made.first == []


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\n", b"\x00\xff\n", b"\n", b'{"jsonrpc":\n{}\n'])
async def test_a_first_line_that_is_not_json_gets_parse_error(tmp_path: Path, said: bytes) -> None:
    """The peer gets `parse_error` and is closed; no service sees it."""
    async with echo_server(tmp_path) as made:
        with made.line() as line:
            await line.send(said)
            told = json.loads(await line.receive())
            assert await over(line)

    assert (told["error"]["code"], told["id"], made.first) == (-32700, None, [])


async def test_the_service_reads_the_rest_of_a_long_first_message(tmp_path: Path) -> None:
    """The listener buffers at most the first 64 KiB."""
    async with echo_server(tmp_path) as made:
        with made.line() as line, anyio.fail_after(BOUND):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(line.send, b"x" * 200_000)
                seen = 0
                while seen < 200_000:
                    seen += len(await line.receive())

    assert 65_536 <= len(made.first[0]) < 200_000


async def test_a_peer_that_leaves_early_frees_its_place(tmp_path: Path) -> None:
    """A connection that ends before its first message no longer counts against its account's limit."""
    async with echo_server(tmp_path, connections_per_uid=2) as made:
        for _ in range(5):
            with made.line() as gone:
                await gone.send(b"half")
                await gone.send_eof()
                assert await over(gone)
        with made.line() as one, made.line() as two, made.line() as beyond:
            for line in (one, two):
                await line.send(b"[1]\n")
                assert await line.receive() == b"[1]\n"
            refused = await over(beyond)
            await one.send(b"[3]\n")

            assert await one.receive() == b"[3]\n"
            assert refused


async def test_a_burst_of_connections_is_admitted(tmp_path: Path) -> None:
    """The listener delays connections beyond the first few, but refuses none."""
    async with echo_server(tmp_path) as made:
        with made.line() as first:
            await first.send(b"[1]\n")
            with ExitStack() as stack:
                streams = [stack.enter_context(made.line()) for _ in range(100)]
                for stream in streams:
                    await stream.send(b"[2]\n")

                assert [await stream.receive() for stream in streams] == [b"[2]\n"] * 100


async def test_pending_connections_end_with_the_listener(tmp_path: Path) -> None:
    """A server that stops leaves no connection open."""
    with ExitStack() as stack:
        async with echo_server(tmp_path) as made:
            half = stack.enter_context(made.line())
            await half.send(b"half")
            with made.line() as line:  # admitted after it
                await line.send(b"[1]\n")
                await line.receive()
        with anyio.fail_after(BOUND):
            assert await over(half)
