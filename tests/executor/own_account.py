"""An executor under an account of its own, started as hutch-launcher starts it: hardened before the boot line."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import msgspec

from hutch_shared import messages as m
from tests.accounts import Account, installed
from tests.executor.fake_hutchd import EXECUTOR_ID, SESSION, WAIT, FakeHutchd, boot

__all__ = ["bash", "executor", "place", "prepare", "started"]


@contextmanager
def place() -> Iterator[Path]:
    """A directory that every account can enter and only root can change."""
    made = Path(tempfile.mkdtemp(prefix="hutch-place-", dir="/opt"))
    try:
        made.chmod(0o755)
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


@contextmanager
def started(who: Account, python: Path | None = None) -> Iterator[tuple[subprocess.Popen[bytes], socket.socket]]:
    """Start an executor; yield it and the other end of its standard input. Kill it at the end."""
    ours, theirs = socket.socketpair()
    ours.settimeout(WAIT)
    with ours:
        with theirs:
            process = subprocess.Popen(
                [str(python or installed().python), "-P", "-m", "hutch_executor"],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                cwd="/",
                env=who.env,
                user=who.uid,
                group=who.gid,
                extra_groups=os.getgrouplist(who.name, who.gid),
                umask=0o077,
            )
        try:
            yield process, ours
        finally:
            with suppress(ProcessLookupError):
                process.kill()
            process.wait()


@asynccontextmanager
async def executor(hutchd: FakeHutchd, who: Account) -> AsyncIterator[subprocess.Popen[bytes]]:
    """Yield an executor that serves; at the end shut it down and check that it ends in order."""
    with started(who) as (process, sock):
        assert await anyio.to_thread.run_sync(sock.recv, 1) == b"\n"
        sock.sendall(msgspec.json.encode(boot(hutchd.path)) + b"\n")
        await hutchd.until(lambda: hutchd.peer is not None)
        yield process
        await hutchd.call("shutdown", m.Shutdown("the test is over"))
        with anyio.fail_after(WAIT):
            assert await anyio.to_thread.run_sync(process.wait) == 0


def prepare(who: Account, cwd: Path, spool: Path, **changes: Any) -> m.PrepareSession:
    """Return the parameters of a session in `cwd`; the spool is made in `spool`, a directory of the account."""
    fields: dict[str, Any] = {
        "session": SESSION,
        "agent": "script",
        "cwd": str(cwd),
        "permission_mode": "ask",
        "options": m.AgentOptions(),
        "limits": m.Limits(),
        "spool": str(spool / EXECUTOR_ID),
        "home": str(who.home),
        "apart": True,
        "setup": m.AccountSetup(path="login", umask="auto"),
    }
    return m.PrepareSession(**(fields | changes))


def bash(*commands: str) -> str:
    """Return a prompt that runs the commands one after another."""
    return "\n".join(json.dumps({"tool": "Bash", "input": {"command": one}, "run": True}) for one in commands)
