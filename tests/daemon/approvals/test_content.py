"""A decision is recorded with its content: who, for what scope, with which rule, and the input that may run."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from hutch_client.console import Console
from hutch_shared import messages as m
from hutch_shared.digest import input_digest
from hutch_shared.errors import HutchError, Reason
from hutch_shared.events import DATA_OF_KIND, PermissionSettled, ToolCallSeen, TurnEnded
from tests.daemon.approvals.test_approvals import Asks, command
from tests.fakes.executors import FakeExecutor
from tests.fakes.stage import Stage


class _Seen(Asks):
    """A play that reports each call before it asks, as the CLI does."""

    async def __call__(self, executor: FakeExecutor, prompt: m.ExecutePrompt) -> TurnEnded:
        for call in self.calls:
            await executor.report("tool_call", ToolCallSeen(msgspec.to_builtins(call)), prompt.turn)
        return await super().__call__(executor, prompt)


async def recorded(stage: Stage, session: m.Session, *kinds: str) -> list[Any]:
    """Return the data of a session's events of these kinds, in order."""
    events = [event for event in await stage.events(session) if event.kind in kinds]
    return [msgspec.json.decode(event.data, type=DATA_OF_KIND[event.kind]) for event in events]


async def audit_of(stage: Stage) -> m.AuditEntry:
    """Return the only line of the audit about a permission."""
    page = await stage.services.history.read_audit(stage.me, m.ReadAudit(action="permission"))
    (entry,) = page.entries
    return entry


async def test_an_edited_call_is_recorded_as_what_runs(stage: Stage) -> None:
    """The settlement has the edited input and its digest; then the call's own event comes again, with who edited it."""
    stage.host.play = _Seen(command("make"))
    async with stage.hutchd():
        session = await stage.open()
        turn = await stage.submit(session)
        await stage.answer(await stage.pending(), "allow", updated_input={"command": "make -n"})
        await stage.ended(turn)

        first, settled, edited = await recorded(stage, session, "tool_call", "permission_settled")
        entry = await audit_of(stage)
        digest = input_digest("Bash", {"command": "make -n"})
        assert (first.edited_by, first.call["command"]) == (None, "make")
        assert settled == PermissionSettled(
            settled.permission,
            "allowed",
            str(stage.me),
            scope="once",
            call_id="c-1",
            digest=digest,
            updated_input={"command": "make -n"},
        )
        assert (edited.edited_by, edited.call["command"], edited.call["call_id"]) == (str(stage.me), "make -n", "c-1")
        assert (entry.digest, entry.details["edited"], entry.details["input"]) == (
            digest,
            "yes",
            '{"command":"make -n"}',
        )


async def test_a_reader_sees_the_edited_call(stage: Stage) -> None:
    """The console shows the edit after the decision, and its result belongs to the edited call."""
    stage.host.play = _Seen(command("rm -r build"))
    async with stage.hutchd():
        session = await stage.open()
        turn = await stage.submit(session)
        await stage.answer(await stage.pending(), "allow", updated_input={"command": "rm -r build/tmp"})
        await stage.ended(turn)
        console = Console()
        lines = "".join(piece.text for event in await stage.events(session) for piece in console.feed(event)).split(
            "\n"
        )

        at = lines.index(f"  ✓ allowed by {stage.me}")
        assert lines[at + 1 : at + 3] == [
            f"  ✎ edited by {stage.me}; this is what may run:",
            "● run rm -r build/tmp",
        ]


@pytest.mark.parametrize(("scope", "words"), [("session", "in this session"), ("always", "in this project")])
async def test_a_rule_that_a_decision_adds_is_recorded(stage: Stage, scope: m.Scope, words: str) -> None:
    """Event, record and audit name the rule and its scope, and so does the console."""
    stage.host.play = Asks(command("git fetch origin"))
    async with stage.hutchd():
        session = await stage.open()
        turn = await stage.submit(session)
        settled = await stage.answer(await stage.pending(), "allow", scope=scope, rule="Bash(git fetch:*)")
        await stage.ended(turn)

        (told,) = await recorded(stage, session, "permission_settled")
        entry = await audit_of(stage)
        event = next(one for one in await stage.events(session) if one.kind == "permission_settled")
        shown = "".join(piece.text for piece in Console().feed(event))
        assert (told.scope, told.rule) == (scope, "Bash(git fetch:*)")
        assert (settled.scope, settled.settled_rule) == (scope, "Bash(git fetch:*)")
        assert (entry.rule, entry.details["scope"]) == ("Bash(git fetch:*)", scope)
        assert f"by {stage.me}, {words} from now on: Bash(git fetch:*)" in shown


