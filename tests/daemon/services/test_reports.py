"""What executors report is stored as it came, but for what is not theirs to say or must not be kept."""

from __future__ import annotations

import msgspec

from hutch_shared import messages as m
from hutch_shared.events import Event, Notice, PermissionSettled, Text, TurnEnded, UsageSeen
from tests.fakes.executors import never_end
from tests.fakes.stage import Stage


def word_of(event: Event) -> str:
    """Return the word of a notice."""
    return msgspec.json.decode(event.data, type=Notice).word


async def test_a_decision_is_not_the_executors_to_report(stage: Stage) -> None:
    """A reported permission_settled is a notice in the journal, with the number it came with."""
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


async def test_an_end_that_cannot_be_read_ends_the_turn(stage: Stage) -> None:
    """A malformed turn_ended fails the turn, which would hang otherwise."""
    stage.host.play = never_end
    async with stage.hutchd():
        session = await stage.open()
        turn = await stage.submit(session)
        executor = await stage.running(turn)

        await executor.report("turn_ended", Text("what?"), turn.id)

        assert (await stage.ended(turn)).reason == "malformed"
        last = (await stage.events(session))[-1]
        assert msgspec.json.decode(last.data, type=TurnEnded).state == "failed"


async def test_the_end_of_anothers_turn_is_not_believed(stage: Stage) -> None:
    """An executor can end turns of its own session alone."""
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


async def test_an_interrupted_turn_that_failed_was_stopped(stage: Stage) -> None:
    """State and event say the same when the agent broke off because it was stopped."""
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


async def test_events_of_turns_that_it_was_not_given_are_not_believed(stage: Stage) -> None:
    """They are notices that name no turn: not another session's, not one that still waits, not one that never was."""
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


async def test_usage_that_cannot_be_counted_ends_the_turn(stage: Stage) -> None:
    """Numbers no store could hold make an end that cannot be read, and no event is refused for ever."""
    stage.host.play = never_end
    async with stage.hutchd():
        session = await stage.open()
        turn = await stage.submit(session)
        executor = await stage.running(turn)

        usage = UsageSeen(input_tokens=2**70, usd=-5.0)
        await executor.report("turn_ended", TurnEnded("completed", "done", "Done.", usage=usage), turn.id)

        assert (await stage.ended(turn)).reason == "malformed"
        assert executor.acked == 2
