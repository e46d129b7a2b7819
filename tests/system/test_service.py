"""hutchd under a service manager: its variables, its passed sockets, and their absence in its children."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import anyio
import pytest

from hutch_daemon.service import VARIABLES
from tests.system.host import START, Host, host
from tests.system.log import log_of

pytestmark = pytest.mark.system

MANAGER = """
import fcntl, os, sys
fds = [fcntl.fcntl(int(fd), fcntl.F_DUPFD, 100) for fd in sys.argv[1].split(",") if fd]
for at, fd in enumerate(fds):
    os.dup2(fd, 3 + at)
    os.close(fd)
for name in ("LISTEN_PID", "WATCHDOG_PID"):
    os.environ[name] = str(os.getpid())
os.execv(sys.executable, [sys.executable, "-m", "hutch_daemon"])
"""
"""The work of a manager between fork and exec."""


class Manager:
    """The manager's end of the socket NOTIFY_SOCKET."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.heard: list[str] = []
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._sock.bind(address.replace("@", "\0", 1) if address.startswith("@") else address)
        self._sock.setblocking(False)

    def close(self) -> None:
        self._sock.close()

    async def hear(self, *lines: str) -> str:
        """Wait for the next message that has, for each of `lines`, a line that begins with it."""
        with anyio.fail_after(START):
            while True:
                await anyio.wait_readable(self._sock)
                message = self._sock.recv(4096).decode()
                self.heard.append(message)
                if all(any(said.startswith(line) for said in message.split("\n")) for line in lines):
                    return message


@pytest.fixture
async def made() -> AsyncIterator[Host]:
    """A host whose hutchd the test starts."""
    async with host("[executors]\nspares = 0\n", start=False) as made:
        made.write_settings()
        yield made


@pytest.fixture
def manager(made: Host) -> Iterator[Manager]:
    """A manager that listens at a path."""
    manager = Manager(str(made.root / "notify"))
    yield manager
    manager.close()


async def _launch(
    made: Host, manager: Manager | None, passed: dict[str, socket.socket] | None = None, *, watchdog: str = ""
) -> None:
    """Start hutchd as a manager does; return at once. Heartbeats fill the manager's queue (10 by default), so few are
    sent."""
    passed = passed or {}
    fds = [sock.fileno() for sock in passed.values()]
    env = {"LISTEN_FDS": str(len(fds)), "LISTEN_FDNAMES": ":".join(passed), "WATCHDOG_USEC": watchdog}
    if manager is not None:
        env["NOTIFY_SOCKET"] = manager.address
    with made.log.open("ab") as log:
        made.daemon = await anyio.open_process(
            [sys.executable, "-c", MANAGER, ",".join(map(str, fds))],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**made.env, **env},
            cwd=made.root,
            pass_fds=fds,
        )


@contextmanager
def _sockets(made: Host) -> Iterator[dict[str, socket.socket]]:
    """Create the sockets as a manager does."""
    with ExitStack() as stack:
        sockets = {}
        for name in ("client", "executor"):
            sockets[name] = stack.enter_context(socket.socket(socket.AF_UNIX))
            sockets[name].bind(str(made.runtime / f"{name}.sock"))
            (made.runtime / f"{name}.sock").chmod(0o600)
            sockets[name].listen()
        yield sockets


@pytest.mark.parametrize("kind", ["path", "abstract"])
async def test_ready_is_sent_when_it_serves_and_stopping_when_it_stops(made: Host, kind: str) -> None:
    """A client that connects at READY is served. The watchdog gets messages while hutchd lives."""
    manager = Manager(str(made.root / "notify") if kind == "path" else f"@hutch-{secrets.token_hex(8)}")
    try:
        await _launch(made, manager, watchdog="400000")
        await manager.hear("READY=1", "STATUS=Serves at ")
        async with made.client(redial_for=0) as hutch:
            pid = (await hutch.get_status()).pid
        for _ in range(3):
            await manager.hear("WATCHDOG=1")
        made.signal(signal.SIGTERM)
        stopping = await manager.hear("STOPPING=1")
        code = await made.exited()

        assert pid == made.pid if made.daemon else True
        assert "EXTEND_TIMEOUT_USEC=90000000" in stopping.split("\n")
        assert [one for one in manager.heard if "READY=1" in one][1:] == []
        assert code == 0
    finally:
        manager.close()


