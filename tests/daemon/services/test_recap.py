"""The recap of a conversation that the agent did not keep, and who gets it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import msgspec
import pytest

from hutch_daemon.services.recap import RECAP_LIMIT, read_recap
from hutch_daemon.store import events, sessions
from hutch_daemon.store.records import Tx
from hutch_daemon.store.store import Store
from hutch_shared import messages as m
from hutch_shared.events import EventKind, Text, ToolCallSeen, ToolResult, TurnEnded, TurnKind, TurnStarted
from tests.daemon.store.examples import session_row
from tests.fakes.executors import FakeExecutor
from tests.fakes.stage import Stage
from tests.fakes.stores import new_database

COMMAND = {"call_id": "c-1", "action": "run_command", "agent_tool": "Bash", "input": {}, "command": "make test"}
Told = tuple[EventKind, msgspec.Struct]


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    async with Store.open(new_database(tmp_path / "hutch.db")) as opened:
        yield opened


async def recap_of(store: Store, *told: Told) -> str:
    """Return the recap of a session with these events."""

    def record(tx: Tx) -> None:
        sessions.insert(tx, session_row())
        for kind, data in told:
            events.append(tx, "s-aaaa", None, kind, data)

    await store.write(record)
    return await store.read(partial(read_recap, session="s-aaaa"))


async def test_the_recap_of_a_fork_begins_in_the_session_that_was_forked(store: Store) -> None:
    """What the other session did later is not part of it, nor what came before the fork was cleared."""

    def say(tx: Tx, session: str, at: int, words: str, kind: TurnKind = "prompt") -> None:
        events.append(tx, session, None, "turn_started", TurnStarted(words, 1, kind=kind), at=at)

    def record(tx: Tx) -> None:
        sessions.insert(tx, session_row(created_at=1))
        sessions.insert(tx, session_row("s-bbbb", forked_from="s-aaaa", created_at=20))
        sessions.insert(tx, session_row("s-cccc", forked_from="s-bbbb", created_at=40))
        say(tx, "s-aaaa", 10, "apples")
        say(tx, "s-aaaa", 30, "too late")
        say(tx, "s-bbbb", 30, "pears")
        say(tx, "s-cccc", 50, "plums")

    await store.write(record)
    recap = await store.read(partial(read_recap, session="s-cccc"))
    await store.write(lambda tx: say(tx, "s-bbbb", 35, "", "clear"))
    cleared = await store.read(partial(read_recap, session="s-cccc"))

    assert [line for line in recap.split("\n") if line in ("apples", "too late", "pears", "plums")] == [
        "apples",
        "pears",
        "plums",
    ]
    assert "pears" not in cleared
    assert "plums" in cleared


async def test_a_recap_has_prompts_answers_and_calls_in_their_order(store: Store) -> None:
    """Deltas, thoughts and the work of sub-agents are left out."""
    recap = await recap_of(
        store,
        ("turn_started", TurnStarted("fix it", 1)),
        ("thinking", Text("hidden")),
        ("tool_call", ToolCallSeen(COMMAND)),
        ("tool_result", ToolResult("c-1", "1 failed\nsee above", is_error=True)),
        ("text", Text("by a helper", parent="c-1")),
        ("text_delta", Text("It ")),
        ("text", Text("It is fixed.")),
        ("turn_ended", TurnEnded("completed", "completed", "The agent has finished.")),
        ("turn_started", TurnStarted("go on", 2)),
        ("turn_ended", TurnEnded("failed", "agent_died", "It died.")),
    )

    inner = [line for line in recap.split("\n")[2:-1] if line]
    assert inner == [
        "## The user",
        "fix it",
        "- you used Bash: make test",
        "  which failed: 1 failed see above",
        "## You",
        "It is fixed.",
        "## The user",
        "go on",
        "(This turn ended: failed. It died.)",
    ]


async def test_a_recap_begins_after_the_last_clear(store: Store) -> None:
    """The user wanted the agent to forget what was before it."""
    recap = await recap_of(
        store,
        ("turn_started", TurnStarted("apples", 1)),
        ("turn_started", TurnStarted("", 2, "clear")),
        ("turn_started", TurnStarted("pears", 3)),
    )

    assert "pears" in recap
    assert "apples" not in recap
    assert "left out" not in recap


async def test_a_long_recap_keeps_its_newest_parts(store: Store) -> None:
    """It says that older ones are missing, and stays within its limit whatever the characters are."""
    told: list[Told] = [("text", Text(f"part {number} {'é' * 5000}")) for number in range(1500)]

    recap = await recap_of(store, *told, ("text", Text("x" * 100_000)))

    assert len(recap.encode()) <= RECAP_LIMIT
    assert "Older parts are left out" in recap
    assert "part 1499" in recap
    assert "part 1490" not in recap
    assert "characters …" in recap


async def test_an_agent_that_forgets_again_gets_another_recap(stage: Stage) -> None:
    """Each turn that is not kept is in the recap of the next executor."""

    async def forgets_twice(executor: FakeExecutor, prompt: m.ExecutePrompt) -> TurnEnded:
        kept = prompt.number > 2
        return TurnEnded("completed", "completed", "Done.", agent_session="c" if kept else None, conversation_kept=kept)

    stage.host.play = forgets_twice
    async with stage.hutchd():
        session = await stage.open(agent="claude")
        serving = []
        for prompt in ("apples are red", "pears are green", "what is green?"):
            await stage.ended(await stage.submit(session, prompt))
            played = stage.host.played[-1][0]  # the next executor may have started already
            serving.append(next(one for one in stage.host.started if one.spec.executor == played))

    recaps = [prepared(executor).recap or "" for executor in serving]
    assert [("apples" in recap, "pears" in recap) for recap in recaps] == [(False, False), (True, False), (True, True)]


async def forgets(_: FakeExecutor, prompt: m.ExecutePrompt) -> TurnEnded:
    """Keep the conversation of every turn but the first."""
    kept = prompt.number > 1
    conversation = f"conversation-{prompt.number}" if kept else None
    return TurnEnded("completed", "completed", "Done.", agent_session=conversation, conversation_kept=kept)


def prepared(executor: FakeExecutor) -> m.PrepareSession:
    """Return how an executor was prepared."""
    return next(params for _, params in executor.calls if isinstance(params, m.PrepareSession))


async def test_the_next_turn_begins_a_new_conversation_with_the_recap(stage: Stage) -> None:
    """Another executor gets it, once: the turn after that goes on there."""
    stage.host.play = forgets
    async with stage.hutchd():
        session = await stage.open(agent="claude")
        ended = await stage.ended(await stage.submit(session, "apples are red"))
        first = stage.executor
        for prompt in ("what is red?", "and green?"):
            await stage.ended(await stage.submit(session, prompt))
        second = stage.executor
        row = await stage.services.sessions.get_session(stage.me, m.SessionRef(session.id))

    assert ended.state == "completed"
    assert (prepared(first).recap, first is second) == (None, False)
    assert "apples are red" in (prepared(second).recap or "")
    assert prepared(second).resume is None
    assert [params.prompt for _, params in second.calls if isinstance(params, m.ExecutePrompt)] == [
        "what is red?",
        "and green?",
    ]
    assert row.agent_session == "conversation-3"
