"""Bad clients: connections that send nothing, half a frame or garbage. Each connects again once it is cut off."""

from __future__ import annotations

import sys

import anyio

_SENDS = {"nothing": b"", "half": b'{"jsonrpc":"2.0","method":"pi', "garbage": b"\x00\xff{]not a frame[}\n"}
_AGAIN = 1.0


async def pester(path: str, kind: str, up: anyio.Semaphore) -> None:
    """Run one bad client until cancelled."""
    first = True
    while True:
        try:
            async with await anyio.connect_unix(path) as stream:
                if _SENDS[kind]:
                    await stream.send(_SENDS[kind])
                if first:
                    first = False
                    up.release()
                if kind == "garbage":
                    while True:
                        await stream.receive()
                        await anyio.sleep(_AGAIN)
                        await stream.send(_SENDS[kind])
                else:
                    await stream.receive()
        except (OSError, anyio.EndOfStream, anyio.BrokenResourceError):
            await anyio.sleep(_AGAIN / 10)


async def main(path: str, kind: str, count: int) -> None:
    """Run all bad clients; print `ready` once each has connected."""
    up = anyio.Semaphore(0)
    async with anyio.create_task_group() as tasks:
        for _ in range(count):
            tasks.start_soon(pester, path, kind, up)
        for _ in range(count):
            await up.acquire()
        sys.stdout.write("ready\n")
        sys.stdout.flush()


if __name__ == "__main__":
    anyio.run(main, sys.argv[1], sys.argv[2], int(sys.argv[3]))
