"""A session that takes too much is stopped by its own limits, with a notice; the others go on."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import pytest

from hutch_shared import messages as m
from hutch_shared.events import Notice, TurnEnded
from tests.programs import bubblewrap
from tests.sampling import sample
from tests.system.hostile import bash, lend, open_script, said_by, show, whole
from tests.system.log import Log, log_of, wait_for
from tests.system.shared_host import SharedHost, shared_host

pytestmark = [pytest.mark.system, pytest.mark.timeout(180), sample(3)]

MEMORY, PIDS, FILES = 256 << 20, 200, 1024
SETTINGS = f"""
[executors]
spares = 0
[limits]
memory = {MEMORY}
pids = {PIDS}
open_files = {FILES}
[turns]
interrupt_grace = 2
"""
LINES = 300
"""Events of one of Bob's turns."""
HONEST = "build"
"""The neighbour beside which Bob's rate is measured for comparison: it computes on every processor."""


@dataclass(frozen=True, slots=True)
class Hogged:
    """The results of a hog's turn and of Bob's turn beside it."""

    end: TurnEnded
    said: str
    notices: list[Notice]
    bob: TurnEnded


@pytest.fixture(scope="module")
async def host() -> AsyncIterator[SharedHost]:
    """A host with low limits."""
    bubblewrap()
    async with shared_host("bob", "mallory", settings=SETTINGS) as made:
        yield made


def command(host: SharedHost, folder: str, kind: str, seconds: float) -> str:
    """Return the command that runs a hog, with an extra limit of the shell."""
    mallory = host.people["mallory"]
    cwd = host.folder(mallory, folder)
    (cwd / "ready").unlink(missing_ok=True)
    program = lend(mallory, "hog.py", cwd)
    socket = host.runtime / "client.sock"
    return f"ulimit -v 2097152; SOCKET={socket} exec {host.code.python} -I {program} {kind} {cwd} {seconds}"


async def hogged(host: SharedHost, kind: str, seconds: float = 2.0, **more: Any) -> Hogged:
    """Run a hog in Mallory's agent and Bob's turn beside it, then Mallory's next turn."""
    bob, mallory = host.people["bob"], host.people["mallory"]
    line = command(host, kind, kind, seconds)
    async with host.client(mallory) as mallorys, host.client(bob) as hutch:
        session = await open_script(host, mallorys, mallory, [bash(line), {"turn": True}, {"text": "on"}], kind, **more)
        works = await open_script(host, hutch, bob, [{"repeat": {"times": LINES, "line": {"text": "work"}}}])
        async with log_of(mallorys, session) as log, log_of(hutch, works) as beside:
            turn = await mallorys.submit_prompt(session.id, "go")
            await wait_for(Path(session.cwd, "ready").exists)
            well = await beside.play(works, "go")
            end = await log.ended(turn)
            again = await log.play(session, "again")
            said = said_by(log) if log.of("tool_result") else ""
            notices = log.of("notice")
        await mallorys.close_session(session.id, force=True)
        await hutch.close_session(works.id, force=True)
    await whole(host)
    assert again.state == "completed", again
    assert well.state == "completed", well
    return Hogged(end, said, notices, well)


def told(found: Hogged) -> str:
    """Return the turn's notices about a limit."""
    words = [notice.message for notice in found.notices if notice.word == "over_limit"]
    return " ".join([*words, found.end.message if found.end.reason == "over_limit" else ""])


@pytest.mark.parametrize("level", ["account", "strict"])
async def test_a_memory_hog_dies_alone_and_its_turn_says_why(host: SharedHost, level: m.IsolationLevel) -> None:
    """It gets no more than its limit. Its executor, hutchd, the launcher and Bob's session live; the next turn runs."""
    found = await hogged(host, "memory", isolation=level)

    assert "MiB" not in found.said  # the hog did not finish
    assert "256 MiB" in told(found), (found.end, found.notices)


@pytest.mark.parametrize("level", ["account", "strict"])
async def test_a_fork_bomb_meets_its_limit(host: SharedHost, level: m.IsolationLevel) -> None:
    """It gets no more processes than its limit, and its turn says so."""
    found = await hogged(host, "fork", isolation=level)

    got = json.loads(found.said)
    assert got["started"] < PIDS
    assert got["refused"] > 0
    assert str(PIDS) in told(found), (found.end, found.notices)


