"""Ending sessions with the nasty corpus: no process is left, and no other account's process is hit."""

from __future__ import annotations

import ast
import json
import math
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import anyio
import pytest

from hutch_client.client import HutchClient
from hutch_shared import messages as m
from tests import sampling
from tests.accounts import processes_of
from tests.programs import bubblewrap
from tests.system import processes
from tests.system.hostile import PROGRAMS, bash, diary, lend, open_script, run_script, said_by, show, whole
from tests.system.log import DEADLINE, executor_of, log_of, wait_for
from tests.system.shared_host import SharedHost, shared_host

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]

SETTINGS = "[executors]\nspares = 0\n[limits]\npids = 200\nmemory = 536870912\n[turns]\ninterrupt_grace = 2\n"
KINDS = tuple(
    one.name
    for one in ast.parse((PROGRAMS / "nasty.py").read_text()).body
    if isinstance(one, ast.FunctionDef) and any(isinstance(mark, ast.Name) for mark in one.decorator_list)
)
SEED = 6
IN_CI = 8
"""The number of kinds that CI ends; `full` ends all, several times."""
BOUND = 0.5
"""The bound in seconds for 99 of 100 sessions."""


@dataclass(frozen=True, slots=True)
class Run:
    """One session of the corpus, from the call that ends it."""

    kind: str
    way: str
    strict: bool
    processes: int
    """The number of its processes."""
    answered: float
    """Seconds until hutchd reported the session's end; after a crash, until no process of it was seen."""
    gone: float
    """Seconds until no process of it was left."""
    left: tuple[int, ...]
    """The processes still found later."""


@pytest.fixture(scope="module")
async def host() -> AsyncIterator[SharedHost]:
    """A host with an attacker and a bystander."""
    bubblewrap()
    async with shared_host("alice", "mallory", settings=SETTINGS) as made:
        yield made


def plan(count: int, seed: int) -> Iterator[tuple[str, str, bool]]:
    """Yield the kinds, ways to end them, and whether a sandbox is used: all kinds in turn, repeatedly."""
    dice = random.Random(seed)
    while count > 0:
        for kind in dice.sample(KINDS, min(count, len(KINDS))):
            yield kind, dice.choice(("close", "close", "close", "crash")), dice.random() < 0.25
            count -= 1


def groups_of(pid: int) -> list[Path]:
    """Return the directories of an executor's cgroups."""
    found: list[Path] = []
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        _, controllers, group = line.split(":", 2)
        if "hutch-x-" in group:
            mounts = ("/sys/fs/cgroup", "/sys/fs/cgroup/unified", f"/sys/fs/cgroup/{controllers}")
            found += [place for mount in mounts if (place := Path(f"{mount}{group}")).is_dir()]
    assert found, "the executor has no cgroup"
    return found


async def end_one(host: SharedHost, hutch: HutchClient, number: int, kind: str, way: str, strict: bool) -> Run:
    """Start one kind as the attacker, end its session, and wait until no process is left."""
    mallory = host.people["mallory"]
    folder = host.folder(mallory, f"run-{number}")
    (folder / "ready").unlink(missing_ok=True)  # another test of this module may have used the folder
    program = lend(mallory, "nasty.py", folder)
    before = set(processes_of(mallory.uid))
    isolation: m.IsolationLevel | None = "strict" if strict else None
    session = await hutch.open_session(
        m.OpenSession("script", str(folder), permission_mode="bypass", isolation=isolation)
    )
    line = bash(f"exec {host.code.python} -I {program} {kind} {folder}")
    turn = await hutch.submit_prompt(session.id, json.dumps(line))
    with anyio.fail_after(DEADLINE):
        while not (folder / "ready").exists():
            state = await hutch.get_turn(turn.id)
            assert state.ended_at is None, (kind, strict, state, host.log_text())
            await anyio.sleep(0.02)
    executor = await executor_of(hutch, session)
    groups = groups_of(executor)

    def seen() -> set[int]:
        return set(processes_of(mallory.uid)) - before

    def look(started: float) -> float:
        while any(group.exists() for group in groups) or seen():
            if time.monotonic() - started > DEADLINE:
                return math.inf
            time.sleep(0.001)
        return time.monotonic() - started

    count = len(seen())
    answered = gone = 0.0
    started = time.monotonic()

    async def close() -> None:
        nonlocal answered
        await hutch.close_session(session.id, force=True)
        answered = time.monotonic() - started

    async with anyio.create_task_group() as tasks:
        if way == "close":
            tasks.start_soon(close)
        else:
            os.kill(executor, signal.SIGKILL)
        gone = await anyio.to_thread.run_sync(look, started)
    if way != "close":
        answered = gone
        await hutch.close_session(session.id, force=True)
    await anyio.sleep(0.02)
    return Run(kind, way, strict, count, answered, gone, tuple(sorted(seen())))


