"""Turns that compact or clear a conversation, and prompts that are handed to a second executor."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from random import Random

import anyio
import msgspec
import pytest
from msgspec import Raw

from hutch_daemon.store import turns
from hutch_shared import messages as m
from hutch_shared.errors import HutchError, Reason
from hutch_shared.events import EventKind, ReportedEvent, Text, TurnEnded, TurnStarted, UsageSeen
from hutch_shared.times import now_ms, to_wire
from tests.fakes.executors import FakeExecutor, never_end
from tests.fakes.stage import Stage, until
from tests.sampling import seed


async def compacts(executor: FakeExecutor, prompt: m.ExecutePrompt) -> TurnEnded:
    """End each turn with its cost, and with the conversation's id unless it was cleared."""
    conversation = None if prompt.kind == "clear" else "conversation-1"
    usage = UsageSeen(100, 5, usd=0.25, model="big", total=True)
    return TurnEnded("completed", "completed", prompt.kind, usage=usage, agent_session=conversation)


def prompts(executor: FakeExecutor) -> list[m.ExecutePrompt]:
    """Return the prompts that an executor got."""
    return [params for name, params in executor.calls if isinstance(params, m.ExecutePrompt)]


async def agent_session(stage: Stage, session: m.Session) -> str | None:
    """Return the conversation of a session."""
    return (await stage.services.sessions.get_session(stage.me, m.SessionRef(session.id))).agent_session


async def test_a_conversation_is_compacted_and_cleared_in_the_queue(stage: Stage) -> None:
    """Both are turns: durable, in order, with a cost. After a clear the session has no conversation to resume."""
    stage.host.play = compacts
    async with stage.hutchd():
        session = await stage.open(agent="claude")
        talked = await stage.submit(session, "/compact is a word of mine")
        compacted = await stage.services.turns.compact_session(
            stage.me, m.CompactSession(session.id, " keep the sheep\n", "key-1")
        )
        same = await stage.services.turns.compact_session(
            stage.me, m.CompactSession(session.id, "keep the sheep", "key-1")
        )
        ended = await stage.ended(compacted)
        known = await agent_session(stage, session)
        cleared = await stage.ended(
            await stage.services.turns.clear_session(stage.me, m.ClearSession(session.id, "key-2"))
        )

        assert same.id == compacted.id
        assert [(one.kind, one.prompt, one.turn) for one in prompts(stage.executor)] == [
            ("prompt", "/compact is a word of mine", talked.id),
            ("compact", "keep the sheep", compacted.id),
            ("clear", "", cleared.id),
        ]
        assert (ended.kind, ended.state, ended.usage and ended.usage.usd) == ("compact", "completed", 0.25)
        assert (known, await agent_session(stage, session)) == ("conversation-1", None)
        for call in (
            stage.services.turns.clear_session(stage.me, m.ClearSession(session.id, "key-1")),
            stage.services.turns.submit_prompt(stage.me, m.SubmitPrompt(session.id, "keep the sheep", "key-1")),
        ):
            with pytest.raises(HutchError) as refused:
                await call
            assert refused.value.reason is Reason.CONFLICT


async def test_a_clear_that_fails_keeps_the_conversation(stage: Stage) -> None:
    """Only a completed clear forgets which conversation to resume."""
    async with stage.hutchd():
        session = await stage.open(agent="claude")
        await stage.ended(await stage.submit(session))
        stage.host.play = never_end
        turn = await stage.services.turns.clear_session(stage.me, m.ClearSession(session.id))
        (await stage.running(turn)).die()

        ended = await stage.ended(turn)

        assert (ended.state, await agent_session(stage, session)) == ("failed", "conversation-1")


async def test_an_agent_without_a_conversation_refuses_both(stage: Stage) -> None:
    """The caller gets the reason; nothing is queued."""
    async with stage.hutchd():
        session = await stage.open(agent="script")

        for call in (
            stage.services.turns.compact_session(stage.me, m.CompactSession(session.id)),
            stage.services.turns.clear_session(stage.me, m.ClearSession(session.id)),
        ):
            with pytest.raises(HutchError, match="its agent, script, keeps none") as refused:
                await call
            assert refused.value.reason is Reason.INVALID_PARAMS
        assert (await stage.services.turns.list_turns(stage.me, m.ListTurns(session.id))).turns == ()


