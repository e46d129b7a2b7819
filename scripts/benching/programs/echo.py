"""The smallest server: an asyncio.Protocol that reads a line of JSON with orjson, and writes one."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import orjson


class Echo(asyncio.Protocol):
    """One connection."""

    def __init__(self) -> None:
        """Start without a transport."""
        self._rest = b""
        self._transport: asyncio.WriteTransport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Answer each line with its parameters."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            asked: dict[str, Any] = orjson.loads(line)
            answer = {"jsonrpc": "2.0", "result": asked.get("params"), "id": asked["id"]}
            self._transport.write(orjson.dumps(answer) + b"\n")


async def main() -> None:
    """Serve the socket named in the arguments."""
    server = await asyncio.get_running_loop().create_unix_server(Echo, sys.argv[1], backlog=1024)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
