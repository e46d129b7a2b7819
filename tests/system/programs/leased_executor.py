"""A script executor that takes a lease as an agent's does, and lets a test reach the broker as one of its processes.

In the session's directory it writes `grant.json`. A process that it started relays each connection to `inside.sock`
there to the broker.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import msgspec

from hutch_executor import __main__
from hutch_executor.runners.port import DaemonPort
from hutch_executor.runners.script import ScriptRunner
from hutch_shared import messages as m
from hutch_shared.agents import AGENTS


class LeasedRunner(ScriptRunner):
    """The script runner, with a lease."""

    async def open(self, session: m.PrepareSession, daemon: DaemonPort) -> m.Prepared:
        """Take the lease and start the way to the broker."""
        prepared = await super().open(session, daemon)
        grant = await daemon.get_api_key("anthropic")
        cwd = Path(session.cwd)
        argv = [sys.executable, "-P", __file__, "relay", str(cwd / "inside.sock"), str(grant.unix_socket)]
        with subprocess.Popen(argv, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL) as relay:
            assert relay.stdout is not None
            relay.stdout.readline()
            relay.returncode = 0  # it runs on, so Popen must not wait
        part = cwd / "grant.json.part"
        part.write_bytes(msgspec.json.encode(grant))
        part.rename(cwd / "grant.json")
        return prepared


async def relay(inside: str, broker: str) -> None:
    """Relay each connection to `inside` to `broker`, byte by byte; if one side ends, end the other."""

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while chunk := await reader.read(1 << 16):
                writer.write(chunk)
                await writer.drain()
        writer.close()

    async def lead(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, onward = await asyncio.open_unix_connection(broker)
        except OSError:
            writer.close()
            return
        await asyncio.gather(copy(reader, onward), copy(there, writer))

    async with await asyncio.start_unix_server(lead, inside) as server:
        print("ready", flush=True)
        await server.serve_forever()


if __name__ == "__main__":
    if sys.argv[1:2] == ["relay"]:
        asyncio.run(relay(*sys.argv[2:]))
    else:
        AGENTS["script"] = AGENTS["script"]._replace(runner=f"{__name__}:LeasedRunner")
        sys.exit(__main__.main())
