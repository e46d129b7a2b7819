"""The smallest process between an agent and a provider: `hop SOCKET PORT` forwards bytes without reading them.

Any process in between costs as much on this machine. The broker's own cost is what it adds beyond that.
"""

from __future__ import annotations

import asyncio
import gc
import sys
from pathlib import Path


class End(asyncio.Protocol):
    """One end of a connection. It forwards received bytes to the other end."""

    def __init__(self) -> None:
        """Start without another end."""
        self.transport: asyncio.Transport | None = None
        self.other: End | None = None
        self.early = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        if self.other is None or self.other.transport is None:
            self.early += data
        else:
            self.other.transport.write(data)

    def connection_lost(self, _: Exception | None) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.close()


class AgentEnd(End):
    """The agent's end. It dials the provider."""

    def __init__(self, port: int) -> None:
        """Dial `port` once an agent has connected."""
        super().__init__()
        self._port = port

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._dialling = asyncio.get_running_loop().create_task(self._dial())

    async def _dial(self) -> None:
        far, end = await asyncio.get_running_loop().create_connection(End, "127.0.0.1", self._port)
        end.other, self.other = self, end
        far.write(self.early)


async def main(path: Path, port: int) -> None:
    """Serve until killed."""
    server = await asyncio.get_running_loop().create_unix_server(lambda: AgentEnd(port), path)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    await server.serve_forever()


if __name__ == "__main__":
    gc.disable()
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2])))
