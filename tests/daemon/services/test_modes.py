"""The agent enters the mode `plan` by itself: the session follows, and leaves it when the plan is approved."""

from __future__ import annotations

from typing import Any

import pytest

from hutch_shared import messages as m
from hutch_shared.events import TurnEnded
from hutch_shared.vocabulary import to_call
from tests.fakes.executors import FakeExecutor, say_done
from tests.fakes.stage import Stage

ENTER: tuple[str, dict[str, Any]] = ("EnterPlanMode", {})
TOUCH = ("Bash", {"command": "touch bash-in-plan.txt"})
WRITE = ("Write", {"file_path": "/proj/ep.txt", "content": "x"})
RULES = m.Rules(allow=("EnterPlanMode", "Edit", "Bash(touch:*)"))


def calls_of(*calls: tuple[str, dict[str, Any]]) -> Any:
    """Return a play that makes these calls one after the other, then an approved plan, then the first call again."""

    async def play(executor: FakeExecutor, prompt: m.ExecutePrompt) -> TurnEnded:
        for number, (tool, given) in enumerate(calls):
            kind: m.PermissionKind = "plan" if tool == "ExitPlanMode" else "tool"
            await executor.ask(to_call(tool, given, f"c-{number}", "/proj"), kind=kind, plan=given.get("plan"))
        return TurnEnded("completed", "done", "Done.")

    return play


async def mode(stage: Stage, session: m.Session) -> str:
    """Return the session's mode."""
    return (await stage.services.sessions.get_session(stage.me, m.SessionRef(session.id))).permission_mode


@pytest.mark.parametrize("before", ["ask", "accept_edits", "bypass"])
async def test_the_session_follows_an_agent_into_plan_mode(stage: Stage, before: m.PermissionMode) -> None:
    """An allowed EnterPlanMode changes the mode with its record: no rule allows a change until the plan is approved."""
    plan = ("ExitPlanMode", {"plan": "# Shear"})
    stage.host.play = calls_of(ENTER, TOUCH, WRITE, plan, TOUCH)
    async with stage.hutchd():
        session = await stage.open(agent="claude", rules=RULES, permission_mode=before)
        turn = await stage.submit(session)
        asked = []
        for _ in range(2):
            pending = await stage.pending()
            asked.append((pending.call.agent_tool, pending.why))
            assert await mode(stage, session) == "plan"
            await stage.answer(pending, "deny")
        pending = await stage.pending()
        assert (pending.kind, pending.plan) == ("plan", "# Shear")
        await stage.answer(pending, "allow")
        await stage.ended(turn)

        assert [tool for tool, _ in asked] == ["Bash", "Write"]
        assert all("in the mode plan" in why.lower() for _, why in asked)
        assert await mode(stage, session) == before
        notices = [event.data for event in await stage.events(session) if b'"permission_mode"' in bytes(event.data)]
        assert len(notices) == 2
        assert b"set by the agent" in bytes(notices[0])
        page = await stage.services.history.read_audit(stage.me, m.ReadAudit(action="set_permission_mode"))
        assert (page.entries[0].actor, page.entries[0].outcome) == ("the agent", "plan")


async def test_a_user_may_let_the_agent_plan_or_not(stage: Stage) -> None:
    """Without a rule the user decides. A denial changes nothing."""
    stage.host.play = calls_of(ENTER, ENTER)
    async with stage.hutchd():
        session = await stage.open(agent="claude")
        turn = await stage.submit(session)
        await stage.answer(await stage.pending(), "deny")
        denied = await mode(stage, session)
        await stage.answer(await stage.pending(), "allow")
        await stage.ended(turn)

        assert (denied, await mode(stage, session)) == ("ask", "plan")


async def test_a_denied_plan_leaves_the_session_in_plan_mode(stage: Stage) -> None:
    """So does the end of the turn; the next executor is prepared in the mode."""
    stage.host.play = calls_of(ENTER, ("ExitPlanMode", {"plan": "# Shear"}))
    async with stage.hutchd():
        session = await stage.open(agent="claude", rules=RULES)
        turn = await stage.submit(session)
        await stage.answer(await stage.pending(), "deny")
        await stage.ended(turn)
        stage.executor.die()
        stage.host.play = say_done
        await stage.ended(await stage.submit(session, "go on"))

        assert await mode(stage, session) == "plan"
        assert stage.executor.prepared is not None
        assert stage.executor.prepared.permission_mode == "plan"


async def test_an_agent_that_plans_may_enter_plan_mode_again(stage: Stage) -> None:
    """That changes nothing, so a rule that allows it counts in the mode `plan` too: the user is not asked."""
    stage.host.play = calls_of(ENTER, ENTER)
    async with stage.hutchd():
        session = await stage.open(agent="claude", rules=RULES)
        await stage.ended(await stage.submit(session))

        assert "permission_asked" not in await stage.kinds(session)
        assert await mode(stage, session) == "plan"


async def test_an_unattended_agent_stays_unattended(stage: Stage) -> None:
    """No rule lets it into the mode `plan`, which reads without a rule and waits for a user."""
    stage.host.play = calls_of(ENTER, ("Read", {"file_path": "/proj/secret"}))
    async with stage.hutchd():
        session = await stage.open(agent="claude", rules=RULES, permission_mode="unattended")
        await stage.ended(await stage.submit(session))

        page = await stage.services.history.read_audit(stage.me, m.ReadAudit(action="permission"))
        assert [line.outcome for line in page.entries] == ["denied", "denied"]
        assert await mode(stage, session) == "unattended"
