"""The reaper above an executor: what it holds, what ends it, and what it says of the executor's end."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final

import anyio
import msgspec
import pytest
from anyio.abc import Process

from hutch_executor.process.reaper import REAPER_OPTION
from tests.executor.fake_hutchd import WAIT, FakeHutchd, boot, dead, is_alive, prepare, prompt
from tests.executor.test_process import ENVIRONMENT, bash

pytestmark = pytest.mark.system

MEMORY: Final = 1 << 20
"""The bytes that a reaper may take: its own, and its part of what it shares."""
BACKGROUND: Final = (
    "(setsid sh -c 'echo $$ > pid.new; mv pid.new pid; exec sleep 600' >/dev/null 2>&1 &);"
    " while [ ! -e pid ]; do sleep 0.02; done; cat pid"
)
"""Prints the pid of a process in a session of its own, once it is there: the runner ends the call's own group."""
FORKED: Final = """
import os, sys, time
from hutch_executor.process.reaper import fork_reaper
for _ in range(2):
    if os.fork() == 0:
        fork_reaper()
        if os.fork() == 0:
            os.write(1, b"%d %d\\n" % (os.getppid(), os.getpid()))
            time.sleep(600)
        time.sleep(600)
time.sleep(600)
"""
"""A process that forks two executors, each of which gets a reaper and starts a process."""

HIDDEN: Final = """
import os, subprocess, sys, time
from hutch_executor.process.reaper import fork_reaper
if os.fork() == 0:
    fork_reaper()
    child = subprocess.Popen([sys.argv[1], "600"], stdout=subprocess.DEVNULL)
    until = time.monotonic() + 10
    while (shown := os.path.exists(f"/proc/{child.pid}")) and time.monotonic() < until:
        os.sched_yield()
    os.write(1, b"%d %d\\n" % (child.pid, shown))
    os._exit(0)
os.wait()
"""
"""An executor that starts a program and ends. It prints the program's pid, and whether /proc shows it.

Popen returns a moment before the kernel has hidden the program.
"""

SLOW: Final = """
import mmap, os, signal
from hutch_executor.process.reaper import fork_reaper
if os.fork() == 0:
    reaper = fork_reaper()
    maps = [mmap.mmap(-1, mmap.PAGESIZE) for _ in range(20_000)]
    os.close(reaper.pipe)
    signal.pause()
print(os.waitstatus_to_exitcode(os.wait()[1]))
"""
"""An executor that the reaper kills, and whose end takes long: the kernel has much to clean up."""
HARDENED: Final = """
import os, signal, sys
from hutch_shared.hardening import forbid_dumps
from hutch_executor.process.reaper import fork_reaper
os.setgid(65534)
os.setuid(65534)
for ends in (lambda reaper: reaper.report_end(0), lambda reaper: os.kill(os.getpid(), signal.SIGKILL)):
    if os.fork() == 0:
        reaper = fork_reaper()
        forbid_dumps()
        ends(reaper)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.wait()[1]))
"""
"""Two executors of an ordinary account: one ends in order, the other is killed. It prints their reapers' exit codes."""


def executor_of(reaper: int) -> int | None:
    """Return the executor below a reaper, once the reaper runs its own program."""
    if b"hutch-reaper" not in Path(f"/proc/{reaper}/cmdline").read_bytes():
        return None
    children = Path(f"/proc/{reaper}/task/{reaper}/children").read_text().split()
    return int(children[0]) if children else None


@asynccontextmanager
async def reaped(hutchd: FakeHutchd) -> AsyncIterator[tuple[Process, int]]:
    """Start an executor with a reaper; yield the reaper's process and the executor's pid. Both are killed."""
    argv = [sys.executable, "-P", "-m", "hutch_executor", REAPER_OPTION]
    process = await anyio.open_process(
        argv, stdout=subprocess.DEVNULL, stderr=None, cwd="/", env=ENVIRONMENT, start_new_session=True
    )
    executor = None
    try:
        assert process.stdin is not None
        await process.stdin.send(msgspec.json.encode(boot(hutchd.path)) + b"\n")
        with anyio.fail_after(WAIT):
            while (executor := executor_of(process.pid)) is None:
                await anyio.sleep(0.01)
        yield process, executor
    finally:
        for pid in (executor, process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid or process.pid, signal.SIGKILL)
        with anyio.CancelScope(shield=True):
            await process.aclose()


async def child_of(hutchd: FakeHutchd, folder: Path) -> int:
    """Let the executor's agent start a process that outlives its tool call; return its pid."""
    await hutchd.call("prepare_session", prepare(folder))
    await hutchd.call("execute_prompt", prompt(bash(BACKGROUND)))
    await hutchd.ended()
    return int(hutchd.of_kind("tool_result")[0]["text"])


async def ended(process: Process) -> int:
    """Return the exit code of a reaper."""
    with anyio.fail_after(WAIT):
        return await process.wait()


@pytest.fixture
def hutchd(tmp_path: Path) -> FakeHutchd:
    return FakeHutchd(tmp_path / "executor.sock")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "work"
    made.mkdir()
    return made


