"""Misbehaving processes around a real hutchd: hutchd reports them in time, and none is left."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from hutch_client.client import HutchClient
from hutch_daemon.environments.cgroups import find_root
from hutch_shared import messages as m
from tests.system import processes
from tests.system.host import Host, host
from tests.system.log import DEADLINE, log_of, wait_for, without_gaps

pytestmark = pytest.mark.system

PROGRAMS = Path(__file__).parent / "programs"
FREEZER = Path("/sys/fs/cgroup/freezer")
HIDING = "trap '' TERM HUP INT; setsid -f env -i /bin/sleep {seconds}; (setsid env -i /bin/sleep {seconds} &); echo on"
"""Starts two processes that leave their parent, session, group and environment."""


@asynccontextmanager
async def bad_host(tmp_path: Path, manner: str, settings: str) -> AsyncIterator[tuple[Host, Path]]:
    """Yield a host with unusable executors, and the file to which each start adds a line."""
    starts = tmp_path / "starts"
    starts.touch()
    async with host(f"[executors]\nspares = 0\n{settings}", start=False) as made:
        made.program = (sys.executable, str(PROGRAMS / "other_hutchd.py"))
        made.extra_env["BAD_EXECUTOR"] = f"{manner} {starts}"
        await made.start()
        yield made, starts


@pytest.mark.parametrize(("manner", "attempts"), [("exit", 3), ("hang", 2)])
async def test_a_failing_start_is_tried_a_few_times_and_reported_once(
    tmp_path: Path, manner: str, attempts: int
) -> None:
    """Its turn fails with the reason; further turns fail at once without a start; there is one notice."""
    settings = f"hello_timeout = 1\nstart_attempts = {attempts}\nstart_window = 600\n"
    async with bad_host(tmp_path, manner, settings) as (made, starts), made.client() as hutch:
        session = await made.script(hutch, [{"text": "never"}])
        async with log_of(hutch, session) as log:
            first = await log.play(session, "go")
            second = await log.play(session, "again")
            status = await hutch.get_status()
        started = [int(line) for line in starts.read_text().split()]
        await wait_for(lambda: not any(processes.alive(pid) for pid in started))

        assert [(end.state, end.reason) for end in (first, second)] == [("failed", "agent_unavailable")] * 2
        assert "tried again in" in second.message
        assert len(started) == attempts
        assert len([notice for notice in status.notices if "failed to start" in notice]) == 1


async def test_a_spinning_executor_is_ended(tmp_path: Path) -> None:
    """It sends no heartbeat. The turn that needs it fails, and none of its processes is left."""
    settings = "heartbeat_timeout = 1\nprepare_timeout = 30\n"
    async with bad_host(tmp_path, "spin", settings) as (made, starts), made.client() as hutch:
        session = await made.script(hutch, [{"text": "never"}])
        async with log_of(hutch, session) as log:
            end = await log.play(session, "go")
        started = [int(line) for line in starts.read_text().split()]
        await wait_for(lambda: not any(processes.alive(pid) for pid in started))

        assert end.state == "failed"
        assert end.reason in ("executor_lost", "connection_lost")
        assert 1 <= len(started) <= 5


async def test_an_executor_that_stops_during_a_turn_is_ended_with_its_descendants() -> None:
    """The turn fails with the reason, other sessions do not notice, and the next prompt gets a new executor."""
    async with host("[executors]\nspares = 0\nheartbeat_timeout = 8\n") as made, made.client() as hutch:
        call = {"tool": "Bash", "input": {"command": "echo $$ > pid; exec sleep 600"}, "run": True}
        lines: list[dict[str, Any]] = [call, {"turn": True}, {"text": "on"}]
        hit = await made.script(hutch, lines, permission_mode="bypass")
        other = await made.script(hutch, [{"wait_file": "end"}, {"text": "well"}])
        async with log_of(hutch, hit) as log, log_of(hutch, other) as beside:
            turn = await hutch.submit_prompt(hit.id, "go")
            unaware = await hutch.submit_prompt(other.id, "go")
            await wait_for(Path(hit.cwd, "pid").exists)
            pid = await _executor_of(hutch, hit)
            family = processes.family(pid)
            os.kill(pid, signal.SIGSTOP)
            end = await log.ended(turn)
            left = [one for one in family if processes.alive(one.pid)]
            again = await log.play(hit, "again")
            Path(other.cwd, "end").touch()
            well = await beside.ended(unaware)

        assert (end.state, end.reason) == ("failed", "executor_lost")
        assert "silent" in end.message
        assert len(family) > 1
        assert left == []
        assert (again.state, well.state) == ("completed", "completed")
        assert without_gaps(log.events)


async def test_huge_events_pass_whole_and_delay_no_other_session() -> None:
    """Events of 20 MB arrive unchanged; a notice replaces one above the limit."""
    lines: list[dict[str, Any]] = [
        {"repeat": {"times": 2, "line": {"text": "a" * (20 << 20)}}},
        {"text": "b" * (31 << 20)},
        {"text": "end"},
    ]
    async with host("[executors]\nspares = 0\n") as made, made.client() as hutch:
        flood = await made.script(hutch, lines)
        other = await made.script(hutch, [{"text": "well"}])
        async with log_of(hutch, flood) as log, log_of(hutch, other) as beside:
            turn = await hutch.submit_prompt(flood.id, "go")
            well = await beside.play(other, "go")
            end = await log.ended(turn)

        assert (end.state, well.state) == ("completed", "completed")
        assert [(one.text[:1], len(one.text)) for one in log.of("text")] == [("a", 20 << 20)] * 2 + [("e", 3)]
        assert [notice.word for notice in log.of("notice")] == ["event_left_out"]
        assert without_gaps(log.events)


@pytest.mark.parametrize("way", ["close", "kill"])
async def test_hidden_processes_end_with_their_session(way: str) -> None:
    """Processes that forked twice, lead their own sessions, ignore signals or lack the mark are found and ended."""
    if way == "kill" and find_root() is None:
        pytest.skip("kernel: without cgroups nothing tells the orphans of a dead executor")
    seconds = f"{600 + os.getpid()}.{len(way)}"
    async with host("[executors]\nspares = 0\n[turns]\ninterrupt_grace = 2\n") as made, made.client() as hutch:
        call = {"tool": "Bash", "input": {"command": HIDING.format(seconds=seconds)}, "run": True}
        session = await made.script(hutch, [call, {"wait_file": "never"}], permission_mode="bypass")
        async with log_of(hutch, session) as log:
            turn = await hutch.submit_prompt(session.id, "go")
            await log.until(lambda log: log.of("tool_result"))
            hidden = await wait_for(lambda: _sleeping(seconds, 2))
            if way == "kill":
                os.kill(await _executor_of(hutch, session), signal.SIGKILL)
                await log.ended(turn)
            closed = await hutch.close_session(session.id, force=True)
            await log.until(lambda log: log.of("notice"))

        assert closed.state == "closed"
        assert [one.pid for one in hidden if processes.alive(one.pid)] == []
        assert [notice.word for notice in log.of("notice")] == ["session_closed"]


@pytest.mark.skipif(
    not (FREEZER / "cgroup.procs").exists() or os.geteuid() != 0, reason="kernel: there is no version 1 freezer"
)
async def test_an_unkillable_process_is_quarantined_until_it_is_gone() -> None:
    """The status names a frozen process, its slot stays in use, and hutchd checks again until it is gone."""
    settings = "[executors]\nspares = 0\nmaximum = 1\nlost_timeout = 1\n[turns]\ninterrupt_grace = 1\n"
    async with host(settings) as made, made.client() as hutch:
        call = {"tool": "Bash", "input": {"command": "echo $$ > pid; exec sleep 600"}, "run": True}
        session = await made.script(hutch, [call], permission_mode="bypass")
        async with log_of(hutch, session) as log:
            await hutch.submit_prompt(session.id, "go")
            pid = int(await wait_for(lambda: _text(Path(session.cwd, "pid"))))
            with frozen(pid) as thaw:
                await hutch.close_session(session.id, force=True)
                status = await hutch.get_status()
                doctor = await made.hutch("doctor", code=1)
                other = await made.script(hutch, [{"text": "at last"}])
                waiting = await hutch.submit_prompt(other.id, "go")
                thaw()
            with anyio.fail_after(DEADLINE):
                while any(one.state == "quarantined" for one in (await hutch.get_status()).executors):
                    await anyio.sleep(0.05)
            async with log_of(hutch, other) as then:
                end = await then.ended(waiting)
            await log.until(lambda log: "quarantined" in [notice.word for notice in log.of("notice")])

        (stuck,) = (one for one in status.executors if one.state == "quarantined")
        assert str(pid) in stuck.detail
        assert any("could not be ended" in notice and str(pid) in notice for notice in status.notices)
        assert f"!!  executor {stuck.id}" in doctor.out
        assert end.state == "completed"
        assert not processes.alive(pid)


@contextmanager
def frozen(pid: int) -> Iterator[Callable[[], None]]:
    """Freeze a process during the block; the yielded function thaws it."""
    group = FREEZER / f"test-{pid}"
    group.mkdir()

    def thaw() -> None:
        (group / "freezer.state").write_text("THAWED")

    try:
        (group / "cgroup.procs").write_text(str(pid))
        (group / "freezer.state").write_text("FROZEN")
        yield thaw
    finally:
        thaw()
        processes.kill(one for one in processes.table().values() if one.pid == pid)
        deadline = time.monotonic() + DEADLINE
        while (group / "cgroup.procs").read_text() and time.monotonic() < deadline:
            time.sleep(0.01)
        group.rmdir()


async def _executor_of(hutch: HutchClient, session: m.Session) -> int:
    (pid,) = [one.pid for one in (await hutch.get_status()).executors if one.session == session.id]
    return pid


def _sleeping(seconds: str, count: int) -> list[processes.Process]:
    found = [one for one in processes.table().values() if one.command == f"/bin/sleep {seconds}"]
    return found if len(found) == count else []


def _text(path: Path) -> str:
    return path.read_text().strip() if path.exists() else ""
