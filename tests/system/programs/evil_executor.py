"""An executor that leads a test to hutchd: who dials `<executor>.sock` in EVIL_DIR speaks there as this very process.

Beside it lies its boot message, the token included. `evil_executor.py hutchd` is hutchd as it is, but that its
executors are these.
"""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from hutch_daemon import __main__, wiring
from hutch_daemon.environments.same_user import SameUser
from hutch_shared import messages as m


class Evil(SameUser):
    """Starts this program as an executor."""

    def __init__(self, **settings: Any) -> None:
        """Take the settings of `SameUser`."""
        super().__init__((sys.executable, "-P", __file__, os.environ["EVIL_DIR"]), **settings)


async def lead(folder: Path) -> None:
    """Lead everybody who dials to hutchd, byte by byte; where one side ends, the other one does."""
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
    if sys.argv[1:] == ["hutchd"]:
        sys.argv.pop()
        wiring.SameUser = Evil  # type: ignore[assignment,attr-defined]
        __main__.main()
    else:
        asyncio.run(lead(Path(sys.argv[1])))
