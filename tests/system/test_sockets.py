"""Sockets whose files are removed while hutchd, the broker and executors run: all find each other again."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from random import Random
from time import monotonic

import anyio
import pytest

from hutch_client import exits
from hutch_client.client import HutchClient
from hutch_shared import messages as m
from hutch_shared.errors import HutchError
from hutch_shared.events import Event
from tests.rehearsal import Say, Step, Steps, anything, serve
from tests.sampling import sample, seed
from tests.system.host import KEY, Host, host, settings_for
from tests.system.log import DEADLINE, data, log_of, wait_for

pytestmark = [pytest.mark.system, sample(3)]

REACHABLE = 3.0
"""Seconds within which hutchd is reachable again."""


@pytest.mark.parametrize("made_again", [True, False], ids=["logged in again", "logged out"])
async def test_a_removed_runtime_directory_does_not_cut_anybody_off(made_again: bool) -> None:
    """A logout removes it, and perhaps a login makes it again: sessions, `run`, `stop` and `start` go on working."""
    async with (
        serve(key=KEY, script=Steps(Step(anything, Say("ok"), None))) as model,
        host(settings_for(model), double=True) as made,
    ):
        await made.hutch("key", "add", "anthropic", input=KEY)
        first = await made.hutch("run", "hi")
        shutil.rmtree(made.runtime)
        if made_again:
            made.runtime.mkdir(0o700)
        with anyio.fail_after(DEADLINE):
            while (shown := await made.hutch("ps", code=None)).code == exits.NO_DAEMON:
                await anyio.sleep(0.05)
        again = await made.hutch("run", "hi")
        modes = [one.stat().st_mode & 0o777 for one in (made.runtime, made.runtime / "broker")]
        await made.hutch("daemon", "stop")
        assert await made.exited() == 0
        await made.start()
        last = await made.hutch("ps")

        assert (first.out, again.out) == ("ok\n", "ok\n")
        assert shown.code == 0
        assert modes == [0o700, 0o700]
        assert last.code == 0


async def test_a_removed_broker_socket_is_bound_again() -> None:
    """Until then the status says that it is gone; then new sessions work."""
    async with (
        serve(key=KEY, script=Steps(Step(anything, Say("ok"), None))) as model,
        host(settings_for(model), double=True) as made,
    ):
        await made.hutch("key", "add", "anthropic", input=KEY)
        await made.hutch("run", "hi")
        socket = made.runtime / "broker" / "broker.sock"
        socket.unlink()
        status = await made.hutch("status")
        await wait_for(socket.exists)
        after = await made.hutch("status")
        again = await made.hutch("run", "hi")

        is_up = re.compile(r"^broker +up", re.MULTILINE)
        assert f"DOWN: {socket} is gone" in status.out or is_up.search(status.out)
        assert is_up.search(after.out)
        assert again.out == "ok\n"


async def test_a_foreign_socket_in_its_place_is_replaced() -> None:
    """Clients would talk to it, so hutchd takes its place back and logs that."""
    async with host() as made:
        made.socket.unlink()
        async with await anyio.create_unix_listener(made.socket):
            inode = Path(made.socket).stat().st_ino
            await wait_for(lambda: made.socket.exists() and made.socket.stat().st_ino != inode)
        status = await made.hutch("status")

        assert status.code == 0
        assert "was replaced by another file" in made.log_text()


@pytest.mark.parametrize("count", [pytest.param(20, marks=[pytest.mark.full, pytest.mark.timeout(900)]), 2])
async def test_the_runtime_directory_is_removed_under_load(count: int) -> None:
    """With four sandboxed turns running, hutchd is reachable within seconds and each client sees each event once."""
    random = Random(f"{seed()} sockets")
    script = Steps(Step(anything, Say("word " * 60, chunks=60, pace=0.02), None))
    slowest = 0.0
    async with serve(key=KEY, script=script) as model, host(settings_for(model), double=True) as made:
        await made.hutch("key", "add", "anthropic", input=KEY)
        async with made.client() as hutch, anyio.create_task_group() as tasks:
            sessions = [await made.claude(hutch, f"s{number}") for number in range(4)]
            ended: dict[str, int] = dict.fromkeys((one.id for one in sessions), 0)

            async def work(session: m.Session) -> None:
                async with log_of(hutch, session) as log:
                    while True:
                        await log.ended(await hutch.submit_prompt(session.id, "go"))
                        ended[session.id] += 1

            for session in sessions:
                tasks.start_soon(work, session)
            await wait_for(lambda: all(ended.values()))
            for _ in range(count):
                await anyio.sleep(random.uniform(0, 1))  # some moment of the turns
                shutil.rmtree(made.runtime)
                begin = monotonic()
                await reachable(made)
                slowest = max(slowest, monotonic() - begin)
            before = dict(ended)
            await wait_for(lambda: all(ended[one] > before[one] for one in ended))
            tasks.cancel_scope.cancel()
        async with made.client() as hutch:
            for session in sessions:
                events = await whole(hutch, session)
                assert [event.seq for event in events] == list(range(1, len(events) + 1))
                for turn in await hutch.list_turns(session.id):
                    text = "".join(data(one).text for one in events if one.turn == turn.id and one.kind == "text_delta")
                    assert turn.state != "completed" or text == "word " * 60

    print(f"{count} removals; hutchd was reachable {slowest:.2f} s after the slowest; {sum(ended.values())} turns")
    assert slowest < 2 * REACHABLE  # room for a slow machine


async def reachable(made: Host) -> None:
    """Return when a new client gets an answer."""
    with anyio.fail_after(DEADLINE):
        while True:
            try:
                async with made.client(redial_for=0.0) as hutch:
                    await hutch.get_status()
                    return
            except HutchError:
                await anyio.sleep(0.02)


async def whole(hutch: HutchClient, session: m.Session) -> list[Event]:
    """Return all events of a session, as a new client reads them."""
    found: list[Event] = []
    async with hutch.follow(m.FollowEvents(session.id)) as follow:
        while len(found) < follow.head:
            found.append(await anext(follow))
    return found
