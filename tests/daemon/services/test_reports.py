"""hutchd stores executors' reports unchanged, except secrets and claims that an executor may not make."""

from __future__ import annotations

import msgspec

from hutch_shared import messages as m
from hutch_shared.events import Event, Notice, PermissionSettled, Text, TurnEnded, UsageSeen
from tests.fakes.executors import never_end
from tests.fakes.stage import Stage


def word_of(event: Event) -> str:
    """Return the word of a notice."""
    return msgspec.json.decode(event.data, type=Notice).word


async def test_a_reported_decision_is_stored_as_a_notice(stage: Stage) -> None:
    """An executor cannot report permission_settled; the notice keeps the event's number."""
    stage.host.play = never_end
    async with stage.hutchd():
        session = await stage.open()
        turn = await stage.submit(session)
        executor = await stage.running(turn)

        await executor.report("permission_settled", PermissionSettled("p-1", "allowed", "me"), turn.id)
        await executor.report("text", Text("on"), turn.id)

        events = await stage.events(session)
        assert [event.kind for event in events] == ["turn_started", "notice", "text"]
        assert word_of(events[1]) == "not_yours"
        assert executor.acked == 3


async def test_a_malformed_turn_end_fails_the_turn(stage: Stage) -> None:
    """Otherwise the turn would hang."""
    stage.host.play = never_end
    async with stage.hutchd():
        session = await stage.open()
        turn = await stage.submit(session)
        executor = await stage.running(turn)

        await executor.report("turn_ended", Text("what?"), turn.id)

        assert (await stage.ended(turn)).reason == "malformed"
        last = (await stage.events(session))[-1]
        assert msgspec.json.decode(last.data, type=TurnEnded).state == "failed"


async def test_an_executor_cannot_end_another_sessions_turn(stage: Stage) -> None:
    """It can end turns of its own session only."""
    stage.host.play = never_end
    async with stage.hutchd():
        session, other = await stage.open(name="one"), await stage.open(name="two")
        mine, theirs = await stage.submit(session), await stage.submit(other)
        await stage.running(mine)
        await stage.running(theirs)
        executor = next(one for one in stage.host.started if one.turn == mine.id)

        await executor.report("turn_ended", TurnEnded("completed", "done", "Done."), theirs.id)

        assert (await stage.turn(theirs)).state == "running"
        assert word_of((await stage.events(session))[-1]) == "no_such_turn"


async def test_a_failure_after_an_interrupt_counts_as_stopped(stage: Stage) -> None:
    """State and event agree if the agent failed because it was stopped."""
    stage.host.play = never_end
    async with stage.hutchd():
        session = await stage.open()
        turn = await stage.submit(session)
        executor = await stage.running(turn)
        executor.breaks_off = True

        await stage.services.turns.interrupt_turn(stage.me, m.InterruptTurn(session.id))

        assert (await stage.ended(turn)).state == "stopped"
        last = (await stage.events(session))[-1]
        assert msgspec.json.decode(last.data, type=TurnEnded).state == "stopped"


async def test_events_of_foreign_turns_become_notices(stage: Stage) -> None:
    """The notice names no turn, whether the event named another session's turn, a queued one or an unknown one."""
    stage.host.play = never_end
    async with stage.hutchd():
        session, other = await stage.open(name="one"), await stage.open(name="two")
        mine, theirs = await stage.submit(session), await stage.submit(other)
        await stage.running(mine)
        await stage.running(theirs)
        waiting = await stage.submit(session)
        executor = next(one for one in stage.host.started if one.turn == mine.id)

        await executor.report("text", Text("psst"), theirs.id)
        await executor.report("turn_ended", TurnEnded("stopped", "done", "Done."), waiting.id)
        await executor.report("text", Text("psst"), "\x1b[31mno turn")

        events = (await stage.events(session))[-3:]
        assert [(event.kind, event.turn, word_of(event)) for event in events] == [("notice", None, "no_such_turn")] * 3
        assert (await stage.turn(waiting)).state == "queued"


async def test_impossible_usage_fails_the_turn(stage: Stage) -> None:
    """Numbers that no store can hold make the end malformed; otherwise the event would be refused for ever."""
    stage.host.play = never_end
    async with stage.hutchd():
        session = await stage.open()
        turn = await stage.submit(session)
        executor = await stage.running(turn)

        usage = UsageSeen(input_tokens=2**70, usd=-5.0)
        await executor.report("turn_ended", TurnEnded("completed", "done", "Done.", usage=usage), turn.id)

        assert (await stage.ended(turn)).reason == "malformed"
        assert executor.acked == 2
