"""Everything that an executor started is gone within a second of its death, even if no hutchd runs."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import anyio
import pytest

from hutch_client.client import HutchClient
from hutch_shared import messages as m
from tests.rehearsal import Model, Use
from tests.system.host import KEY, Host, host, settings_for
from tests.system.log import executor_of, wait_for
from tests.system.processes import family, kill, table

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]

SETTINGS: Final = '[executors]\nspares = 0\n[sandbox]\nmode = "off"\n'
PROGRAMS: Final = Path(__file__).parent / "programs"
BOUND: Final = 1.0
"""Seconds from the death of an executor, for 99 of 100."""
GIVEN_UP: Final = 10.0


def living(pids: set[int]) -> set[int]:
    """Return those that live; a process whose first thread has ended lives as long as another one does."""
    alive = set()
    for pid in pids:
        try:
            state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0]
            if state not in b"ZX" or len(os.listdir(f"/proc/{pid}/task")) > 1:
                alive.add(pid)
        except OSError:
            continue
    return alive


@contextmanager
def none_left(pids: set[int]) -> Iterator[None]:
    """Kill what is left at the end, also of a test that failed."""
    try:
        yield
    finally:
        kill(one for pid, one in table().items() if pid in pids)
        for pid in living(pids):
            os.kill(pid, signal.SIGKILL)


async def killed(executor: int, pids: set[int]) -> float:
    """Kill an executor; return the seconds until none of `pids` lives."""
    began = time.monotonic()
    os.kill(executor, signal.SIGKILL)
    while living(pids):
        assert time.monotonic() < began + GIVEN_UP, f"left: {[table().get(pid, pid) for pid in living(pids)]}"
        await anyio.sleep(0.005)
    return time.monotonic() - began


async def busy(made: Host, hutch: HutchClient, name: str) -> tuple[int, set[int]]:
    """Open a session, and begin a tool call that starts a tree; return its executor and all processes below."""
    folder = made.folder(name)
    command = f"{sys.executable} {PROGRAMS / 'tree.py'} {folder / 'pids'}"
    line = {"tool": "Bash", "input": {"command": command}, "run": True}
    session = await made.script(hutch, [line], folder=name, permission_mode="bypass")
    await hutch.submit_prompt(session.id, "go")
    await wait_for((folder / "pids").exists)
    executor = await executor_of(hutch, session)
    return executor, {int(pid) for pid in (folder / "pids").read_text().split()} | {
        one.pid for one in family(executor) if one.pid != executor
    }


async def kill_all(made: Host, count: int) -> list[float]:
    """Let `count` executors begin a tool call, kill hutchd, and then the executors one by one."""
    async with made.client() as hutch:
        started = [await busy(made, hutch, f"tree-{number}") for number in range(count)]
    with none_left({pid for _, pids in started for pid in pids}):
        await made.kill()
        return [await killed(executor, pids) for executor, pids in started]


async def test_nothing_outlives_a_killed_executor_without_hutchd() -> None:
    """Without a sandbox, in mid-tool: double forks, own sessions, stopped processes, ended first threads."""
    async with host(SETTINGS) as made:
        seconds = await kill_all(made, 2)

    assert max(seconds) < GIVEN_UP


@pytest.mark.full
@pytest.mark.timeout(1800)
async def test_180_killed_executors_leave_nothing() -> None:
    """99 of 100 within a second."""
    seconds: list[float] = []
    for _ in range(18):
        async with host(SETTINGS) as made:
            seconds += await kill_all(made, 10)
    seconds.sort()
    print(f"median {seconds[90]:.3f} s, p99 {seconds[178]:.3f} s, most {seconds[-1]:.3f} s")

    assert seconds[178] <= BOUND


@pytest.mark.full
@pytest.mark.timeout(1800)
async def test_20_killed_executors_of_claude_leave_neither_its_cli_nor_its_mcp_servers(model: Model) -> None:
    """The CLI runs a command; it has a server."""
    server = {"echo": {"command": sys.executable, "args": ["-I", str(PROGRAMS / "mcp_echo.py"), "echo"]}}
    seconds = []
    for _ in range(5):
        async with host(settings_for(model, SETTINGS)) as made, made.client() as hutch:
            await made.hutch("key", "add", "anthropic", input=KEY)
            started = []
            for number in range(4):
                name = f"claude-{number}"
                file = made.folder(name) / "pids"
                model.script = lambda *_, file=file: [
                    Use("Bash", {"command": f"{sys.executable} {PROGRAMS / 'tree.py'} {file}"})
                ]
                session = await made.claude(hutch, name, options=m.AgentOptions(mcp_servers=server))
                await hutch.submit_prompt(session.id, "go")
                await wait_for(file.exists)
                executor = await executor_of(hutch, session)
                pids = {int(pid) for pid in file.read_text().split()} | {one.pid for one in family(executor)}
                assert any("mcp_echo.py" in one.command for one in family(executor))
                started.append((executor, pids - {executor}))
            with none_left({pid for _, pids in started for pid in pids}):
                await made.kill()
                seconds += [await killed(executor, pids) for executor, pids in started]
            await made.start()  # it ends the broker, which waits for the next hutchd
    seconds.sort()
    print(f"median {seconds[10]:.3f} s, most {seconds[-1]:.3f} s")

    assert seconds[-2] <= BOUND