async def test_a_reaper_holds_nothing_of_its_executor(hutchd: FakeHutchd, folder: Path) -> None:
    """It has no environment, no socket, no output and no file; it takes at most 1 MiB."""
    async with hutchd.up(), reaped(hutchd) as (process, executor):
        await hutchd.call("prepare_session", prepare(folder))
        proc = Path(f"/proc/{process.pid}")
        environment = (proc / "environ").read_bytes()
        files = {int(fd.name): os.readlink(fd) for fd in (proc / "fd").iterdir()}
        memory = next(line for line in (proc / "smaps_rollup").read_text().splitlines() if line.startswith("Pss:"))
        sessions = [os.getsid(pid) for pid in (process.pid, executor)]

    assert environment == b"PATH=/usr/bin:/bin\0"
    assert files.pop(0).startswith("pipe:")
    assert files == {1: os.devnull, 2: os.devnull}
    assert int(memory.split()[1]) * 1024 <= MEMORY
    assert sessions == [process.pid, executor]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSEGV])
async def test_the_end_of_an_executor_is_the_end_of_what_it_started(
    hutchd: FakeHutchd, folder: Path, how: signal.Signals
) -> None:
    """Before that, no signal but SIGKILL ends the reaper, which says how the executor ended."""
    async with hutchd.up(), reaped(hutchd) as (process, executor):
        child = await child_of(hutchd, folder)
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1, signal.SIGALRM):
            process.send_signal(number)
        os.kill(executor, signal.SIGSTOP)
        os.kill(executor, signal.SIGCONT)
        assert is_alive(child)
        os.kill(executor, how)
        code = await ended(process)

    assert code == 128 + how
    await dead(child)


async def test_an_orderly_end_passes_through_the_reaper(hutchd: FakeHutchd, folder: Path) -> None:
    """The exit code is the executor's."""
    async with hutchd.up(), reaped(hutchd) as (process, executor):
        await hutchd.call("prepare_session", prepare(folder))
        os.kill(executor, signal.SIGTERM)
        code = await ended(process)

    assert code == 0


async def exit_codes(script: str) -> list[int]:
    """Run a script that prints exit codes; return them."""
    argv = (sys.executable, "-P", "-c", script)
    with anyio.fail_after(WAIT):
        result = await anyio.run_process(argv, env=ENVIRONMENT, cwd="/", stderr=None)
    return [int(code) for code in result.stdout.split()]


async def test_the_end_of_an_executor_that_ends_slowly_is_seen() -> None:
    """The reaper looks until the executor has ended, and loses nothing by its pauses."""
    codes = await exit_codes(SLOW)

    assert codes == [128 + signal.SIGKILL]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another account")
async def test_a_killed_executor_is_not_reported_as_one_that_ended_in_order() -> None:
    """The kernel may hide how a process ended that was not dumpable. Then the reaper says that it does not know."""
    in_order, killed = await exit_codes(HARDENED)

    assert in_order == 0
    assert killed in (128 + signal.SIGKILL, 255)


async def test_an_executor_without_its_reaper_leaves_in_order(hutchd: FakeHutchd, folder: Path) -> None:
    """The reaper is killed: the executor ends what it started, and itself."""
    async with hutchd.up(), reaped(hutchd) as (process, executor):
        child = await child_of(hutchd, folder)
        process.kill()
        await dead(executor)

    await dead(child)


async def test_forked_executors_have_a_reaper_each() -> None:
    """The end of one executor ends its own processes only."""
    async with await anyio.open_process([sys.executable, "-P", "-c", FORKED], env=ENVIRONMENT, cwd="/") as process:
        assert process.stdout is not None
        said = b""
        while said.count(b"\n") < 2:
            said += await process.stdout.receive()
        first, second = ((int(executor), int(child)) for executor, child in map(bytes.split, said.splitlines()))
        os.kill(first[0], signal.SIGKILL)
        await dead(first[1])
        spared = [is_alive(pid) for pid in second]
        os.kill(second[0], signal.SIGKILL)
        await dead(second[1])
        process.kill()

    assert spared == [True, True]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount /proc")
async def test_a_process_that_proc_does_not_show_is_ended_too(tmp_path: Path) -> None:
    """A /proc mounted with `hidepid` hides a process whose program its account may not read."""
    program = tmp_path / "unreadable"
    shutil.copy("/bin/sleep", program)
    program.chmod(0o111)
    mounted = 'mount -t proc -o hidepid=2,gid=65533 proc /proc && exec setpriv --bounding-set=-all "$@"'
    python = (sys.executable, "-P", "-c", HIDDEN, str(program))
    argv = ("unshare", "--mount", "--propagation=private", "sh", "-c", mounted, "sh", *python)
    with anyio.fail_after(WAIT):
        result = await anyio.run_process(argv, env=ENVIRONMENT, cwd="/", stderr=None, check=False)
    if result.returncode != 0:
        pytest.skip("kernel: /proc cannot be mounted here")
    child, shown = map(int, result.stdout.split())

    assert not shown, "the program can be inspected, so the test shows nothing"
    await dead(child)