async def test_answers_are_recorded(stage: Stage) -> None:
    """The event, the audit and the console have them by the questions' texts."""
    call = m.ToolCall("c-1", "question", "AskUserQuestion", {"questions": []})
    stage.host.play = Asks(call, kind="question", questions=(m.Question("Which?", "W", several=True),))
    async with stage.hutchd():
        session = await stage.open()
        turn = await stage.submit(session)
        await stage.answer(await stage.pending(), "answer", answers={"W": ["a", "b"]})
        await stage.ended(turn)

        (told,) = await recorded(stage, session, "permission_settled")
        event = next(one for one in await stage.events(session) if one.kind == "permission_settled")
        shown = "".join(piece.text for piece in Console().feed(event))
        assert told.answers == {"Which?": ["a", "b"]}
        assert json.loads((await audit_of(stage)).details["answers"]) == {"Which?": ["a", "b"]}
        assert "    Which? → a, b\n" in shown


async def test_an_input_that_nobody_changed_is_not_edited(stage: Stage) -> None:
    """A user may open the editor and save the input as it was."""
    asks = stage.host.play = Asks(command("make"))
    async with stage.hutchd():
        session = await stage.open()
        turn = await stage.submit(session)
        settled = await stage.answer(await stage.pending(), "allow", updated_input={"command": "make"})
        await stage.ended(turn)

        assert settled.updated_input is None
        assert await recorded(stage, session, "tool_call") == []
        assert asks.decided["c-1"].input == {"command": "make"}


async def test_a_long_edited_input_is_whole_in_its_own_event_alone(stage: Stage) -> None:
    """The settlement stays small, and the line of the audit too."""
    long = f"make {'x' * 9_000}; true {'y' * 60_000}"
    stage.host.play = Asks(command("make"))
    async with stage.hutchd():
        session = await stage.open()
        turn = await stage.submit(session)
        await stage.answer(await stage.pending(), "allow", updated_input={"command": long})
        await stage.ended(turn)

        settled, edited = await recorded(stage, session, "permission_settled", "tool_call")
        assert (settled.updated_input, settled.digest) == (None, input_digest("Bash", {"command": long}))
        assert edited.call["command"] == long
        assert len((await audit_of(stage)).details["input"]) == 2001


async def test_a_denied_call_has_no_input_that_ran(stage: Stage) -> None:
    """The audit has the input that was denied; the event names its call, and no digest of what may run."""
    stage.host.play = Asks(command("make"))
    async with stage.hutchd():
        session = await stage.open()
        turn = await stage.submit(session)
        await stage.answer(await stage.pending(), "deny", message="No.")
        await stage.ended(turn)

        (told,) = await recorded(stage, session, "permission_settled")
        assert (told.call_id, told.digest, told.message) == ("c-1", None, "No.")
        assert (await audit_of(stage)).details["input"] == '{"command":"make"}'


@pytest.mark.parametrize(
    "decision",
    [
        {"decision": "allow", "updated_input": {"command": "echo sk-live-0123456789abcdef"}},
        {"decision": "deny", "message": "use sk-live-0123456789abcdef"},
    ],
)
async def test_a_decision_with_a_stored_key_is_refused(stage: Stage, decision: dict[str, Any]) -> None:
    """It would be stored, shown and given to the agent."""
    stage.host.play = Asks(command("make"))
    async with stage.hutchd():
        session = await stage.open()
        await stage.submit(session)
        asked = await stage.pending()
        stage.known.learn("k-1", "sk-live-0123456789abcdef")

        with pytest.raises(HutchError) as refused:
            await stage.answer(asked, **decision)

        assert refused.value.reason is Reason.INVALID_PARAMS
        assert "sk-live" not in refused.value.message
        assert (await stage.pending()).id == asked.id


async def test_an_edited_input_too_deep_for_clients_is_refused(stage: Stage) -> None:
    """A request that no client can read would hide all others from the user."""
    deep: dict[str, Any] = {}
    for _ in range(58):
        deep = {"in": deep}
    stage.host.play = Asks(m.ToolCall("c-1", "other", "Frob", {"a": 1}))
    async with stage.hutchd():
        await stage.submit(await stage.open())
        asked = await stage.pending()

        with pytest.raises(HutchError) as refused:
            await stage.answer(asked, "allow", updated_input=deep)

        assert refused.value.reason is Reason.INVALID_PARAMS
        assert (await stage.pending()).id == asked.id
