"""An agent's traffic: `streams FOLDER URL`. It takes orders at FOLDER/streams.sock, one line of JSON each.

An order has the `way` (`direct` to URL, `brokered` with the lease in FOLDER/grant.json, `hop` through FOLDER/hop.sock),
the number of concurrent `streams`, the number of requests (`times`) on each connection, and the request to the
provider. The answer has the number of events and the seconds. With `ways` instead of `way`, requests go each way in
turn, `gap` seconds apart; the answer has the seconds to the first event of each, by way. With `stall`, one line says
that all streams have stalled; the next one has the time (monotonic) at which the last stream was cut. With `leave` too,
the next order closes the streams, and the line has the time of that.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

_END: Final = b"0\r\n\r\n"
_MARK: Final = b"data:"

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Agent:
    """Makes requests each way."""

    def __init__(self, folder: Path, url: str) -> None:
        """Read the lease."""
        self._grant: dict[str, Any] = json.loads((folder / "grant.json").read_text())
        self._hop = folder / "hop.sock"
        self._url = urlsplit(url)

    async def dial(self, way: str) -> Streams:
        """Connect to the provider, or to the process in between."""
        if way == "direct":
            return await asyncio.open_connection(self._url.hostname, self._url.port)
        return await asyncio.open_unix_connection(self._hop if way == "hop" else self._grant["unix_socket"])

    def request(self, order: dict[str, Any], way: str) -> bytes:
        """Return the bytes of a request."""
        body = json.dumps({name: order.get(name) for name in ("events", "pace", "stall")}).encode()
        key = self._grant["value"] if way == "brokered" else "none"
        head = f"POST /v1/messages HTTP/1.1\r\nHost: a\r\nX-Api-Key: {key}\r\nContent-Length: {len(body)}\r\n\r\n"
        return head.encode() + body

    async def one(self, order: dict[str, Any]) -> int:
        """Make the requests of one stream; return the number of events."""
        line = await self.dial(order["way"])
        raw = self.request(order, order["way"])
        seen = sum([(await ask(line, raw))[1] for _ in range(order["times"])])
        line[1].close()
        return seen

    async def turns(self, order: dict[str, Any]) -> dict[str, list[float]]:
        """Make requests each way in turn, in rotating order; return the seconds to the first events."""
        ways: list[str] = order["ways"]
        lines = {way: (await self.dial(way), self.request(order, way)) for way in ways}
        firsts: dict[str, list[float]] = {way: [] for way in ways}
        for number in range(order["times"]):
            at = number % len(ways)
            for way in ways[at:] + ways[:at]:
                await asyncio.sleep(order["gap"])
                firsts[way].append((await ask(*lines[way]))[0])
        for line, _ in lines.values():
            line[1].close()
        return firsts

    async def stand(self, order: dict[str, Any]) -> list[Streams]:
        """Start the streams, and return them once each has its first event."""
        found = []
        for _ in range(order["streams"]):
            reader, writer = await self.dial(order["way"])
            writer.write(self.request(order, order["way"]))
            await reader.readuntil(_MARK)
            found.append((reader, writer))
        return found

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry out orders until the other side closes."""

        def say(value: object) -> None:
            writer.write(json.dumps(value).encode() + b"\n")

        while line := await reader.readline():
            order = json.loads(line)
            if order.get("stall"):
                standing = await self.stand(order)
                say("stalled")
                if order.get("leave"):
                    await reader.readline()
                    now = time.monotonic()
                    for _, one in standing:
                        one.close()
                    say(now)
                else:
                    await asyncio.gather(*(cut(one) for one, _ in standing))
                    say(time.monotonic())
                continue
            if "ways" in order:
                say(await self.turns(order))
                continue
            began = time.perf_counter()
            seen = await asyncio.gather(*(self.one(order) for _ in range(order["streams"])))
            say({"events": sum(seen), "seconds": time.perf_counter() - began})


async def ask(line: Streams, raw: bytes) -> tuple[float, int]:
    """Make a request; return the seconds to its first event, and the number of events."""
    reader, writer = line
    began = time.perf_counter()
    writer.write(raw)
    first, tail, seen = 0.0, b"", 0
    while not tail.endswith(_END):
        chunk = await reader.read(1 << 16)
        if not chunk:
            raise ConnectionError("the stream was cut")
        if not first and _MARK in chunk:
            first = time.perf_counter() - began
        seen += chunk.count(_MARK)
        tail = (tail + chunk)[-8:]
    return first, seen


async def cut(reader: asyncio.StreamReader) -> None:
    """Return once the stream is cut."""
    with suppress(ConnectionError):
        await reader.read()


async def main(folder: Path, url: str) -> None:
    """Serve orders until killed."""
    agent = Agent(folder, url)
    server = await asyncio.start_unix_server(agent.serve, folder / "streams.sock")
    await server.serve_forever()


if __name__ == "__main__":
    gc.disable()  # its pauses would count as the broker's
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2]))