async def end_all(host: SharedHost, count: int, seed: int = SEED) -> list[Run]:
    """Carry out the plan; print the result."""
    async with host.client(host.people["mallory"]) as hutch:
        runs = [await end_one(host, hutch, number, *one) for number, one in enumerate(plan(count, seed))]
    times = sorted(run.gone for run in runs)
    at = {name: times[min(len(times) - 1, math.ceil(len(times) * part) - 1)] for name, part in RANKS.items()}
    slowest = max(runs, key=lambda run: run.gone)
    show(
        "from kill to nothing left",
        runs=len(runs),
        kinds=len({run.kind for run in runs}),
        **{f"{name}_ms": round(value * 1000, 1) for name, value in at.items()},
        slowest=[slowest.kind, slowest.way, slowest.strict],
        left_over=sum(len(run.left) for run in runs),
    )
    assert [run for run in runs if run.left or math.isinf(run.gone)] == []
    assert [run for run in runs if run.processes < 2] == []
    return runs


RANKS = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}


def p99(runs: list[Run]) -> float:
    """Return the seconds within which 99 of 100 sessions were gone."""
    times = sorted(run.gone for run in runs)
    return times[math.ceil(len(times) * 0.99) - 1]


async def test_nothing_outlives_its_session(host: SharedHost) -> None:
    """When hutchd says that a session is over, none of its processes is left; the seed chooses the kinds."""
    runs = await end_all(host, IN_CI, sampling.seed())

    assert len({run.kind for run in runs}) == IN_CI
    assert p99(runs) <= 4 * BOUND  # more on a busy machine


@pytest.mark.full
@pytest.mark.timeout(900)
async def test_a_session_ends_within_half_a_second(host: SharedHost) -> None:
    """99 of 100 sessions do, of 200 sessions of all kinds."""
    runs = await end_all(host, 200)

    assert {run.kind for run in runs} == set(KINDS)
    assert p99(runs) <= BOUND


async def test_kill_minus_one_hits_only_the_agents_own_account(host: SharedHost) -> None:
    """It ends its account's processes, its executor included, and no others; the next turn runs."""
    alice, mallory = host.people["alice"], host.people["mallory"]
    async with host.client(alice) as hutch, diary(host, hutch, alice) as kept:
        async with host.client(mallory) as mallorys:
            lines = [bash("echo $PPID > its.part; mv its.part its; kill -KILL -1"), {"turn": True}, {"text": "on"}]
            session = await open_script(host, mallorys, mallory, lines)
            turn = await mallorys.submit_prompt(session.id, "go")
            its = Path(session.cwd, "its")
            await wait_for(its.exists)
            await wait_for(lambda: not processes.alive(int(its.read_text())))  # its executor too
        async with host.client(mallory) as mallorys, log_of(mallorys, session) as log:
            end = await log.ended(turn)
            again = await log.play(session, "again")
            await mallorys.close_session(session.id, force=True)
        found = await kept.close()
    await whole(host)

    assert (end.state, end.reason) == ("failed", "executor_lost")
    assert again.state == "completed"
    assert found == {"touched": [], "signals": []}


async def test_processes_of_an_executor_that_its_user_killed_are_ended(host: SharedHost) -> None:
    """The account may signal its executor; hutchd still finds and ends the processes that the executor started."""
    mallory = host.people["mallory"]
    async with host.client(mallory) as hutch:
        session = await open_script(
            host, hutch, mallory, [bash("setsid -f sleep 613; : > ready; exec sleep 612")], "own"
        )
        turn = await hutch.submit_prompt(session.id, "go")
        await wait_for(Path(session.cwd, "ready").exists)
        executor = await executor_of(hutch, session)
        mallory.run("kill", "-STOP", str(executor))
        mallory.run("kill", "-KILL", str(executor))
        async with log_of(hutch, session) as log:
            end = await log.ended(turn)
        left = [one for seconds in (612, 613) for one in processes.running(f"sleep {seconds}")]
        await hutch.close_session(session.id, force=True)

    assert (end.state, end.reason) == ("failed", "executor_lost")
    assert left == []


async def test_ending_a_session_spares_others_of_the_same_account(host: SharedHost) -> None:
    """Of two sessions of one user, the other one keeps all its processes."""
    mallory = host.people["mallory"]
    async with host.client(mallory) as hutch:
        lasting = await open_script(host, hutch, mallory, [bash("sleep 3; echo whole"), {"text": "on"}], "lasting")
        async with log_of(hutch, lasting) as log:
            turn = await hutch.submit_prompt(lasting.id, "go")
            await log.until(lambda log: log.of("tool_call"))
            end, _ = await run_script(host, mallory, "setsid -f sleep 614; echo", "short")
            stays = await log.ended(turn)
        assert said_by(log) == "whole\n"
        left = processes.running("sleep 614")
        await hutch.close_session(lasting.id, force=True)

    assert (end.state, stays.state) == ("completed", "completed")
    assert left == []
