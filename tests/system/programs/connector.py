"""Relays connections: it accepts on the socket at standard input, and connects to another socket as its account.

connector.py PATH
"""

from __future__ import annotations

import asyncio
import socket
import sys
from contextlib import suppress


async def lead(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy both ways until one side ends; then end the other."""
    try:
        there, onward = await asyncio.open_unix_connection(sys.argv[1])
    except OSError:
        writer.close()
        return
    await asyncio.gather(copy(reader, onward), copy(there, writer))


async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy until the source ends or the sink is closed."""
    with suppress(ConnectionError):
        while chunk := await reader.read(1 << 16):
            writer.write(chunk)
            await writer.drain()
    writer.close()


async def main() -> None:
    """Serve until killed. It never calls listen(): peers see the first listener's uid."""
    listening = socket.socket(fileno=0)
    listening.setblocking(False)
    async with asyncio.TaskGroup() as tasks:
        while True:
            line, _ = await asyncio.get_running_loop().sock_accept(listening)
            reader, writer = await asyncio.open_unix_connection(sock=line)
            tasks.create_task(lead(reader, writer))


asyncio.run(main())
