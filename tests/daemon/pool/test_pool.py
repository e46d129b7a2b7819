"""The pool with fake executors: spares, limits, start loops, silent and lost executors."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest

from hutch_daemon.machine import IllegalMoveError
from hutch_daemon.pool.states import EXECUTOR
from hutch_daemon.pool.view import ExecutorKey
from hutch_daemon.settings import ExecutorSettings
from hutch_shared import messages as m
from hutch_shared.errors import HutchError, Reason
from hutch_shared.events import TurnEnded
from tests.fakes.executors import FakeExecutor, never_end
from tests.fakes.stage import WAIT, Stage, new_stage, settings, until


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    """A hutchd that can be started."""
    async with new_stage(tmp_path) as made:
        yield made


def executors(**changes: object) -> ExecutorSettings:
    """Return pool settings with spares of the script agent."""
    fields: dict[str, object] = {"spares": 0, "spare_agents": ("script",), "hello_timeout": WAIT, "lost_timeout": WAIT}
    return ExecutorSettings(**(fields | changes))  # type: ignore[arg-type]


def key(stage: Stage, agent: str = "script") -> ExecutorKey:
    """Return the key of executors of hutchd's account."""
    return ExecutorKey(stage.account_of(stage.me.uid), agent, stage.host.name)


async def test_a_session_gets_the_spare_and_another_starts(stage: Stage) -> None:
    """A new session gets the waiting executor, and the pool starts a new spare."""
    stage.settings = settings(executors=executors(spares=1))
    async with stage.hutchd():
        stage.pool.warm([key(stage)])
        await until(lambda: [one.state for one in stage.pool.roster.all()] == ["ready"])

        await stage.ended(await stage.submit(await stage.open()))
        await until(lambda: [one.state for one in stage.pool.roster.all()] == ["leased", "ready"])

        assert stage.host.played[0][0] == stage.host.started[0].spec.executor


async def test_a_spare_serves_only_its_own_key(stage: Stage) -> None:
    """An executor never serves a session with another agent or account."""
    stage.settings = settings(executors=executors(spares=1))
    async with stage.hutchd():
        stage.pool.warm([key(stage)])
        await until(lambda: [one.state for one in stage.pool.roster.all()] == ["ready"])

        await stage.open(agent="claude")
        await until(lambda: any(one.key.agent == "claude" and one.session for one in stage.pool.roster.all()))

        assert [one.state for one in stage.pool.roster.all() if one.key.agent == "script"] == ["ready"]


async def test_at_the_maximum_the_longest_idle_executor_is_ended(stage: Stage) -> None:
    """Its slot goes to a session with a prompt; the idle session can resume later."""
    stage.settings = settings(executors=executors(maximum=1))
    async with stage.hutchd():
        first = await stage.open(name="first")
        await stage.ended(await stage.submit(first))

        await stage.ended(await stage.submit(await stage.open(name="second")))
        await stage.ended(await stage.submit(first))

        assert len(stage.host.started) == 3
        assert [one.shutdown_wished for one in stage.host.started] == [True, True, False]


async def test_a_session_waits_for_a_slot_until_another_is_idle(stage: Stage) -> None:
    """No working executor is ended; the session gets the slot of the first that becomes idle."""
    release = anyio.Event()

    async def wait(executor: FakeExecutor, prompt: m.ExecutePrompt) -> TurnEnded:
        if prompt.prompt == "long":
            await release.wait()
        return TurnEnded("completed", "done", "Done.")

    stage.host.play = wait
    stage.settings = settings(executors=executors(maximum=1))
    async with stage.hutchd():
        long = await stage.submit(await stage.open(name="first"), "long")
        await stage.running(long)
        short = await stage.submit(await stage.open(name="second"), "short")
        before = len(stage.host.started)

        release.set()
        ends = [await stage.ended(long), await stage.ended(short)]

        assert before == 1
        assert [one.state for one in ends] == ["completed", "completed"]


async def test_an_idle_executor_is_ended(stage: Stage) -> None:
    """After idle_timeout the executor of an idle session ends; the session stays open."""
    stage.settings = settings(executors=executors(idle_timeout=0.01, heartbeat_timeout=0.4))
    async with stage.hutchd():
        session = await stage.open()
        await stage.ended(await stage.submit(session))

        await until(lambda: stage.pool.roster.all() == [])

        assert (await stage.services.sessions.get_session(stage.me, m.SessionRef(session.id))).state == "open"


async def test_surplus_spares_are_ended(stage: Stage) -> None:
    """After idle_timeout, and soon after a change of settings, surplus spares are ended and the others stay."""
    stage.settings = settings(executors=executors(spares=2, lost_timeout=2.0))
    async with stage.hutchd():
        stage.pool.warm([key(stage)])
        await until(lambda: [one.state for one in stage.pool.roster.all()] == ["ready", "ready"])
        await anyio.wait_all_tasks_blocked()  # the pool has planned with these settings

        stage.settings = settings(executors=executors(spares=1, idle_timeout=0.01, heartbeat_timeout=0.4))

        await until(lambda: [one.state for one in stage.pool.roster.all()] == ["ready"])


