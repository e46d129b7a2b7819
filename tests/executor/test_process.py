"""The real program, booted as hutchd boots it, with a small fake hutchd."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
from anyio.abc import Process

from hutch_executor.events.spool_files import read_spool
from hutch_shared import messages as m
from hutch_shared.errors import HutchError, Reason
from tests.executor.fake_hutchd import QUESTION, WAIT, FakeHutchd, boot, dead, is_alive, prepare, prompt

pytestmark = pytest.mark.system

ENVIRONMENT = {"PATH": "/usr/bin:/bin", "HOME": "/nonexistent", "ANTHROPIC_API_KEY": "canary", "LANG": "C.UTF-8"}


@pytest.fixture
def hutchd(tmp_path: Path) -> FakeHutchd:
    return FakeHutchd(tmp_path / "executor.sock")


@pytest.fixture
def cwd(tmp_path: Path) -> Path:
    made = tmp_path / "work"
    made.mkdir()
    return made


@asynccontextmanager
async def executor(
    hutchd: FakeHutchd, *, python: tuple[str, ...] = ("-P",), stderr: int | None = None, **changes: Any
) -> AsyncIterator[Process]:
    """Start an executor with its boot line; at the end it is killed if it still lives."""
    process = await anyio.open_process(
        [sys.executable, *python, "-m", "hutch_executor"],
        stdout=subprocess.DEVNULL,
        stderr=stderr,
        cwd="/",
        env=ENVIRONMENT,
        start_new_session=True,
    )
    try:
        assert process.stdin is not None
        await process.stdin.send(msgspec.json.encode(boot(hutchd.path, **changes)) + b"\n")
        yield process
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        with anyio.CancelScope(shield=True):
            await process.aclose()


async def exit_code(process: Process) -> int:
    """Return the exit code, once it has ended."""
    with anyio.fail_after(WAIT):
        return await process.wait()


def bash(command: str) -> str:
    """Return a prompt that runs `command`."""
    return json.dumps({"tool": "Bash", "input": {"command": command}, "run": True})


async def test_it_serves_a_session_and_leaves_nothing(hutchd: FakeHutchd, cwd: Path) -> None:
    """A prompt runs; on `shutdown` the executor ends, and with it a double-forked child of the agent."""
    child_of_its_own = "setsid sh -c 'echo $$ > pid.new; mv pid.new pid; exec sleep 600' >/dev/null 2>&1 &"
    double_fork = f"({child_of_its_own}); while [ ! -e pid ]; do sleep 0.02; done; cat pid"
    async with hutchd.up(), executor(hutchd) as process:
        await hutchd.call("prepare_session", prepare(cwd))
        await hutchd.call("execute_prompt", prompt(bash(double_fork)))
        await hutchd.ended()
        child = int(hutchd.of_kind("tool_result")[0]["text"])
        assert is_alive(child)
        await hutchd.call("shutdown", m.Shutdown("the session was closed"))
        code = await exit_code(process)

    assert code == 0
    await dead(child)
    assert list((cwd.parent / "spool").iterdir()) == []


async def test_a_hutchd_that_is_killed_before_the_boot_line_is_an_ordinary_end() -> None:
    """The executor reports it in one line and exits with 2."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        async with await anyio.open_process(
            [sys.executable, "-P", "-m", "hutch_executor"], stdin=theirs.fileno(), env=ENVIRONMENT, cwd="/"
        ) as process:
            theirs.close()
            await anyio.wait_readable(ours)
            ours.close()
            assert process.stderr is not None
            said = b"".join([chunk async for chunk in process.stderr])
            code = await exit_code(process)

    assert code == 2
    assert b"hutchd ended before it sent the boot line" in said
    assert b"Traceback" not in said


@pytest.mark.parametrize("stdin", ["closed", "a closed socket"])
async def test_an_executor_without_its_starter_ends_with_one_line(stdin: str) -> None:
    """Its standard input is closed, or the starter is gone before the executor announces itself."""
    ours, theirs = socket.socketpair()
    ours.close()
    with theirs:
        argv = [sys.executable, "-P", "-m", "hutch_executor"]
        closed = ["/bin/sh", "-c", 'exec "$@" <&-', "sh"] if stdin == "closed" else []
        done = await anyio.run_process([*closed, *argv], stdin=theirs.fileno(), env=ENVIRONMENT, cwd="/", check=False)

    assert done.returncode == 2
    assert done.stderr == b"hutch-executor: cannot start: the process that started it is gone.\n"