async def test_a_reload_is_reported_from_start_to_end(made: Host, manager: Manager) -> None:
    """The report has the time of the reload's start; the status reports invalid settings."""
    await _launch(made, manager)
    await manager.hear("READY=1")
    made.settings = "[turns]\ntimeuot = 1\n"
    made.write_settings()
    made.signal(signal.SIGHUP)
    begun = await manager.hear("RELOADING=1", "MONOTONIC_USEC=")
    ended = await manager.hear("READY=1")

    assert begun.split("\n")[1].removeprefix("MONOTONIC_USEC=").isdecimal()
    assert "STATUS=The new settings are not in force" in ended


async def test_passed_sockets_outlive_hutchd(made: Host, manager: Manager) -> None:
    """hutchd uses both; a client that connects while no hutchd runs is served by the next."""
    ask = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "get_version", "params": {}}) + "\n"
    with _sockets(made) as passed:
        await _launch(made, manager, passed)
        await manager.hear("READY=1")
        files = {name: (made.runtime / f"{name}.sock").stat().st_ino for name in passed}
        async with made.client(redial_for=0) as hutch:
            session = await made.script(hutch, [{"text": "hello"}])
            async with log_of(hutch, session) as log:
                end = await log.play(session, "go")
        stopped = await made.stop()
        with socket.socket(socket.AF_UNIX) as early:
            early.settimeout(START)
            early.connect(str(made.socket))
            early.sendall(ask.encode())
            await _launch(made, manager, passed)
            answer = await anyio.to_thread.run_sync(early.recv, 4096)
        await manager.hear("READY=1")
        await made.kill()

        assert end.state == "completed"
        assert stopped == 0
        assert json.loads(answer)["result"]["version"]
        assert files == {name: (made.runtime / f"{name}.sock").stat().st_ino for name in passed}


@pytest.mark.parametrize(
    ("names", "code", "says"),
    [
        ({"client": "client", "broker": "executor"}, 2, "passed a socket named 'broker'"),
        ({"client": "executor"}, 1, "client.sock listens elsewhere"),
    ],
)
async def test_other_sockets_are_refused(made: Host, names: dict[str, str], code: int, says: str) -> None:
    """hutchd does not start, gives the reason in one sentence, and leaves their files alone."""
    with _sockets(made) as passed:
        await _launch(made, None, {name: passed[which] for name, which in names.items()})
        ended = await made.exited()

        assert ended == code
        assert says in made.log.read_text()
        assert "Traceback" not in made.log.read_text()
        assert {"client.sock", "executor.sock"} <= {path.name for path in made.runtime.iterdir()}


async def test_a_file_in_place_of_a_socket_is_an_error_in_one_sentence(made: Host) -> None:
    """This holds for the socket that hutchd opens last, too."""
    made.socket.touch()
    refused = await made.hutchd()

    assert refused.code == 1
    assert refused.err.splitlines()[-1] == f"hutchd: {made.socket} is in the way and is not a socket. Remove it."
    assert "Traceback" not in refused.err


async def test_no_child_inherits_the_managers_sockets_and_variables(made: Host, manager: Manager) -> None:
    """Neither probes nor agents inherit them: they could notify the manager in hutchd's name."""
    programs = made.root / "programs"
    programs.mkdir()
    (programs / "bwrap").write_text(f'#!/bin/sh\nenv >> "{made.root}/seen"\necho ok\n')
    (programs / "bwrap").chmod(0o755)
    made.extra_env["PATH"] = f"{programs}:{os.environ.get('PATH', os.defpath)}"
    with _sockets(made) as passed:
        await _launch(made, manager, passed)
        await manager.hear("READY=1")
        async with made.client(redial_for=0) as hutch:
            call = {"tool": "Bash", "input": {"command": "env"}, "run": True}
            session = await made.script(hutch, [call], permission_mode="bypass")
            async with log_of(hutch, session) as log:
                await log.play(session, "go")
                (result,) = log.of("tool_result")
        await made.stop()
        seen = Path(made.root, "seen").read_text()

        assert "HUTCH_STATE_DIR=" in seen
        assert "HOME=" in result.text
        assert [name for name in VARIABLES if f"{name}=" in seen + result.text] == []
