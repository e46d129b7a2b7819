"""The smallest model provider. Its first line of output is its URL.

A request's body orders the answer: `{"events": N, "pace": S}` streams N events, S seconds apart (0: at once). With
`"stall"` the stream then stalls; once its client closes, the provider prints the time (monotonic).
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any, Final

_HEAD: Final = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
_EVENT: Final = (
    b'event: content_block_delta\ndata: {"type":"content_block_delta","index":0,"delta":{"text":"some words"}}\n\n'
)
_CHUNK: Final = b"%x\r\n%b\r\n" % (len(_EVENT), _EVENT)


async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer requests, one after the other."""
    try:
        while True:
            await answer(await order(reader), reader, writer)
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    finally:
        writer.close()


async def order(reader: asyncio.StreamReader) -> dict[str, Any]:
    """Read a request; return its body."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    length = int(head.partition(b"content-length:")[2].split(b"\r\n")[0])
    body: dict[str, Any] = json.loads(await reader.readexactly(length))
    return body


async def answer(asked: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Stream the events that the body orders."""
    writer.write(_HEAD)
    began = time.monotonic()
    for number in range(asked["events"]):
        if asked["pace"]:
            await asyncio.sleep(began + number * asked["pace"] - time.monotonic())
        writer.write(_CHUNK)
        await writer.drain()
    if asked.get("stall"):
        await reader.read()
        sys.stdout.write(f"{time.monotonic()}\n")
        sys.stdout.flush()
        raise ConnectionError
    writer.write(b"0\r\n\r\n")
    await writer.drain()


async def main() -> None:
    """Serve until killed."""
    server = await asyncio.start_server(talk, "127.0.0.1", 0, backlog=1024)
    sys.stdout.write(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
