"""An executor that relays a test to hutchd: a connection to `<executor>.sock` in its folder speaks as this process.

A file beside the socket has its boot message with the token.
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import suppress
from pathlib import Path

import msgspec

from hutch_executor.process.hardening import announce, harden
from hutch_shared import messages as m


async def lead(folder: Path) -> None:
    """Relay each connection to hutchd, byte by byte; if one side ends, end the other."""
    harden()
    announce(0)
    line = sys.stdin.buffer.readline()
    boot = msgspec.json.decode(line, type=m.Boot)

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while chunk := await reader.read(1 << 16):
                writer.write(chunk)
                await writer.drain()
        writer.close()

    async def dialled(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, onward = await asyncio.open_unix_connection(boot.socket)
        await asyncio.gather(copy(reader, onward), copy(there, writer))

    async with await asyncio.start_unix_server(dialled, folder / f"{boot.executor}.sock") as server:
        part = folder / f"{boot.executor}.part"
        part.write_bytes(line)
        part.rename(folder / f"{boot.executor}.json")
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(lead(Path(sys.argv[1])))
