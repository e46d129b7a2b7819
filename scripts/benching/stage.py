"""Programs for benches: they start with a clean environment, and end with their block."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import anyio
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream

from hutch_client.client import HutchClient
from hutch_shared import messages as m

__all__ = ["KEY", "TOP", "Program", "leased", "program"]

TOP: Final = Path(__file__).resolve().parents[2]
KEY: Final = "sk-rehearsal-the-key-of-the-bench"
_LINE_LIMIT: Final = 1 << 20


class Program:
    """A running program of `programs/`: it reads lines and prints lines."""

    def __init__(self, process: Process) -> None:
        """Take over a running process."""
        assert process.stdout is not None
        self._process = process
        self._lines = BufferedByteReceiveStream(process.stdout)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    async def line(self) -> str:
        """Return the next line that it prints."""
        return (await self._lines.receive_until(b"\n", _LINE_LIMIT)).decode()

    async def answer(self, request: Mapping[str, Any] | None = None) -> Any:
        """Send a request as a line of JSON, if there is one; return the next line that it prints, decoded."""
        if request is not None:
            assert self._process.stdin is not None
            await self._process.stdin.send(json.dumps(request).encode() + b"\n")
        return json.loads(await self.line())


@asynccontextmanager
async def program(
    name: str, *args: object, env: Mapping[str, str] | None = None, first_input: bytes = b""
) -> AsyncIterator[Program]:
    """Run `programs/NAME.py` during the block. It shares our standard error."""
    process = await anyio.open_process(
        [sys.executable, "-m", f"scripts.benching.programs.{name}", *map(str, args)],
        cwd=TOP,
        env={"PATH": os.environ.get("PATH", os.defpath), "LANG": "C.UTF-8", **(env or {})},
        stdin=subprocess.PIPE,
        stderr=None,
    )
    async with process:
        try:
            if first_input:
                assert process.stdin is not None
                await process.stdin.send(first_input)
            yield Program(process)
        finally:
            if process.returncode is None:
                process.kill()


async def leased(hutch: HutchClient, session: m.Session, within: float = 60.0) -> m.Session:
    """Return the session once it has its executor."""
    with anyio.fail_after(within):
        while (now := await hutch.get_session(session.id)).executor_state != "leased":  # noqa: ASYNC110 nobody tells
            await anyio.sleep(0.02)
    return now
