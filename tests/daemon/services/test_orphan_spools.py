"""The next executor of the account reports the events in the spool of a dead one."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import msgspec
from msgspec import Raw

from hutch_daemon.store import executors
from hutch_shared import messages as m
from hutch_shared.errors import HutchError
from hutch_shared.events import ReportedEvent, Text, TurnEnded
from hutch_shared.times import now_ms, to_wire
from tests.fakes.executors import FakeExecutor, never_end, say_done
from tests.fakes.stage import Stage, until


def said(n: int, turn: m.Turn) -> ReportedEvent:
    return ReportedEvent(n, to_wire(now_ms()), "text", Raw(msgspec.json.encode(Text(f"event {n}"))), turn.id)


async def left_by(stage: Stage, executor: FakeExecutor, session: str, *events: ReportedEvent) -> Path:
    """Kill the executor, with these events in its spool."""
    assert executor.prepared is not None
    spool = Path(executor.prepared.spool)
    stage.host.spools[str(spool)] = (session, list(events))
    (spool / "x.spool").touch()
    executor.die()
    return spool


async def brought_in(stage: Stage, executor: FakeExecutor) -> None:
    async def over() -> bool:
        row = await stage.store.read(partial(executors.get, executor=executor.spec.executor))
        return row is not None and row.state == "gone" and row.spool is None

    await until(over)


async def test_a_dead_executors_spool_is_stored_once(stage: Stage) -> None:
    """Acknowledged events are not stored again, and the turn keeps its end."""
    stage.host.play = never_end
    async with stage.hutchd():
        session = await stage.open()
        turn = await stage.submit(session)
        executor = await stage.running(turn)
        data = Raw(msgspec.json.encode(TurnEnded("completed", "completed", "Done.")))
        end = ReportedEvent(4, to_wire(now_ms()), "turn_ended", data, turn.id)
        events = [said(1, turn), said(2, turn), said(3, turn), end]
        spool = await left_by(stage, executor, session.id, *events)
        await stage.ended(turn)
        stage.host.play = say_done
        await stage.ended(await stage.submit(session))
        await brought_in(stage, executor)

        assert (await stage.turn(turn)).state == "failed"
        kinds = [event.kind for event in await stage.events(session) if event.turn == turn.id]
        assert kinds == ["turn_started", "turn_ended", "text", "text", "notice"]
        assert not spool.exists()


async def test_any_executor_of_the_account_hands_in_a_spool(stage: Stage) -> None:
    """This includes an executor of another session: the first session may never get another one."""
    stage.host.play = never_end
    async with stage.hutchd():
        session = await stage.open()
        turn = await stage.submit(session)
        executor = await stage.running(turn)
        await stage.running(await stage.submit(await stage.open(name="other")))

        await left_by(stage, executor, session.id, said(2, turn))

        await brought_in(stage, executor)
        assert (await stage.kinds(session)).count("text") == 1  # the event may come before or after the turn's end


async def test_a_refused_spool_is_stored_once_there_is_space(stage: Stage) -> None:
    """It is stored although no executor starts or ends."""
    stage.host.play = never_end
    async with stage.hutchd():
        session = await stage.open()
        turn = await stage.submit(session)
        executor = await stage.running(turn)
        await stage.running(await stage.submit(await stage.open(name="other")))
        large = msgspec.structs.replace(said(2, turn), data=Raw(msgspec.json.encode(Text("x" * 1_000_000))))
        await limit_pages(stage, 1)  # SQLite raises this limit to the current size

        await left_by(stage, executor, session.id, large)
        await until(lambda: is_full(stage))
        await limit_pages(stage, 1_000_000)

        await brought_in(stage, executor)
        assert (await stage.kinds(session)).count("text") == 1


async def is_full(stage: Stage) -> bool:
    return not stage.store.available


async def limit_pages(stage: Stage, pages: int) -> None:
    """Limit the database to its present pages, as soon as anything can be stored."""

    async def done() -> bool:
        try:
            await stage.store.write(lambda tx: tx.execute(f"PRAGMA max_page_count = {pages}").fetchone())
        except HutchError:
            return False
        return True

    await until(done)


async def test_a_spool_of_a_removed_session_is_dropped(stage: Stage) -> None:
    """Its record is gone, so the spool is not kept."""
    stage.host.play = never_end
    async with stage.hutchd():
        session = await stage.open()
        turn = await stage.submit(session)
        executor = await stage.running(turn)
        await stage.running(await stage.submit(await stage.open(name="other")))

        spool = await left_by(stage, executor, "s-removed", said(2, turn))

        await brought_in(stage, executor)
        assert not spool.exists()
        assert "text" not in await stage.kinds(session)
