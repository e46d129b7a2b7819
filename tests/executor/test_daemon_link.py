"""The connection to hutchd: the servers that it trusts, the errors after which it dials again, and its end."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest
from anyio.lowlevel import checkpoint

from hutch_executor.events.reporter import Reporter
from hutch_executor.events.spool import Spool
from hutch_executor.link.daemon_link import DaemonLink, LinkState
from hutch_shared import messages as m
from hutch_shared.errors import HutchError, Reason
from hutch_shared.events import Text
from tests.executor.fake_hutchd import SESSION, WAIT, FakeHutchd, boot

IDLE = LinkState(None, None, is_busy=False)


class Clock:
    """A clock that moves by one step at each look."""

    def __init__(self, step: float = 0.0) -> None:
        self.now = 0.0
        self.step = step

    def __call__(self) -> float:
        self.now += self.step
        return self.now


@pytest.fixture
def hutchd(tmp_path: Path) -> FakeHutchd:
    return FakeHutchd(tmp_path / "executor.sock")


@asynccontextmanager
async def running(link: DaemonLink, ends: list[HutchError] | None = None) -> AsyncIterator[None]:
    """Run the link while the body runs."""

    async def run() -> None:
        error = await link.run(None, {})
        if ends is not None:
            ends.append(error)

    async with anyio.create_task_group() as group:
        group.start_soon(run)
        yield
        group.cancel_scope.cancel()


async def end_of(link: DaemonLink) -> HutchError:
    """Return the error with which the link ended by itself."""
    with anyio.fail_after(WAIT):
        return await link.run(None, {})


async def test_hello_carries_the_executors_state(hutchd: FakeHutchd) -> None:
    """`hello` carries the token, the session, the turn and the last event number."""
    link = DaemonLink(boot(hutchd.path, daemon_epoch=3), Reporter(), lambda: LinkState(SESSION, "t-1", is_busy=True))
    hutchd.epoch = 4

    async with hutchd.up(), running(link):
        await hutchd.until(lambda: hutchd.beats)

    hello = hutchd.hellos[0]
    assert (hello.token, hello.session, hello.turn, hello.last_n) == ("token-of-the-test", SESSION, "t-1", 0)
    assert (hello.epoch_seen, link.epoch) == (3, 4)
    assert hutchd.beats[0].turn == "t-1"


async def test_a_server_of_another_uid_gets_no_token(hutchd: FakeHutchd) -> None:
    """The server's uid is checked before anything is sent."""
    link = DaemonLink(boot(hutchd.path, server_uid=os.getuid() + 1), Reporter(), lambda: IDLE)

    async with hutchd.up(), running(link):
        await hutchd.until(lambda: hutchd.connections >= 2)

    assert hutchd.hellos == []


async def test_a_hutchd_of_a_lower_epoch_is_refused(hutchd: FakeHutchd) -> None:
    """A daemon with an older state gets no events; the executor dials again."""
    link = DaemonLink(boot(hutchd.path, daemon_epoch=7), Reporter(), lambda: IDLE)
    hutchd.epoch = 6

    async with hutchd.up(), running(link):
        await hutchd.until(lambda: len(hutchd.hellos) >= 2)
        assert not link.is_up
        hutchd.epoch = 8
        await hutchd.until(lambda: hutchd.beats)

    assert link.epoch == 8


async def test_a_token_that_is_not_known_yet_is_sent_again(hutchd: FakeHutchd) -> None:
    """After a restart hutchd may need a moment to know its executors."""
    link = DaemonLink(boot(hutchd.path), Reporter(), lambda: IDLE)
    hutchd.refuse = HutchError(Reason.TOKEN_UNKNOWN)

    async with hutchd.up(), running(link):
        await hutchd.until(lambda: len(hutchd.hellos) >= 2)
        hutchd.refuse = None
        await hutchd.until(lambda: hutchd.beats)

    assert len(hutchd.hellos) >= 3


@pytest.mark.parametrize("reason", [Reason.LEASE_LOST, Reason.TOKEN_EXPIRED, Reason.PROTOCOL_MISMATCH])
async def test_a_final_error_ends_the_link_at_once(hutchd: FakeHutchd, reason: Reason) -> None:
    """A superseded executor stops."""
    hutchd.refuse = HutchError(reason)

    async with hutchd.up():
        error = await end_of(DaemonLink(boot(hutchd.path), Reporter(), lambda: IDLE))

    assert error.reason is reason


async def test_it_gives_up_after_a_time_without_hutchd(hutchd: FakeHutchd) -> None:
    """Without hutchd and without a turn an executor ends after `give_up_after` seconds."""
    clock = Clock(step=60.0)

    error = await end_of(DaemonLink(boot(hutchd.path), Reporter(), lambda: IDLE, clock=clock))

    assert error.reason is Reason.CONNECTION_LOST
    assert clock.now >= 300.0


