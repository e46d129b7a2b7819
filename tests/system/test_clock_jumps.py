"""The wall clock jumps by a day, or the machine sleeps: nothing expires early, and events stay in order."""

from __future__ import annotations

import os
import signal
import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import anyio
import pytest

from hutch_daemon.pool.tokens import LIFETIME
from hutch_shared import messages as m
from hutch_shared.times import from_wire
from tests.crash.shims import compiled
from tests.sampling import sample
from tests.system import processes
from tests.system.host import Host, host
from tests.system.log import allow, log_of, without_gaps

pytestmark = pytest.mark.system

DAY = 24 * 3600
SETTINGS = "[executors]\nspares = 0\nidle_timeout = 600\n[turns]\ntimeout = 300\n[permissions]\nexpiry = 300\n"
ASKS: list[Mapping[str, Any]] = [
    {"text": "before"},
    {"tool": "Bash", "input": {"command": "touch ran"}, "run": True},
    {"text": "after"},
]


@asynccontextmanager
async def clocked_host(folder: Path) -> AsyncIterator[tuple[Host, Callable[[int], None]]]:
    """Yield a host, and a function that moves its hutchd's clock ahead by seconds."""
    library = compiled(Path(__file__).parent / "programs" / "clock.c", folder)
    clock = folder / "clock"

    def set_ahead(seconds: int) -> None:
        draft = clock.with_suffix(".new")
        draft.write_text(str(seconds))
        draft.replace(clock)

    async with host(SETTINGS, start=False) as made:
        made.extra_env |= {"LD_PRELOAD": str(library), "CLOCK_FILE": str(clock)}
        await made.start()
        yield made, set_ahead


@sample(1)
@pytest.mark.parametrize("jump", [DAY, -DAY], ids=["forward", "back"])
async def test_a_clock_that_jumps_a_day_ends_nothing_and_reorders_nothing(tmp_path: Path, jump: int) -> None:
    """A pending request can be decided, its turn completes, and its events stay in order."""
    async with clocked_host(tmp_path) as (made, set_ahead), made.client() as hutch:
        session = await made.script(hutch, ASKS)
        async with log_of(hutch, session) as log:
            turn = await hutch.submit_prompt(session.id, "go")
            asked = await log.asked()
            set_ahead(jump)
            jumped = await made.script(hutch, [{"text": "x"}])
            (waiting,) = await hutch.list_permissions(m.ListPermissions(session.id))
            (executor,) = [one for one in (await hutch.get_status()).executors if one.session == session.id]
            await hutch.answer_permission(allow(asked))
            end = await log.ended(turn)
            then = await log.play(session, "again", allow)
            (same,) = [one for one in (await hutch.get_status()).executors if one.session == session.id]

        assert abs(from_wire(jumped.created_at) - from_wire(session.created_at) - jump * 1000) < 3600 * 1000
        assert waiting.id == asked.id
        assert (end.state, then.state) == ("completed", "completed")
        assert same.pid == executor.pid
        assert without_gaps(log.events)
        assert [event.position for event in log.events] == sorted(event.position for event in log.events)
        assert [one.state for one in log.of("permission_settled")] == ["allowed", "allowed"]


@sample(1)
@pytest.mark.parametrize("jump", [DAY, -DAY], ids=["forward", "back"])
async def test_an_executor_is_adopted_a_day_off_by_the_wall_clock(tmp_path: Path, jump: int) -> None:
    """Tokens measure awake time.

    After the restart the turn continues in the same process, and its request is pending.
    """
    async with clocked_host(tmp_path) as (made, set_ahead), made.client() as hutch:
        session = await made.script(hutch, ASKS)
        async with log_of(hutch, session) as log:
            turn = await hutch.submit_prompt(session.id, "go")
            asked = await log.asked()
            await made.kill()
            set_ahead(jump)
            await made.start()
            waiting = await hutch.list_permissions(m.ListPermissions(session.id))
            await hutch.answer_permission(allow(asked))
            end = await log.ended(turn)
            adopted = [one.adopted for one in (await hutch.get_status()).executors if one.session == session.id]
        with closing(sqlite3.connect(f"file:{made.state}/hutch.db?mode=ro", uri=True)) as conn:
            (until,) = conn.execute("SELECT token_until FROM executors WHERE session = ?", (session.id,)).fetchone()

        assert [one.id for one in waiting] == [asked.id]
        assert end.state == "completed"
        assert adopted == [True]
        assert 0 < until - time.monotonic_ns() // 1_000_000 <= LIFETIME
        assert without_gaps(log.events)


async def test_a_sleep_of_the_machine_ends_no_executor() -> None:
    """hutchd and executors stop for longer than the heartbeat timeout; then all of them continue."""
    settings = "[executors]\nspares = 0\nheartbeat_timeout = 2\nlost_timeout = 2\n"
    async with host(settings) as made, made.client() as hutch:
        session = await made.script(hutch, [{"text": "before"}, {"wait_file": "go"}, {"text": "after"}])
        async with log_of(hutch, session) as log:
            turn = await hutch.submit_prompt(session.id, "go")
            await log.until(lambda log: log.of("text"))
            asleep = [one.pid for one in processes.marked(made.mark)]
            for pid in asleep:
                os.kill(pid, signal.SIGSTOP)
            await anyio.sleep(5)  # the sleep itself is under test
            for pid in asleep:
                os.kill(pid, signal.SIGCONT)
            await hutch.get_status()
            Path(session.cwd, "go").touch()
            end = await log.ended(turn)

        assert end.state == "completed"
        assert [one.text for one in log.of("text")] == ["before", "after"]
        assert without_gaps(log.events)
