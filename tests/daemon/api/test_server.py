"""The door of a socket: who is let in, when, and what it costs until then."""

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
from hutch_shared.rpc.stream import SocketStream
from hutch_shared.unix import Credentials, listen

BOUND = 30.0
"""Seconds after which a test has failed."""


class House:
    """What serves: it notes what each connection says first, and echoes until it goes."""

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
async def house(folder: Path, seconds: float = BOUND, **settings: int) -> AsyncIterator[House]:
    """Open a door at which a first message is to come within `seconds`."""
    made = House(folder / "x.sock")
    with anyio.fail_after(BOUND), listen(made.path) as listener:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(
                serve,
                listener,
                made.run,
                SettingsInForce(Settings(sockets=SocketSettings(**settings))),
                lambda _: seconds,
            )
            yield made
            tasks.cancel_scope.cancel()


async def over(stream: SocketStream) -> bool:
    """Tell whether the other side closes without a word."""
    try:
        return await stream.receive() == b"never"
    except (anyio.EndOfStream, anyio.BrokenResourceError):
        return True


async def test_a_connection_is_served_from_its_first_whole_message_on(tmp_path: Path) -> None:
    """Nothing of what came before is lost, in however many pieces it came."""
    async with house(tmp_path) as made:
        with made.line() as line:
            for piece in (b'["fir', b'st"]', b"\nsec"):
                await line.send(piece)
                await anyio.wait_all_tasks_blocked()
            assert await line.receive() == b'["first"]\nsec'
            await line.send(b"ond\n")
            assert await line.receive() == b"ond\n"

    assert made.first == [b'["first"]\nsec']


@pytest.mark.parametrize("said", [b"", b"half"])
async def test_who_sends_no_whole_message_in_time_is_cut_off_unserved(tmp_path: Path, said: bytes) -> None:
    """Silent or slow."""
    async with house(tmp_path, 0.05) as made:
        with made.line() as line:
            if said:
                await line.send(said)
            assert await over(line)

    assert made.first == []


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\n", b"\x00\xff\n", b"\n", b'{"jsonrpc":\n{}\n'])
async def test_who_begins_with_what_is_no_json_is_told_and_cut_off(tmp_path: Path, said: bytes) -> None:
    """It is no client; nothing is made to serve it."""
    async with house(tmp_path) as made:
        with made.line() as line:
            await line.send(said)
            told = json.loads(await line.receive())
            assert await over(line)

    assert (told["error"]["code"], told["id"], made.first) == (-32700, None, [])


async def test_a_long_first_message_is_read_by_what_serves_it(tmp_path: Path) -> None:
    """The door keeps no more than 64 KiB of it."""
    async with house(tmp_path) as made:
        with made.line() as line, anyio.fail_after(BOUND):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(line.send, b"x" * 200_000)
                seen = 0
                while seen < 200_000:
                    seen += len(await line.receive())

    assert 65_536 <= len(made.first[0]) < 200_000


async def test_who_leaves_before_a_whole_message_makes_room(tmp_path: Path) -> None:
    """An account may have as many as before."""
    async with house(tmp_path, connections_per_uid=2) as made:
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


async def test_many_that_come_at_once_are_all_let_in(tmp_path: Path) -> None:
    """At a pace, beyond the first few."""
    async with house(tmp_path) as made:
        with made.line() as first:
            await first.send(b"[1]\n")
            with ExitStack() as stack:
                streams = [stack.enter_context(made.line()) for _ in range(100)]
                for stream in streams:
                    await stream.send(b"[2]\n")

                assert [await stream.receive() for stream in streams] == [b"[2]\n"] * 100


async def test_what_waits_at_the_door_ends_with_it(tmp_path: Path) -> None:
    """No connection is left open behind a server that has stopped."""
    with ExitStack() as stack:
        async with house(tmp_path) as made:
            half = stack.enter_context(made.line())
            await half.send(b"half")
            with made.line() as line:  # taken after it
                await line.send(b"[1]\n")
                await line.receive()
        with anyio.fail_after(BOUND):
            assert await over(half)