async def test_its_process_is_hardened(hutchd: FakeHutchd, cwd: Path) -> None:
    """The executor is not dumpable, and its memory is limited.

    Its commands get no standard input and only listed variables, and nothing that they see contains the token.
    """
    look = "env; readlink /proc/self/fd/0; ulimit -c; ulimit -d; ls -l /proc/self/fd"
    async with hutchd.up(), executor(hutchd, memory_limit=8 << 30) as process:
        await hutchd.call("prepare_session", prepare(cwd))
        await hutchd.call("execute_prompt", prompt(bash(look)))
        await hutchd.ended()
        seen = hutchd.of_kind("tool_result")[0]["text"]
        owner = os.stat(f"/proc/{process.pid}/environ").st_uid
        argv = Path(f"/proc/{process.pid}/cmdline").read_bytes()

    assert "canary" not in seen
    assert "token-of-the-test" not in seen
    assert b"token" not in argv
    assert "/dev/null\n0\n8388608\n" in seen
    assert "socket:" not in seen
    assert ".spool" not in seen
    assert owner == 0


async def test_it_goes_on_while_hutchd_is_away(hutchd: FakeHutchd, cwd: Path) -> None:
    """A turn that began before the outage ends after it, each event once."""
    steps = [{"text": "a"}, {"wait_file": "go"}, {"text": "b"}]
    async with executor(hutchd) as process:
        async with hutchd.up():
            await hutchd.call("prepare_session", prepare(cwd))
            await hutchd.call("execute_prompt", prompt("\n".join(map(json.dumps, steps))))
            await hutchd.until(lambda: hutchd.of_kind("text"))
        (cwd / "go").touch()
        hutchd.epoch = 2
        async with hutchd.up():
            await hutchd.ended()
            process.terminate()
            code = await exit_code(process)

    assert [data["text"] for data in hutchd.of_kind("text")] == ["a", "b"]
    assert [event.n for event in hutchd.events] == [1, 2, 3, 4]
    assert code == 0


async def test_a_killed_executor_leaves_its_spool(hutchd: FakeHutchd, cwd: Path) -> None:
    """Events of an outage are on the disk, also after SIGKILL."""
    steps = [{"text": "a"}, {"wait_file": "go"}, {"text": "b"}, {"wait_file": "never"}]
    spool = cwd.parent / "spool" / "x-0000000000000001.spool"

    def spooled() -> list[int]:
        with suppress(HutchError):
            return [n for n, _ in read_spool(spool)[1]]
        return []

    async with executor(hutchd) as process:
        async with hutchd.up():
            await hutchd.call("prepare_session", prepare(cwd))
            await hutchd.call("execute_prompt", prompt("\n".join(map(json.dumps, steps))))
            await hutchd.until(lambda: hutchd.of_kind("text"))
        (cwd / "go").touch()
        with anyio.fail_after(WAIT):
            while not any(b'"b"' in part.read_bytes() for part in spool.parent.glob("*.part")):
                await anyio.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        await exit_code(process)

    assert spooled()[-1] == 3


async def test_all_is_imported_before_hello(hutchd: FakeHutchd, cwd: Path, tmp_path: Path) -> None:
    """A whole session with an outage, a notify command and the end import nothing."""
    log = tmp_path / "stderr"
    steps = [{"text": "a"}, json.loads(bash("echo b")), {"wait_file": "go"}, {"text": "c"}]

    def imports() -> list[str]:
        return [line for line in log.read_text().splitlines() if line.startswith("import time:")]

    with log.open("wb") as stderr:
        async with executor(hutchd, python=("-P", "-X", "importtime"), stderr=stderr.fileno()) as process:
            async with hutchd.up():
                await hutchd.until(lambda: hutchd.hellos)
                before = imports()
                await hutchd.call("prepare_session", prepare(cwd))
                await hutchd.call("resolve_paths", m.ResolvePaths("s", ("a",)))
                await hutchd.call("run_notify", m.RunNotify(("true",), QUESTION, WAIT))
                await hutchd.call("execute_prompt", prompt("\n".join(map(json.dumps, steps))))
                await hutchd.until(lambda: hutchd.of_kind("tool_result"))
            (cwd / "go").touch()
            async with hutchd.up():
                await hutchd.ended()
                await hutchd.call("shutdown", m.Shutdown("the session was closed"))
                code = await exit_code(process)

    assert code == 0
    assert len(before) > 100
    assert imports() == before


async def test_an_unknown_agent_ends_it_at_once(hutchd: FakeHutchd) -> None:
    """The exit code 2 means that it could not start."""
    async with executor(hutchd, agent="nobody") as process:
        code = await exit_code(process)

    assert code == 2


async def test_a_superseded_executor_ends(hutchd: FakeHutchd) -> None:
    """`lease_lost` ends the executor."""
    hutchd.refuse = HutchError(Reason.LEASE_LOST)
    async with hutchd.up(), executor(hutchd) as process:
        code = await exit_code(process)

    assert code == 0
