"""While nothing can be stored, requests that stop something work; requests that start something are refused."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager

import anyio
import pytest

from hutch_daemon.pool.executors import Executor
from hutch_daemon.settings import TurnSettings
from hutch_shared import messages as m
from hutch_shared.errors import HutchError, Reason
from hutch_shared.events import Text, TurnEnded
from hutch_shared.ids import new_id
from tests.fakes.executors import FakeExecutor, never_end
from tests.fakes.stage import Stage, settings, until

CALL = m.ToolCall("c-1", "run_command", "Bash", {"command": "make"}, command="make")


@contextmanager
def nothing_stored(stage: Stage) -> Iterator[None]:
    """Lock the database from outside, so that every write of hutchd fails."""
    with closing(sqlite3.connect(stage.store.path, isolation_level=None)) as stranger:
        stranger.execute("BEGIN IMMEDIATE")
        yield
        stranger.execute("ROLLBACK")


async def only_question(stage: Stage, session: m.Session) -> m.Permission:
    """Return the session's only permission request."""
    (row,) = (
        await stage.services.approvals.list_permissions(stage.me, m.ListPermissions(session.id, None))
    ).permissions
    return row


async def test_an_executor_whose_start_was_not_stored_has_no_row_to_correct(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    """The store has logged that it failed; no line is logged about the executor that did not start."""
    async with stage.hutchd():
        await stage.ended(await stage.submit(await stage.open()))
        stored = stage.pool.roster.all()[0]
        unstored = Executor(new_id("executor"), stored.key, stored.environment, 0.0)

        await stage.pool.roster.save(unstored, state="gone")

        assert "states are not stored" not in caplog.text


async def test_a_deny_holds_at_once_and_is_stored_later(stage: Stage) -> None:
    """The agent gets the denial, a later decision is refused, and the denial is stored once the disk works."""
    decided: list[m.PermissionDecision] = []

    async def ask(executor: FakeExecutor, prompt: m.ExecutePrompt) -> TurnEnded:
        decided.append(await executor.ask(CALL))
        await until(lambda: stage.store.available)
        return TurnEnded("completed", "done", "Done.")

    stage.host.play = ask
    async with stage.hutchd():
        session = await stage.open()
        turn = await stage.submit(session)
        asked = await stage.pending()
        with nothing_stored(stage):
            with pytest.raises(HutchError) as allowed:
                await stage.answer(asked, "allow")
            denied = await stage.answer(asked, "deny", message="no")
            await until(lambda: bool(decided))
            with pytest.raises(HutchError) as late:
                await stage.answer(asked, "allow")
            kinds = await stage.kinds(session)
        await stage.ended(turn)

        async def stored() -> bool:
            row = await only_question(stage, session)
            return (row.state, row.message) == ("denied", "no")

        await until(stored)
        assert allowed.value.reason is Reason.STORE_UNAVAILABLE
        assert (denied.state, decided[0].decision, decided[0].message) == ("denied", "deny", "no")
        assert late.value.reason is Reason.ALREADY_SETTLED
        assert "permission_settled" not in kinds
        assert (await stage.kinds(session)).count("permission_settled") == 1


@pytest.mark.parametrize("stop", [False, True], ids=["deny", "deny and stop"])
async def test_only_a_deny_with_interrupt_stops_the_turn(stage: Stage, stop: bool) -> None:
    """The interrupt reaches the executor even while nothing can be stored."""

    async def ask(executor: FakeExecutor, prompt: m.ExecutePrompt) -> TurnEnded:
        await executor.ask(CALL)
        await until(lambda: stage.store.available)
        if stop:
            await anyio.sleep_forever()
        return TurnEnded("completed", "done", "Done.")

    stage.host.play = ask
    stage.settings = settings(turns=TurnSettings(interrupt_grace=1.0))
    async with stage.hutchd():
        turn = await stage.submit(await stage.open())
        asked = await stage.pending()
        executor = await stage.running(turn)
        with nothing_stored(stage):
            await stage.answer(asked, "deny", interrupt=stop)
        ended = await stage.ended(turn)

        assert ended.state == ("stopped" if stop else "completed")
        assert ("interrupt_turn" in [name for name, _ in executor.calls]) is stop


async def test_requests_of_a_dead_executor_are_withdrawn_once_the_disk_works(stage: Stage) -> None:
    """No client needs to call hutchd for that."""

    async def ask(executor: FakeExecutor, prompt: m.ExecutePrompt) -> None:
        await executor.ask(CALL)

    stage.host.play = ask
    async with stage.hutchd():
        session = await stage.open()
        turn = await stage.submit(session)
        asked = await stage.pending()
        with nothing_stored(stage):
            (await stage.running(turn)).die()
            with pytest.raises(HutchError):
                await stage.submit(session, "another")
        await stage.ended(turn)

        async def settled() -> bool:
            row = await only_question(stage, session)
            return (row.id, row.state) == (asked.id, "withdrawn")

        await until(settled)


async def test_an_interrupt_reaches_the_executor_and_its_end_is_stored_later(stage: Stage) -> None:
    """After the reply nothing more of the turn starts; the record shows it as stopped once it can be written."""
    stage.host.play = never_end
    stage.settings = settings(turns=TurnSettings(interrupt_grace=1.0))
    async with stage.hutchd():
        session = await stage.open()
        turn = await stage.submit(session)
        executor = await stage.running(turn)
        with nothing_stored(stage):
            with pytest.raises(HutchError) as refused:
                await stage.submit(session, "another")
            await stage.services.turns.interrupt_turn(stage.me, m.InterruptTurn(session.id))
            told = [name for name, _ in executor.calls]
        ended = await stage.ended(turn)

        assert refused.value.reason is Reason.STORE_UNAVAILABLE
        assert "interrupt_turn" in told
        assert ended.state == "stopped"


async def test_a_queued_prompt_cannot_be_cancelled_while_nothing_is_stored(stage: Stage) -> None:
    """The call is refused with the reason and does not hang."""
    stage.host.play = never_end
    async with stage.hutchd():
        session = await stage.open()
        await stage.running(await stage.submit(session))
        waiting = await stage.submit(session, "later")
        with nothing_stored(stage), pytest.raises(HutchError) as refused:
            await stage.services.turns.cancel_turn(stage.me, m.TurnRef(waiting.id))

        assert refused.value.reason is Reason.STORE_UNAVAILABLE


async def test_unstored_events_are_not_acknowledged(stage: Stage) -> None:
    """An event's receipt follows its commit, so the executor keeps refused events."""
    stage.host.play = never_end
    async with stage.hutchd():
        turn = await stage.submit(await stage.open())
        executor = await stage.running(turn)
        await until(lambda: executor.acked == 1)
        with nothing_stored(stage):
            await executor.report("text", Text("said"), turn.id)
            during = executor.acked
        await until(lambda: stage.store.available)
        await executor.resend(during)

        assert (during, executor.acked) == (1, 2)
