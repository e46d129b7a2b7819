"""The launcher dies at random moments around stops: what is not verified is never reported as gone."""

from __future__ import annotations

import json
import os
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import pytest

from hutch_client.client import HutchClient
from hutch_shared import messages as m
from tests import sampling
from tests.accounts import processes_of
from tests.system.hostile import bash, open_script, show
from tests.system.log import DEADLINE, executor_of
from tests.system.shared_host import SharedHost, shared_host

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]

SETTINGS = """[executors]
spares = 0
lost_timeout = 2
[turns]
interrupt_grace = 1
"""
IN_CI = 2
BEFORE, AFTER, AFTER_FROZEN = -0.3, 1.5, 4.5
"""The first and the last moments at which the launcher is killed, in seconds after the command of the stop begins."""


@dataclass(frozen=True, slots=True)
class Stop:
    """One stop, with what was true when its command had ended."""

    at: float
    frozen: bool
    code: int
    outcome: str
    alive: tuple[int, ...]
    """The processes of the session that were alive then."""
    said: str
    """The session's last event then."""
    shown: bool
    """Whether status named the session's executor then."""


@pytest.fixture(scope="module")
async def host() -> AsyncIterator[SharedHost]:
    """A host with one user and no spares."""
    async with shared_host("alice", settings=SETTINGS) as made:
        yield made


async def last_notice(hutch: HutchClient, session: m.Session) -> str:
    """Return the session's last notice."""
    page: m.EventsPage = await hutch.call("read_events", m.ReadEvents(session.id))
    events = [json.loads(bytes(event)) for event in page.events]
    return next(json.dumps(event["data"]) for event in reversed(events) if event["kind"] == "notice")


async def stop_one(host: SharedHost, hutch: HutchClient, number: int, dice: random.Random) -> Stop:
    """Run a turn, stop its session while the launcher dies, and start the launcher again."""
    alice, frozen = host.people["alice"], dice.random() < 0.4
    at = dice.uniform(BEFORE, AFTER_FROZEN if frozen else AFTER)
    before = set(processes_of(alice.uid))
    lines = [bash(f"setsid -f sleep 61{number:03}; : > ready; exec sleep 62{number:03}")]
    session = await open_script(host, hutch, alice, lines, f"stop-{number}")
    await hutch.submit_prompt(session.id, "go")
    with anyio.fail_after(DEADLINE):
        while not Path(session.cwd, "ready").exists():
            await anyio.sleep(0.02)
    if frozen:
        os.kill(await executor_of(hutch, session), signal.SIGSTOP)
    done: list[Any] = []

    async def stop() -> None:
        await anyio.sleep(max(0.0, -at))
        done.append(await host.hutch(alice, "stop", "-f", "-o", "json", session.id, code=None))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(stop)
        await anyio.sleep(max(0.0, at))
        await host.end(host.launcher, signal.SIGKILL)
    alive = tuple(sorted(set(processes_of(alice.uid)) - before))
    said = await last_notice(hutch, session)
    status = await hutch.get_status()
    found = Stop(
        at=round(at, 3),
        frozen=frozen,
        code=done[0].code,
        outcome=json.loads(done[0].out)[0]["killed"]["outcome"],
        alive=alive,
        said=said,
        shown=any(one.session == session.id for one in status.executors),
    )
    host.launcher_socket.unlink()
    await host.start_launcher()
    with anyio.fail_after(DEADLINE):
        while True:
            now = await hutch.get_session(session.id)
            if now.killed is not None and now.killed.outcome == "gone":
                break
            await anyio.sleep(0.05)
        while set(processes_of(alice.uid)) - before:
            await anyio.sleep(0.02)
    return found


async def stop_many(host: SharedHost, count: int) -> None:
    """Stop sessions at random moments, and check what was reported each time."""
    dice = random.Random(sampling.seed())
    async with host.client(host.people["alice"]) as hutch:
        stops = [await stop_one(host, hutch, number, dice) for number in range(count)]
        status = await hutch.get_status()
    show(
        "stops while the launcher dies",
        stops=len(stops),
        outcomes=Counter(f"{one.outcome}, code {one.code}" for one in stops),
        frozen=sum(one.frozen for one in stops),
        unverified=sum(one.outcome != "gone" for one in stops),
    )

    assert [one for one in stops if (one.code == 0) != (one.outcome == "gone")] == []
    assert [one for one in stops if one.code == 0 and one.alive] == []
    assert [one for one in stops if one.code != 0 and (one.code != 1 or not one.shown)] == []
    assert [one for one in stops if one.outcome != "gone" and "is left" in one.said.replace("what is left", "")] == []
    assert [one for one in stops if one.outcome == "unknown" and "unknown" not in one.said] == []
    assert status.notices == ()
    assert status.executors == ()


async def test_a_stop_never_reports_what_it_did_not_verify(host: SharedHost) -> None:
    """Neither exit code 0 nor a "nothing is left": a later check, with the launcher back, is recorded."""
    await stop_many(host, IN_CI)


@pytest.mark.full
@pytest.mark.timeout(900)
async def test_fifty_stops_never_report_what_they_did_not_verify(host: SharedHost) -> None:
    """The same, at 50 random moments."""
    await stop_many(host, 50)