async def test_an_adopted_executor_of_an_earlier_version_is_replaced(stage: Stage) -> None:
    """It never gets a turn that it cannot run; a prompt it does get."""
    stage.host.abilities = ()
    async with stage.hutchd():
        session = await stage.open(agent="claude")
        await stage.ended(await stage.submit(session))
        old = stage.executor
    stage.host.abilities = ("compact", "clear", "offered")

    async with stage.hutchd():
        await old.dial()
        prompted = await stage.ended(await stage.submit(session, "more"))
        compacted = await stage.ended(
            await stage.services.turns.compact_session(stage.me, m.CompactSession(session.id))
        )

        assert (prompted.state, compacted.state) == ("completed", "completed")
        assert [one.kind for one in prompts(old)] == ["prompt", "prompt"]
        assert [one.kind for one in prompts(stage.executor)] == ["compact"]
        assert stage.executor is not old
        assert old.exited.is_set()


async def test_a_new_executor_that_cannot_compact_fails_the_turn(stage: Stage) -> None:
    """It is not replaced by another like it again and again."""
    stage.host.abilities = ()
    async with stage.hutchd():
        session = await stage.open(agent="claude")

        ended = await stage.ended(await stage.services.turns.compact_session(stage.me, m.CompactSession(session.id)))

        assert (ended.state, ended.reason) == ("failed", "unsupported")
        assert len(stage.host.started) == 1


# ------------------------------------------------------------ handing over


async def die_before_accepting(stage: Stage, session: m.Session, prompt: str) -> m.Turn:
    """Submit a prompt to an idle executor that gets it and dies without an answer."""
    executor = stage.executor
    executor.deaf = True
    turn = await stage.submit(session, prompt)
    await until(lambda: any(one.turn == turn.id for one in prompts(executor)))
    executor.die()
    return turn


async def test_a_prompt_to_an_executor_that_has_just_died_is_handed_to_the_next_one(stage: Stage) -> None:
    """The next executor learns that the prompt may have been accepted; it runs once."""
    async with stage.hutchd():
        session = await stage.open(agent="claude")
        await stage.ended(await stage.submit(session, "first"))

        ended = await stage.ended(await die_before_accepting(stage, session, "second"))
        third = await stage.ended(await stage.submit(session, "third"))

        assert (ended.state, third.state) == ("completed", "completed")
        assert [prompt for _, prompt in stage.host.played] == ["first", "second", "third"]
        assert [one.offered for one in prompts(stage.executor)] == [True, False]
        assert len(stage.host.started) == 2


async def test_a_prompt_is_handed_over_once(stage: Stage) -> None:
    """If the second executor dies the same way, the outcome is unknown."""
    async with stage.hutchd():
        session = await stage.open(agent="claude")
        await stage.ended(await stage.submit(session, "first"))
        first = stage.executor
        stage.host.gate = gate = type(stage.host.gate)()
        turn = await die_before_accepting(stage, session, "second")
        await until(lambda: stage.host.starts == 2)
        stage.host.deaf_prompts = True
        gate.set()
        await until(lambda: stage.executor is not first and any(one.offered for one in prompts(stage.executor)))
        stage.executor.die()
        stage.host.deaf_prompts = False

        ended = await stage.ended(turn)

        assert (ended.state, ended.reason) == ("failed", "outcome_unknown")
        assert [prompt for _, prompt in stage.host.played] == ["first"]


async def test_a_prompt_is_not_handed_over_beside_processes_that_may_still_run(stage: Stage) -> None:
    """A quarantined executor may still run its prompt."""
    async with stage.hutchd():
        session = await stage.open(agent="claude")
        await stage.ended(await stage.submit(session, "first"))
        stage.host.unkillable = True

        ended = await stage.ended(await die_before_accepting(stage, session, "second"))

        assert (ended.state, ended.reason) == ("failed", "outcome_unknown")


async def test_an_agent_that_shows_nothing_gets_no_prompt_twice(stage: Stage) -> None:
    """The script runner has no transcript, so the outcome is unknown, as nobody can tell."""
    async with stage.hutchd():
        session = await stage.open(agent="script")
        await stage.ended(await stage.submit(session, "first"))

        ended = await stage.ended(await die_before_accepting(stage, session, "second"))

        assert (ended.state, ended.reason) == ("failed", "outcome_unknown")
        assert [prompt for _, prompt in stage.host.played] == ["first"]


