"""The policy in turns of Claude: requests wait for the user, and only the judged input runs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest

from hutch_client.client import HutchClient
from hutch_shared import messages as m
from hutch_shared.digest import input_digest
from hutch_shared.errors import HutchError, Reason
from tests.rehearsal import Model
from tests.system.host import Host
from tests.system.log import Log, allow, log_of
from tests.system.policing import (
    PLAN_FILE,
    Call,
    asked_of,
    audit_of,
    bash,
    deny,
    files_in,
    pending_of,
    policed_claude,
    results_of,
    told,
    what,
)

pytestmark = [pytest.mark.system, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
async def claude_host(model: Model) -> AsyncIterator[Host]:
    """A host without a policy file, whose model obeys."""
    async with policed_claude(model, double=True) as made:
        yield made


async def test_parallel_calls_are_decided_in_any_order(claude_host: Host, hutch: HutchClient) -> None:
    """Each call has its own request, and a decision covers only that request."""
    session = await claude_host.claude(hutch, "parallel", "ask")
    commands = [f"cat {number}" for number in range(4)]
    for number in range(4):
        Path(session.cwd, str(number)).write_text(f"text {number}\n")
    async with log_of(hutch, session) as log:
        turn = await hutch.submit_prompt(session.id, told([bash(command) for command in commands]))
        waiting = {what(asked): asked for asked in await pending_of(hutch, session, 4)}
        for command in reversed(commands):
            answer = deny if command == "cat 1" else allow
            await hutch.answer_permission(answer(waiting[command]))
        end = await log.ended(turn)

        assert end.state == "completed", end
        assert results_of(log) == {command: command != "cat 1" for command in commands}
        texts = [result.text.strip() for result in log.of("tool_result") if not result.is_error]
        assert sorted(texts) == ["text 0", "text 2", "text 3"]


async def test_an_edited_input_is_judged_and_replaces_the_requested_one(claude_host: Host, hutch: HutchClient) -> None:
    """The user edits with `hutch approve --edit`; an edit that a rule denies leaves the request pending."""
    session = await claude_host.claude(hutch, "edited", "ask", rules=m.Rules(deny=("Bash(rm:*)",)))
    async with log_of(hutch, session) as log:
        turn = await hutch.submit_prompt(session.id, told([bash("touch asked")]))
        asked = await log.asked()
        refused = await claude_host.hutch("approve", asked.id, "--edit", env={"EDITOR": "sed -i s/touch/rm/"}, code=4)
        still = await hutch.list_permissions(m.ListPermissions(session.id))
        await claude_host.hutch("approve", asked.id, "--edit", env={"EDITOR": "sed -i s/asked/judged/"})
        end = await log.ended(turn)
        logs = (await claude_host.hutch("logs", session.id)).err
        listed = await claude_host.hutch("pending", session.id, "--all")

        (result,) = log.of("tool_result")
        (line,) = await audit_of(hutch, session, action="permission")
        (_, edited), (settled,) = log.of("tool_call"), log.of("permission_settled")
        assert (edited.call["command"], edited.edited_by) == ("touch judged", settled.by)
        assert settled.digest == result.digest
        assert "✎ edited by" in logs
        assert "● run touch judged" in logs
        assert "touch judged (edited)" in listed.out
        assert "Bash(rm:*)" in refused.err
        assert [one.id for one in still] == [asked.id]
        assert end.state == "completed", end
        assert files_in(session) == {"judged"}
        assert line.digest == result.digest != asked.digest
        assert result.digest == input_digest("Bash", {**asked.call.input, "command": "touch judged"})


async def test_a_denial_gives_a_message_or_stops_the_turn(claude_host: Host, hutch: HutchClient) -> None:
    """`hutch deny -m` reaches the model, which goes on; `--stop` ends the turn."""
    session = await claude_host.claude(hutch, "refused", "ask")
    async with log_of(hutch, session) as log:
        turn = await hutch.submit_prompt(session.id, told([bash("touch one")], [bash("touch two")], [bash("true")]))
        await claude_host.hutch("deny", (await log.asked()).id, "-m", "not on a Sunday")
        second = await log.asked()
        heard = log.of("tool_result")[0].text
        await claude_host.hutch("deny", second.id, "--stop")
        end = await log.ended(turn)

        assert "not on a Sunday" in heard
        assert end.state == "stopped"
        assert asked_of(log) == ["touch one", "touch two"]
        assert files_in(session) == set()


async def test_nothing_starts_after_an_interrupt_was_acknowledged(claude_host: Host, hutch: HutchClient) -> None:
    """Pending requests are withdrawn; a late decision is refused with that reason."""
    session = await claude_host.claude(hutch, "interrupted", "ask")
    async with log_of(hutch, session) as log:
        turn = await hutch.submit_prompt(session.id, told([bash("touch one"), bash("touch two")]))
        asked = await log.asked()
        await hutch.interrupt_turn(session.id)
        end = await log.ended(turn)
        with pytest.raises(HutchError) as late:
            await hutch.answer_permission(allow(asked))

        assert end.state == "stopped"
        assert late.value.reason is Reason.ALREADY_SETTLED
        assert late.value.details["permission"]["state"] == "withdrawn"
        assert files_in(session) == set()


async def test_the_mode_changes_during_a_turn_and_is_recorded(claude_host: Host, hutch: HutchClient) -> None:
    """It applies to the call that waits and to the next one. The event and the audit name the user."""
    session = await claude_host.claude(hutch, "changed", "ask")
    async with log_of(hutch, session) as log:
        turn = await hutch.submit_prompt(session.id, told([bash("touch one")], [bash("touch two")]))
        asked = await log.asked()
        listed = await claude_host.hutch("ps", "-o", "json")
        inspected = await claude_host.hutch("inspect", session.id, "-o", "json")
        await claude_host.hutch("mode", session.id, "bypass")
        end = await log.ended(turn)

        (line,) = await audit_of(hutch, session, action="set_permission_mode")
        mine = next(one for one in listed.json if one["id"] == session.id)
        assert (mine["active_state"], mine["pending"]) == ("awaiting_permission", 1)
        assert inspected.json["all_turns"][-1]["state"] == "awaiting_permission"
        (settled,) = log.of("permission_settled")
        assert (settled.permission, settled.state, settled.by) == (asked.id, "allowed", "mode bypass")
        assert end.state == "completed", end
        assert asked_of(log) == ["touch one"]
        assert files_in(session) == {"one", "two"}
        assert (line.outcome, line.details) == ("bypass", {"from": "ask", "to": "bypass"})
        assert _modes(log) == [("ask", "bypass")]


def _modes(log: Log) -> list[tuple[str, str]]:
    notices = [one.details for one in log.of("notice") if one.word == "permission_mode"]
    return [(one["from"], one["to"]) for one in notices]


async def test_an_approved_plan_ends_planning(claude_host: Host, hutch: HutchClient) -> None:
    """The mode before planning is restored and recorded: the next edit is not asked about."""
    session = await claude_host.claude(hutch, "planned", "accept_edits")
    plan: Call = ("Write", {"file_path": PLAN_FILE, "content": "# Make it"})
    write: Call = ("Write", {"file_path": f"{session.cwd}/made", "content": "x"})
    async with log_of(hutch, session) as log:
        await claude_host.hutch("mode", session.id, "plan")
        turn = await hutch.submit_prompt(session.id, told([plan], [("ExitPlanMode", {})], [write]))
        asked = await log.asked()
        await claude_host.hutch("approve", asked.id)
        end = await log.ended(turn)

        lines = await audit_of(hutch, session, action="set_permission_mode")
        assert (asked.kind, asked.plan) == ("plan", "# Make it")
        assert end.state == "completed", end
        assert len(asked_of(log)) == 1
        assert files_in(session) == {"made"}
        assert (await hutch.get_session(session.id)).permission_mode == "accept_edits"
        assert _modes(log) == [("accept_edits", "plan"), ("plan", "accept_edits")]
        assert "approved the plan" in lines[-1].actor


async def test_always_outlives_hutchd_and_stays_in_its_project(claude_host: Host) -> None:
    """`always` adds the narrow rule that the request showed."""
    async with claude_host.client() as hutch:
        session = await claude_host.claude(hutch, "always", "ask")
        async with log_of(hutch, session) as log:
            turn = await hutch.submit_prompt(session.id, told([bash("touch made")]))
            asked = await log.asked()
            approved = await claude_host.hutch("approve", asked.id, "--always")
            await log.ended(turn)
    await claude_host.stop()
    await claude_host.start()
    async with claude_host.client() as hutch:
        outcomes: dict[str, list[str]] = {}
        async with anyio.create_task_group() as group:
            for folder in ("always", "elsewhere"):
                group.start_soon(_play_again, claude_host, hutch, folder, outcomes)

    rule = asked.suggestions[0].rule
    assert rule in approved.err
    assert outcomes == {"always": [], "elsewhere": ["touch made"]}


async def _play_again(claude_host: Host, hutch: HutchClient, folder: str, outcomes: dict[str, list[str]]) -> None:
    session = await claude_host.claude(hutch, folder, "ask")
    async with log_of(hutch, session) as log:
        await log.play(session, told([bash("touch made")]), allow)
        outcomes[folder] = asked_of(log)


async def test_an_agent_that_plans_by_itself_changes_nothing_before_its_plan_is_approved(
    claude_host: Host, hutch: HutchClient
) -> None:
    """The session is in the mode `plan` for every reader, and rules that allow changes ask until the approval."""
    rules = m.Rules(allow=("EnterPlanMode", "Edit", "Bash(touch:*)"))
    session = await claude_host.claude(hutch, "planner", "ask", rules=rules)
    write: Call = ("Write", {"file_path": "ep.txt", "content": "x"})
    plan: tuple[list[Call], ...] = ([("Write", {"file_path": PLAN_FILE, "content": "# Shear"})], [("ExitPlanMode", {})])
    async with log_of(hutch, session) as log:
        steps: tuple[list[Call], ...] = (
            [("EnterPlanMode", {})],
            [bash("touch in-plan")],
            [write],
            *plan,
            [bash("touch after")],
        )
        turn = await hutch.submit_prompt(session.id, told(*steps))
        for expected in ("touch in-plan", "ep.txt"):
            asked = await log.asked()
            listed = await claude_host.hutch("ps")
            assert expected in str(asked.call.input)
            await hutch.answer_permission(deny(asked))
        asked = await log.asked()
        shown = (await claude_host.hutch("inspect", session.id, "-o", "json")).json
        await hutch.answer_permission(allow(asked))
        end = await log.ended(turn)
        after = await hutch.get_session(session.id)

        assert (asked.kind, asked.plan) == ("plan", "# Shear")
        assert ", plans" in listed.out
        assert shown["permission_mode"] == "plan"
        assert end.state == "completed", end
        assert after.permission_mode == "ask"
        assert files_in(session) == {"after"}
        words = [notice.word for notice in log.of("notice")]
        assert words.count("permission_mode") == 2
        assert "agent_mode" not in words