async def test_it_gives_up_sooner_if_hutchd_said_that_it_leaves(hutchd: FakeHutchd) -> None:
    """Until hutchd is back: after the next welcome it waits as long as before."""
    clocks = [Clock(step=1.0), Clock(step=60.0)]
    links = [DaemonLink(boot(hutchd.path), Reporter(), lambda: IDLE, clock=clock) for clock in clocks]
    for link in links:
        link.expect_absence(10.0)

    await end_of(links[0])
    ends: list[HutchError] = []
    async with hutchd.up(), running(links[1], ends):
        with anyio.fail_after(WAIT):
            while not links[1].is_up:
                await checkpoint()
        back = clocks[1].now
        await hutchd.cut()
        hutchd.refuse = HutchError(Reason.OVERLOADED)
        with anyio.fail_after(WAIT):
            while not ends:
                await checkpoint()

    assert 10.0 <= clocks[0].now < 60.0
    assert clocks[1].now >= back + 300.0


async def test_it_does_not_give_up_during_a_turn(hutchd: FakeHutchd) -> None:
    """The time counts from the end of the turn."""
    clock = Clock(step=200.0)
    looks: list[float] = []

    def standing() -> LinkState:
        looks.append(clock.now)
        return LinkState(SESSION, None, is_busy=len(looks) < 5)

    await end_of(DaemonLink(boot(hutchd.path), Reporter(), standing, clock=clock))

    assert clock.now >= looks[3] + 300.0


async def test_a_call_survives_a_lost_connection(hutchd: FakeHutchd) -> None:
    """A call during an outage is repeated on the next connection."""
    link = DaemonLink(boot(hutchd.path), Reporter(), lambda: IDLE)
    hutchd.key = m.KeyGrant(delivery="lease", value="l-1")
    found: list[m.KeyGrant] = []

    async def ask() -> None:
        found.append(await link.call("get_api_key", m.GetApiKey(SESSION, "anthropic")))

    async with running(link), anyio.create_task_group() as group:
        group.start_soon(ask)
        async with hutchd.up():
            await hutchd.until(lambda: found)

    assert found == [m.KeyGrant(delivery="lease", value="l-1")]


async def test_an_error_of_hutchd_reaches_the_caller(hutchd: FakeHutchd) -> None:
    """A refusal is not a lost connection: the call is not repeated."""
    link = DaemonLink(boot(hutchd.path), Reporter(), lambda: IDLE)

    async with hutchd.up(), running(link):
        with pytest.raises(HutchError) as refused:
            await link.call("get_api_key", m.GetApiKey(SESSION, "anthropic"))

    assert refused.value.reason is Reason.NO_KEY


async def test_a_hutchd_that_stores_nothing_is_offered_events_ever_less_often(
    hutchd: FakeHutchd, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The link is up again at once, for interrupts; only the events wait. Nothing is logged: hutchd logs its disk."""
    caplog.set_level("INFO")
    reporter = Reporter()
    reporter.begin(SESSION, Spool(tmp_path, "x-1", SESSION, 1 << 20))
    link = DaemonLink(boot(hutchd.path), reporter, lambda: LinkState(SESSION, None, is_busy=True))
    hutchd.unstored = 3
    offered: list[float] = []

    async def refused(left: int) -> None:
        """Wait until all but `left` of the reports were refused, and the link is up again."""
        await hutchd.until(lambda: hutchd.unstored == left)
        offered.append(anyio.current_time())
        await hutchd.until(lambda: len(hutchd.hellos) == 4 - left)

    async with hutchd.up(), running(link):
        await reporter.report("text", Text("a"))
        for left in (2, 1, 0):
            await refused(left)
        await hutchd.until(lambda: hutchd.stored == 1)

    assert offered[2] - offered[1] > offered[1] - offered[0] > 0.1
    assert len(hutchd.hellos) == 4
    assert [record.getMessage() for record in caplog.records] == []
    await reporter.close()


async def test_a_hutchd_that_is_away_is_logged_once(hutchd: FakeHutchd, caplog: pytest.LogCaptureFixture) -> None:
    """However often the executor dials; and once more when it is back."""
    caplog.set_level("INFO")
    link = DaemonLink(boot(hutchd.path), Reporter(), lambda: LinkState(SESSION, None, is_busy=True))

    async with running(link):
        async with hutchd.up():
            await hutchd.until(lambda: link.is_up)
        with anyio.move_on_after(1.0):
            await hutchd.until(lambda: len(hutchd.hellos) > 1)
        async with hutchd.up():
            await hutchd.until(lambda: link.is_up)

    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2
    assert lines[0].startswith("not connected: hutchd cannot be reached")
    assert lines[1].startswith("connected (after ")


async def test_closing_dials_no_more(hutchd: FakeHutchd) -> None:
    """After `close` the link does not dial."""
    ends: list[HutchError] = []
    link = DaemonLink(boot(hutchd.path), Reporter(), lambda: IDLE)

    async with hutchd.up(), running(link, ends):
        await hutchd.until(lambda: link.is_up)
        await link.close()
        with anyio.fail_after(WAIT):
            while not ends:
                await checkpoint()

    assert len(hutchd.hellos) == 1