async def unanswered(stage: Stage) -> tuple[m.Session, FakeExecutor, m.Turn]:
    """Play a turn; then submit a prompt that the executor gets and does not answer."""
    session = await stage.open(agent="claude")
    await stage.ended(await stage.submit(session, "first"))
    executor = stage.executor
    executor.deaf = True
    turn = await stage.submit(session, "second")
    await until(lambda: any(one.turn == turn.id for one in prompts(executor)))
    return session, executor, turn


async def test_an_offered_prompt_survives_a_restart(stage: Stage) -> None:
    """The next hutchd offers it as well, also if the first one had not noticed that the executor was gone."""
    stage.host.abilities = ("offered",)
    async with stage.hutchd():
        _, executor, turn = await unanswered(stage)
    executor.die()

    async with stage.hutchd():
        ended = await stage.ended(turn)

        assert ended.state == "completed"
        assert [one.offered for one in prompts(stage.executor)] == [True]
        assert [prompt for _, prompt in stage.host.played] == ["first", "second"]


async def leave_in_spool(executor: FakeExecutor, turn: m.Turn, *events: tuple[EventKind, msgspec.Struct]) -> None:
    """Leave events of a turn in the spool of an executor."""
    assert executor.prepared is not None
    spool = Path(executor.prepared.spool)
    known = len(executor.events)
    for number, (kind, data) in enumerate(events, known + 1):
        raw = Raw(msgspec.json.encode(data))
        executor.events.append(ReportedEvent(number, to_wire(now_ms()), kind, raw, turn.id))
    executor.host.spools[str(spool)] = (executor.prepared.session, executor.events[known:])
    (spool / "x.spool").touch()


@pytest.mark.parametrize("ended", [True, False])
async def test_a_spool_that_shows_that_the_prompt_was_accepted_settles_the_turn(stage: Stage, ended: bool) -> None:
    """The first executor was away from hutchd when it began: its spool is read before the prompt can run again."""
    async with stage.hutchd():
        session, executor, turn = await unanswered(stage)
        end = TurnEnded("completed", "completed", "Done.", result="It is done.", agent_session="conversation-1")
        started = TurnStarted("second", 2)
        events: list[tuple[EventKind, msgspec.Struct]] = [("turn_started", started), ("text", Text("x"))]
        if ended:
            events.append(("turn_ended", end))
        await leave_in_spool(executor, turn, *events)
        executor.die()
        settled = await stage.ended(turn)
        third = await stage.ended(await stage.submit(session, "third"))

        expected = ("completed", "completed") if ended else ("failed", "outcome_unknown")
        assert (settled.state, settled.reason) == expected
        assert third.state == "completed"
        assert [prompt for _, prompt in stage.host.played] == ["first", "third"]
        kinds = [event.kind for event in await stage.events(session) if event.turn == turn.id]
        assert kinds == ["turn_started", "text", "turn_ended"]


@pytest.mark.parametrize("after", [None, "conversation-2"], ids=["cleared", "begun"])
async def test_the_next_prompt_goes_on_from_the_conversation_that_the_spool_names(
    stage: Stage, after: str | None
) -> None:
    """The executor that read the spool was prepared before, for the conversation that the ended turn has left."""
    async with stage.hutchd():
        session = await stage.open(agent="claude")
        await stage.ended(await stage.submit(session, "first"))
        executor = stage.executor
        executor.deaf = True
        if after is None:
            turn = await stage.services.turns.clear_session(stage.me, m.ClearSession(session.id))
        else:
            turn = await stage.submit(session, "second")
        await until(lambda: any(one.turn == turn.id for one in prompts(executor)))
        end = TurnEnded("completed", "completed", "Done.", agent_session=after)
        await leave_in_spool(executor, turn, ("turn_started", TurnStarted("", 2)), ("turn_ended", end))
        executor.die()
        settled = await stage.ended(turn)
        third = await stage.ended(await stage.submit(session, "third"))

        assert (settled.state, third.state) == ("completed", "completed")
        assert stage.executor.prepared is not None
        assert stage.executor.prepared.resume == after