async def test_a_disk_filler_fills_only_its_own_space(host: SharedHost) -> None:
    """Hutch's record, logs and sockets still have space, and the stored output is limited."""
    log = host.state / "executors"
    found = await hogged(host, "disk")

    assert json.loads(found.said)["rounds"] >= 1
    assert sum(path.stat().st_size for path in log.iterdir()) < 4 << 20


async def test_a_descriptor_hog_meets_its_limit(host: SharedHost) -> None:
    """The limit holds for each process. Meanwhile hutchd accepts other connections."""
    found = await hogged(host, "descriptors", 4.0)

    got = json.loads(found.said)
    assert got["limit"] == [FILES, FILES]
    assert 0 < got["held"] <= FILES
    assert got["processes"] > 1


async def test_a_flood_of_words_ends_in_its_own_session(host: SharedHost) -> None:
    """Of 64 MiB on standard output a limited part is stored, and Bob's turn completes."""
    bob, mallory = host.people["bob"], host.people["mallory"]
    async with host.client(mallory) as mallorys, host.client(bob) as hutch:
        flood = await open_script(host, mallorys, mallory, [bash("head -c 67108864 /dev/zero | tr '\\0' x")], "flood")
        works = await open_script(host, hutch, bob, [{"repeat": {"times": LINES, "line": {"text": "work"}}}])
        async with log_of(mallorys, flood) as log, log_of(hutch, works) as beside:
            turn = await mallorys.submit_prompt(flood.id, "go")
            well = await beside.play(works, "go")
            end = await log.ended(turn)
        await mallorys.close_session(flood.id, force=True)
        await hutch.close_session(works.id, force=True)
    await whole(host)

    assert (end.state, well.state) == ("completed", "completed")


# ---------------------------------------------------------------- Bob's share


@asynccontextmanager
async def neighbour(host: SharedHost, kind: str, number: int) -> AsyncIterator[None]:
    """Run Mallory's hog during the block."""
    mallory = host.people["mallory"]
    folder = f"{kind}-{number}"
    line = command(host, folder, kind, 60)
    async with host.client(mallory) as mallorys:
        session = await open_script(host, mallorys, mallory, [bash(line)], folder)
        await mallorys.submit_prompt(session.id, "go")
        await wait_for(Path(session.cwd, "ready").exists)
        await anyio.sleep(0.3)  # its other processes start too
        yield
        await mallorys.close_session(session.id, force=True)


async def rate(log: Log, session: m.Session, seconds: float) -> float:
    """Return the events per second of Bob's turns, run one after another for that long."""
    events, started = 0, time.monotonic()
    while time.monotonic() - started < seconds:
        end = await log.play(session, "go")
        assert end.state == "completed", end
        log.events.clear()
        events += LINES
    return events / (time.monotonic() - started)


async def share(host: SharedHost, hog: str, pairs: int, seconds: float) -> float:
    """Return the median ratio of Bob's rate beside a hog to that beside an honest busy neighbour, measured in pairs."""
    bob = host.people["bob"]
    ratios, honest, hostile = [], [], []
    async with host.client(bob) as hutch:
        session = await open_script(host, hutch, bob, [{"repeat": {"times": LINES, "line": {"text": "work"}}}])
        async with log_of(hutch, session) as log:
            await rate(log, session, 0.5)
            for number in range(pairs):
                found = {}
                for kind in (HONEST, hog) if number % 2 else (hog, HONEST):
                    async with neighbour(host, kind, number):
                        found[kind] = await rate(log, session, seconds)
                honest.append(found[HONEST])
                hostile.append(found[hog])
                ratios.append(found[hog] / found[HONEST])
        await hutch.close_session(session.id, force=True)
    median = statistics.median(ratios)
    show(
        "Bob beside a hog, to Bob beside an honest busy neighbour",
        hog=hog,
        pairs=pairs,
        honest_events_per_s=round(statistics.median(honest)),
        hostile_events_per_s=round(statistics.median(hostile)),
        ratios=[round(one, 2) for one in ratios],
        median=round(median, 3),
        limits=session.isolation.limits,
    )
    return median


async def test_bob_keeps_a_share(host: SharedHost) -> None:
    """The other session is a fork bomb, and takes memory, disk and descriptors."""
    assert await share(host, "every", 3, 1.5) >= 0.4  # a low bound, for a busy machine


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("hog", ["bomb", "memory", "disk", "descriptors", "every"])
async def test_bob_keeps_nine_tenths(host: SharedHost, hog: str) -> None:
    """He keeps them beside each kind of hog, and beside all kinds at once."""
    assert await share(host, hog, 9, 4.0) >= 0.9
