"""What the broker costs: `python -m tests.broker.bench`. Compare what one run prints, never two runs.

The provider, the agents and the stand-in for hutchd share one process, the broker is its own, as it always is. Direct
and brokered requests take turns. `first byte` is from sending a request to the first byte of the answer's body.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from time import perf_counter

import anyio
import anyio.abc
import msgspec

from hutch_shared import broker_link as link
from hutch_shared.ids import new_token
from tests.broker.stage import KEY, Stage, request

_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
_EVENT = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":0,"delta":{"text":"some words"}}\n\n'
_CHUNK = b"%x\r\n%b\r\n" % (len(_EVENT), _EVENT)


class Provider:
    """Answers each request with `events` events, `pace` seconds apart."""

    def __init__(self) -> None:
        self.events = 1
        self.pace = 0.0

    async def talk(self, stream: anyio.abc.SocketStream) -> None:
        async with stream:
            try:
                while True:
                    got = b""
                    while b'"hello"}]}' not in got:
                        got += await stream.receive()
                    await stream.send(_HEAD)
                    for _ in range(self.events):
                        await stream.send(_CHUNK)
                        if self.pace:
                            await anyio.sleep(self.pace)
                    await stream.send(b"0\r\n\r\n")
            except (anyio.EndOfStream, anyio.BrokenResourceError):
                return


@asynccontextmanager
async def broker(url: str) -> AsyncIterator[tuple[Stage, int]]:
    """A broker's process, linked."""
    with tempfile.TemporaryDirectory(prefix="hb-") as folder:
        (Path(folder) / "b").mkdir(mode=0o700)
        boot = link.BrokerBoot(token=new_token(), control=f"{folder}/c.sock", socket=f"{folder}/b/broker.sock")
        child = subprocess.Popen(
            [sys.executable, "-m", "hutch_broker"], stdin=subprocess.PIPE, env={"PATH": os.defpath}
        )
        assert child.stdin is not None
        with child.stdin:
            child.stdin.write(msgspec.json.encode(boot) + b"\n")
        stage = Stage(boot, url)
        stage.may_answer.set()
        try:
            while not Path(boot.control).exists():
                await anyio.sleep(0.01)
            async with stage.linked():
                yield stage, child.pid
        finally:
            child.terminate()
            child.wait()


def cpu(pid: int) -> float:
    """Return the seconds of CPU that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def first_byte(stream: anyio.abc.ByteStream, raw: bytes) -> float:
    """Make a request on a connection that stays; return the seconds to the body's first byte."""
    began = perf_counter()
    await stream.send(raw)
    got = b""
    taken = 0.0
    while not got.endswith(b"0\r\n\r\n"):
        got += await stream.receive()
        if not taken and b"data:" in got:
            taken = perf_counter() - began
    return taken


async def main(requests: int, streams: int, events: int) -> None:
    """Print the ratios."""
    provider = Provider()
    async with await anyio.create_tcp_listener(local_host="127.0.0.1", local_port=0) as listener:
        port = listener.extra(anyio.abc.SocketAttribute.local_port)
        async with anyio.create_task_group() as tasks, broker(f"http://127.0.0.1:{port}") as (stage, pid):
            tasks.start_soon(listener.serve, provider.talk)
            _, token = await stage.lease(requests=10**6)
            raw = request(token).replace(b"Connection: close\r\n", b"")
            direct_raw = raw.replace(token.encode(), KEY.encode())
            ways: dict[str, tuple[anyio.abc.ByteStream, bytes]] = {
                "direct": (await anyio.connect_tcp("127.0.0.1", port), direct_raw),
                "brokered": (await stage.dial(), raw),
            }
            times: dict[str, list[float]] = {way: [] for way in ways}
            for _ in range(requests):
                for way, (stream, bytes_) in ways.items():
                    times[way].append(await first_byte(stream, bytes_))
            for way, taken in times.items():
                cuts = statistics.quantiles(taken[requests // 10 :], n=100)
                print(f"first byte {way:9} p50 {cuts[49] * 1e6:6.0f} µs  p99 {cuts[98] * 1e6:6.0f} µs")
            for stream, _ in ways.values():
                await stream.aclose()
            provider.events = events

            async def flood(dial: Callable[[], Awaitable[anyio.abc.ByteStream]], bytes_: bytes) -> None:
                stream = await dial()
                await first_byte(stream, bytes_)
                await stream.aclose()

            dials: dict[str, tuple[Callable[[], Awaitable[anyio.abc.ByteStream]], bytes]] = {
                "direct": (lambda: anyio.connect_tcp("127.0.0.1", port), direct_raw),
                "brokered": (stage.dial, raw),
            }
            for way, (dial, bytes_) in dials.items():
                before, began = cpu(pid), perf_counter()
                async with anyio.create_task_group() as flooding:
                    for _ in range(streams):
                        flooding.start_soon(flood, dial, bytes_)
                took, used = perf_counter() - began, cpu(pid) - before
                rate = streams * events / took
                each = used / streams / events * 1e6
                print(f"{streams} streams {way:9} {rate:8.0f} events/s  broker {each:5.1f} µs CPU an event")
            tasks.cancel_scope.cancel()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--streams", type=int, default=20)
    parser.add_argument("--events", type=int, default=2000)
    chosen = parser.parse_args()
    anyio.run(main, chosen.requests, chosen.streams, chosen.events)