async def test_what_the_first_executor_spooled_of_an_offered_turn_is_kept(stage: Stage) -> None:
    """Its events belong to the turn; the end that it reports does not end a turn that another executor has."""
    async with stage.hutchd():
        session = await stage.open(agent="claude")
        await stage.ended(await stage.submit(session, "first"))
        old = stage.executor
        turn = await die_before_accepting(stage, session, "second")
        await stage.ended(turn)
        await old.report("text", Text("begun"), turn.id)
        await old.report("turn_ended", TurnEnded("failed", "agent_died", "It died."), turn.id)
        row = await stage.store.read(lambda conn: turns.get(conn, turn.id))
        assert row is not None
        assert row.offered_to == old.spec.executor

        left = m.SpooledEvents(session.id, tuple(old.events[-2:]))
        await stage.services.reports.take_left(old.spec.executor, left)

        events = [event for event in await stage.events(session) if event.turn == turn.id]
        assert [event.kind for event in events] == ["turn_started", "text", "turn_ended", "text", "notice"]
        assert b"given to another one" in bytes(events[-1].data)
        assert (await stage.turn(turn)).state == "completed"


# ------------------------------------------------------------ any order of deaths


class Fates:
    """Decides the fate of each attempt to run a prompt, and keeps what the agent got, as its transcripts do."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.got: dict[str, int] = {}
        """How often the agent got a prompt, by turn."""
        self.attempts: dict[str, list[str]] = defaultdict(list)

    async def answer(self, executor: FakeExecutor, prompt: m.ExecutePrompt) -> m.Accepted | None:
        """Let the attempt happen. Return None to let the executor play it."""
        fates = ["runs", "runs", "refuses", "dies unseen", "dies seen", "hangs up", "dies running"]
        fate = self.random.choice(fates)
        if prompt.offered and self.got.get(prompt.turn):
            fate = "knows it"
        self.attempts[prompt.turn].append(fate)
        match fate:
            case "refuses":
                return m.Accepted(accepted=False, reason="leaving")
            case "dies unseen" | "dies seen":
                self.got[prompt.turn] = self.got.get(prompt.turn, 0) + (fate == "dies seen")
                executor.die()
                await anyio.sleep_forever()
            case "hangs up":
                executor.host.tasks.start_soon(executor.dial)
                executor.hang_up()
        return None

    async def play(self, executor: FakeExecutor, prompt: m.ExecutePrompt) -> TurnEnded | None:
        """Play a prompt as the attempt's fate says."""
        fate = self.attempts[prompt.turn][-1]
        if fate == "knows it":
            return TurnEnded("failed", "outcome_unknown", "The agent may have got it.")
        self.got[prompt.turn] = self.got.get(prompt.turn, 0) + 1
        if fate == "dies running":
            executor.die()
            return None
        return TurnEnded("completed", "done", "Done.", agent_session="conversation-1")


@pytest.mark.parametrize(
    "count",
    [pytest.param(25, id="some"), pytest.param(1000, id="many", marks=[pytest.mark.full, pytest.mark.timeout(900)])],
)
async def test_whatever_executors_die_of_no_agent_gets_a_prompt_twice(stage: Stage, count: int) -> None:
    """Every turn ends. A prompt that no agent got had two executors that died of it, or three that refused it."""
    print(f"HUTCH_TEST_SEED={seed()}")
    fates = Fates(Random(seed()))
    stage.host.answer_prompt, stage.host.play = fates.answer, fates.play
    stage.settings = msgspec.structs.replace(
        stage.settings, executors=msgspec.structs.replace(stage.settings.executors, start_attempts=1_000_000)
    )
    async with stage.hutchd():
        session = await stage.open(agent="claude")
        for number in range(count):
            ended = await stage.ended(await stage.submit(session, str(number)))
            attempts, got = fates.attempts[ended.id], fates.got.get(ended.id, 0)

            assert got <= 1, attempts
            assert (ended.state == "completed") == (attempts[-1] in ("runs", "hangs up")), (ended, attempts)
            if not got:
                deaths = attempts.count("dies unseen")
                assert deaths == 2 or attempts.count("refuses") == 3, (ended, attempts)