async def test_a_silent_executor_is_ended(stage: Stage) -> None:
    """A connected executor without heartbeats, stopped or spinning, is killed."""
    stage.settings = settings(executors=executors(heartbeat_timeout=0.2))
    async with stage.hutchd():
        turn = await stage.submit(await stage.open(agent="script"))
        await stage.ended(turn)
        executor = stage.executor

        await until(executor.exited.is_set)

        assert stage.pool.roster.by_id.get(executor.spec.executor) is None or executor.exited.is_set()


async def test_a_start_without_hello_fails_at_its_deadline(stage: Stage) -> None:
    """The process is killed and the error has the reason."""
    stage.settings = settings(executors=executors(hello_timeout=0.02, start_attempts=2))
    stage.host.mute = True
    async with stage.hutchd():
        ended = await stage.ended(await stage.submit(await stage.open()))

        assert "did not say hello" in (ended.message or "")
        assert [one.exited.is_set() for one in stage.host.started] == [True, True]


async def test_an_executor_that_exits_before_hello_fails_at_once(stage: Stage) -> None:
    """The turn fails with the exit status and the path of the output, long before the deadline for hello."""
    stage.settings = settings(executors=executors(start_attempts=1))
    stage.host.mute = True
    async with stage.hutchd():
        turn = await stage.submit(await stage.open())
        await until(lambda: len(stage.host.started) == 1)

        stage.executor.die()
        ended = await stage.ended(turn)

        assert "its process ended" in (ended.message or "")
        assert f"{stage.executor.spec.executor}.log" in (ended.message or "")


async def test_an_abandoned_start_leaves_no_process(stage: Stage) -> None:
    """An executor whose end is requested during its start is ended once it exists."""
    stage.settings = settings(executors=executors(spares=1))
    stage.host.gate = anyio.Event()
    async with stage.hutchd():
        stage.pool.warm([key(stage)])
        await until(lambda: stage.host.starts == 1)

        stage.pool.stop_starting()
        stage.host.gate.set()
        await until(lambda: stage.pool.roster.all() == [])

        assert [one.exited.is_set() for one in stage.host.started] == [True]


async def test_a_start_loop_is_stopped_with_one_notice(stage: Stage) -> None:
    """After the limit the pool starts nothing until the window has passed, and refuses each lease at once."""
    stage.host.refusing = 1000
    async with stage.hutchd():
        with pytest.raises(HutchError):
            await stage.pool.lease("s-none", key(stage))
        tried = stage.host.refusing

        for _ in range(5):
            with pytest.raises(HutchError) as refused:
                await stage.pool.lease("s-none", key(stage))
            assert refused.value.reason is Reason.AGENT_UNAVAILABLE
            assert refused.value.details["retry_after"] > 0

        assert stage.host.refusing == tried
        status = await stage.services.host.get_status(stage.me, m.Nothing())
        assert len(status.notices) == 1


async def test_a_lost_spare_is_ended(stage: Stage) -> None:
    """A spare that lost its connection and does not return is ended."""
    stage.settings = settings(executors=executors(spares=1, lost_timeout=0.05))
    async with stage.hutchd():
        stage.pool.warm([key(stage)])
        await until(lambda: [one.state for one in stage.pool.roster.all()] == ["ready"])
        spare = stage.executor

        spare.hang_up()
        await until(spare.exited.is_set)

        assert spare.exited.is_set()


async def test_stopping_ends_the_spares(stage: Stage) -> None:
    """When hutchd stops, spares are asked to end, and none is started."""
    stage.settings = settings(executors=executors(spares=1))
    async with stage.hutchd():
        stage.pool.warm([key(stage)])
        await until(lambda: [one.state for one in stage.pool.roster.all()] == ["ready"])

        stage.pool.stop_starting()
        await until(lambda: stage.pool.roster.all() == [])
        await anyio.lowlevel.checkpoint()

        assert len(stage.host.started) == 1


def test_an_executor_is_gone_only_after_draining() -> None:
    """The state `gone` follows only `draining`, and is final."""
    assert EXECUTOR.before["gone"] == {"draining", "quarantined"}
    assert EXECUTOR.terminal == {"gone"}
    with pytest.raises(IllegalMoveError, match="leased does not lead to gone"):
        EXECUTOR.move("leased", "gone", "x-1")


async def test_nothing_is_started_while_hutchd_stops(stage: Stage) -> None:
    """Each lease is refused, even one that waits for a slot: nothing would end its executor."""
    stage.settings = settings(executors=executors(maximum=1))
    stage.host.play = never_end
    async with stage.hutchd():
        await stage.running(await stage.submit(await stage.open()))
        refused: list[Reason] = []

        async def lease() -> None:
            with pytest.raises(HutchError) as error:
                await stage.pool.lease("s-other", key(stage))
            refused.append(error.value.reason)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lease)
            await anyio.wait_all_tasks_blocked()
            stage.pool.stop_starting()
            await stage.pool.end(stage.pool.roster.all()[0], "hutchd stops")
        await lease()

        assert refused == [Reason.SHUTTING_DOWN] * 2
        assert len(stage.host.started) == 1
