"""Stopping a hutchd that serves, starts, stops or stands still, and what is left of it afterwards."""

from __future__ import annotations

import fcntl
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random
from time import monotonic

import anyio
import anyio.abc
import pytest

from hutch_client import exits
from hutch_client.client import HutchClient
from hutch_shared import messages as m
from hutch_shared.errors import HutchError, Reason
from hutch_shared.hutchd_lock import find_hutchd
from tests.rehearsal import Pause, Say, Steps, serve
from tests.sampling import sample, seed
from tests.system import processes
from tests.system.host import KEY, Host, host, settings_for
from tests.system.log import DEADLINE, log_of, wait_for

pytestmark = [pytest.mark.system, sample(3)]

SPARES_OFF = "[executors]\nspares = 0\n"
PROMPT = 2.0 + 3.0
"""Seconds for a greeting or a stop of a starting hutchd: the bound of 2 s, and room for the start of Python on a slow
machine."""


def running(made: Host) -> list[str]:
    """Return the commands of hutchd, executors and the broker that run."""
    return [one.command for one in processes.marked(made.mark) if "hutch_client" not in one.command]


def starts(made: Host) -> bool:
    """Return whether the lock of a start is held. Looks at the file itself: what the product sees is what is tested."""
    try:
        with open(made.state / "hutchd.starting", "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        pass
    return False


@asynccontextmanager
async def starting(made: Host) -> AsyncIterator[anyio.abc.Process]:
    """Run `hutch daemon start` during the block, which begins when the start is in flight; then let it end."""
    made.write_settings()
    async with made.hutch_beside("daemon", "start") as start:
        await wait_for(lambda: starts(made))
        yield start
        with anyio.fail_after(DEADLINE):
            await start.wait()


@pytest.mark.parametrize("count", [pytest.param(50, marks=[pytest.mark.full, pytest.mark.timeout(900)]), 2])
async def test_a_stop_at_any_moment_of_a_start_leaves_nothing(count: int) -> None:
    """Within two seconds nothing of that hutchd runs, whether it had imported, opened or served anything yet."""
    random = Random(f"{seed()} stops")
    slowest = longest = 0.0
    async with host(SPARES_OFF, start=False) as made:
        for number in range(count):
            async with starting(made):
                if number:  # the first stop comes as early as it can
                    await anyio.sleep(random.uniform(0, 1.5))
                begin = monotonic()
                stop = await made.hutch("daemon", "stop", "--stop", code=None)
                returned = monotonic()
                await wait_for(lambda: not running(made))
                slowest = max(slowest, monotonic() - returned)
                longest = max(longest, monotonic() - begin)

                assert stop.code == 0, stop
                assert find_hutchd(made.state) is None

    print(f"{count} stops; all was gone {slowest:.2f} s after the slowest returned, {longest:.2f} s after it began")
    assert slowest < 2.0
    assert longest < PROMPT


async def test_a_default_stop_leaves_only_running_turns_and_says_how_to_end_them() -> None:
    """Idle executors and spares are gone, the broker stays for the turn; a stop without hutchd ends the rest."""
    pause = Pause()
    script = Steps(("idle", Say("ok")), ("work", [Say("begun"), pause, Say("done")]))
    async with serve(key=KEY, script=script) as model, host(settings_for(model), double=True) as made:
        await made.hutch("key", "add", "anthropic", input=KEY)
        async with made.client() as hutch:
            idle, busy = await made.claude(hutch, "idle"), await made.claude(hutch, "busy")
            async with log_of(hutch, idle) as log:
                await log.ended(await hutch.submit_prompt(idle.id, "idle"))
            async with log_of(hutch, busy) as log:
                await hutch.submit_prompt(busy.id, "work")
                await log.until(lambda log: log.of("text_delta"))
            executors = {one.session: one.pid for one in (await hutch.get_status()).executors}
        stop = await made.hutch("daemon", "stop", "--timeout", "0.1")
        await made.exited()
        left = [one.pid for one in processes.marked(made.mark)]
        nobody = await made.hutch("daemon", "stop", code=None)
        ended = await made.hutch("daemon", "stop", "--stop")
        gone = running(made)

        assert f"(pid {executors[busy.id]}), session {busy.id}" in stop.err
        assert "hutch-broker (pid " in stop.err
        assert "`hutch daemon stop --stop` ends them" in stop.err
        assert executors[busy.id] in left
        assert executors[idle.id] not in left
        assert "No hutchd runs. Left running:" in nobody.err
        assert "Ended what an earlier hutchd had left" in ended.err
        assert gone == []
        pause.release.set()


async def test_a_default_stop_without_a_turn_leaves_nothing() -> None:
    """The broker is gone with hutchd."""
    async with serve(key=KEY, script=Steps(("hi", Say("ok")))) as model, host(settings_for(model), double=True) as made:
        await made.hutch("key", "add", "anthropic", input=KEY)
        await made.hutch("run", "hi")
        stop = await made.hutch("daemon", "stop")
        await made.exited()

        assert stop.err == ""
        assert running(made) == []


async def test_a_stop_replaces_a_slower_stop() -> None:
    """A hutchd that waits for a turn stops it when a second stop asks for that."""
    async with host(SPARES_OFF) as made, made.client() as hutch:
        session = await made.script(hutch, [{"text": "begun"}, {"wait_file": "never"}])
        async with log_of(hutch, session) as log:
            turn = await hutch.submit_prompt(session.id, "go")
            await log.until(lambda log: log.of("text"))
            async with made.hutch_beside("daemon", "stop") as slow:
                await wait_for(lambda: "asked to stop" in made.log_text())
                await made.hutch("daemon", "stop", "--stop")
                await slow.wait()
        await made.exited()
        await made.start()
        ended = await _turn(hutch, turn.id)

        assert slow.returncode == 0
        assert ended == "stopped"


async def _turn(hutch: HutchClient, turn: str) -> str:
    found: m.Turn = await hutch.call("get_turn", m.TurnRef(turn))
    return str(found.state)


@sample(2)
@pytest.mark.parametrize(
    "words",
    [("ps",), ("status",), ("run", "hi"), ("logs", "s", "-f"), ("daemon", "stop"), ("daemon", "start")],
    ids=lambda words: " ".join(words),
)
async def test_a_hutchd_that_stands_still_is_named_within_the_greeting(stopped: Host, words: tuple[str, ...]) -> None:
    """Each command says the pid, that it is stopped, and how it goes on; the exit code is that of no hutchd."""
    begin = monotonic()
    shown = await stopped.hutch(*words, code=exits.NO_DAEMON)
    passed = monotonic() - begin

    assert f"hutchd (pid {stopped.pid}) is stopped, as by SIGSTOP or Ctrl-Z" in shown.err
    assert f"`kill -CONT {stopped.pid}`" in shown.err
    assert passed < PROMPT


async def test_the_python_client_is_told_within_the_greeting(stopped: Host) -> None:
    """It raises `connection_lost` with the same sentence."""
    with anyio.fail_after(PROMPT), pytest.raises(HutchError, match="is stopped") as caught:
        async with stopped.client(redial_for=0.0):
            pass

    assert caught.value.reason is Reason.CONNECTION_LOST


@pytest.fixture
async def stopped() -> AsyncIterator[Host]:
    """A host whose hutchd a signal has stopped."""
    async with host(SPARES_OFF) as made:
        made.signal(signal.SIGSTOP)
        try:
            yield made
        finally:
            made.signal(signal.SIGCONT)
