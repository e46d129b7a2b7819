"""Permission requests and the queue, with the script runner: presence, races, order."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from hutch_client.client import HutchClient
from hutch_shared import messages as m
from hutch_shared.errors import HutchError, Reason
from tests.system.host import Host, host
from tests.system.log import allow, log_of, without_gaps

pytestmark = pytest.mark.system

ASK = {"tool": "Bash", "input": {"command": "touch made"}, "run": True}


@pytest.fixture(scope="module")
async def script_host() -> AsyncIterator[Host]:
    """A host on which a client counts as present only for a moment after it left."""
    async with host("[executors]\nspares = 0\n[permissions]\nreturn_grace = 0.2\n") as made:
        yield made


@pytest.fixture
async def hutch(script_host: Host) -> AsyncIterator[HutchClient]:
    """A client of the host."""
    async with script_host.client() as client:
        yield client


@pytest.mark.parametrize(("policy", "state"), [("deny", "completed"), ("stop", "stopped")])
async def test_the_session_says_what_happens_when_nobody_is_there(
    script_host: Host, hutch: HutchClient, policy: m.WhenNobody, state: str
) -> None:
    """The call is denied, and the turn goes on or stops. No command runs, and the record has the reason."""
    session = await script_host.script(hutch, [ASK], when_nobody=policy)
    async with log_of(hutch, session, answers=False) as log:
        end = await log.ended(await hutch.submit_prompt(session.id, "go"))
    (asked,) = await hutch.list_permissions(m.ListPermissions(session.id, None))

    assert end.state == state
    assert (asked.state, asked.settled_by) == ("denied", "nobody")
    assert not Path(session.cwd, "made").exists()


async def test_a_request_is_denied_when_the_last_client_leaves(script_host: Host, hutch: HutchClient) -> None:
    """The request waits as long as a client that can decide is connected."""
    session = await script_host.script(hutch, [ASK], when_nobody="deny")
    async with log_of(hutch, session, answers=False) as log:
        async with script_host.client() as person, log_of(person, session) as watched:
            turn = await hutch.submit_prompt(session.id, "go")
            await watched.asked()
            waiting = await hutch.list_permissions(m.ListPermissions(session.id))
        end = await log.ended(turn)

        assert [one.state for one in waiting] == ["pending"]
        assert end.state == "completed"
        assert [one.state for one in log.of("permission_settled")] == ["denied"]


async def test_the_first_of_many_decisions_stands(script_host: Host, hutch: HutchClient) -> None:
    """The other clients get the settled request."""
    session = await script_host.script(hutch, [ASK])
    outcomes: list[m.Permission | HutchError] = []

    async def answer(asked: m.Permission, number: int) -> None:
        async with script_host.client() as client:
            decision: m.Decision = "allow" if number % 2 else "deny"
            try:
                outcomes.append(await client.answer_permission(m.AnswerPermission(asked.id, decision)))
            except HutchError as error:
                outcomes.append(error)

    async with log_of(hutch, session) as log:
        turn = await hutch.submit_prompt(session.id, "go")
        asked = await log.asked()
        async with anyio.create_task_group() as group:
            for number in range(8):
                group.start_soon(answer, asked, number)
        await log.ended(turn)

    (won,) = [one for one in outcomes if isinstance(one, m.Permission)]
    lost = [one for one in outcomes if isinstance(one, HutchError)]
    assert len(lost) == 7
    assert {one.reason for one in lost} == {Reason.ALREADY_SETTLED}
    assert [one.state for one in log.of("permission_settled")] == [won.state]
    assert Path(session.cwd, "made").exists() == (won.state == "allowed")


async def test_an_interrupting_denial_stops_the_turn(script_host: Host, hutch: HutchClient) -> None:
    """`hutch deny --stop` denies the call and ends its turn."""
    session = await script_host.script(hutch, [ASK, {"text": "went on"}])
    async with log_of(hutch, session) as log:
        turn = await hutch.submit_prompt(session.id, "go")
        await log.asked()
        await script_host.hutch("deny", session.name, "--stop", "-m", "no more")
        end = await log.ended(turn)

        assert end.state == "stopped"
        assert log.of("text") == []


async def test_a_decision_for_the_session_holds_for_the_session(script_host: Host, hutch: HutchClient) -> None:
    """The rule allows the same call in this session and in no other one."""
    session = await script_host.script(hutch, [ASK, ASK])
    other = await script_host.script(hutch, [ASK])
    async with log_of(hutch, session) as log:
        turn = await hutch.submit_prompt(session.id, "go")
        asked = await log.asked()
        await script_host.hutch("approve", asked.id, "--session")
        end = await log.ended(turn)

        assert end.state == "completed"
        assert len(log.of("permission_asked")) == 1
        assert len(log.of("tool_result")) == 2
    async with log_of(hutch, other) as log:
        await log.play(other, "go", allow)

        assert len(log.of("permission_asked")) == 1


@pytest.mark.parametrize(
    ("mode", "rules", "asked"),
    [
        ("ask", m.Rules(), True),
        ("ask", m.Rules(allow=("Bash",)), False),
        ("bypass", m.Rules(), False),
        ("bypass", m.Rules(deny=("Bash",)), None),
    ],
    ids=["asks", "allowed by a rule", "bypass", "denied by a rule"],
)
async def test_mode_and_rules_decide_without_a_request(
    script_host: Host, hutch: HutchClient, mode: m.PermissionMode, rules: m.Rules, asked: bool | None
) -> None:
    """A denied call makes no request and does not run."""
    session = await script_host.script(hutch, [ASK], permission_mode=mode, rules=rules)
    async with log_of(hutch, session) as log:
        await log.play(session, "go", allow)

        assert bool(log.of("permission_asked")) is bool(asked)
        assert Path(session.cwd, "made").exists() is (asked is not None)


async def test_queued_prompts_run_in_order_and_can_be_cancelled(script_host: Host, hutch: HutchClient) -> None:
    """Turns run one at a time; a cancelled one never runs."""
    lines: list[dict[str, Any]] = [{"wait_file": "go"}, {"text": "first"}, {"turn": True}, {"text": "later"}]
    session = await script_host.script(hutch, lines)
    async with log_of(hutch, session) as log:
        turns = [await hutch.submit_prompt(session.id, str(number)) for number in range(3)]
        await log.until(lambda log: log.of("turn_started"))
        shown = await script_host.hutch("ps", "-o", "jsonl")
        cancelled: m.Turn = await hutch.call("cancel_turn", m.TurnRef(turns[1].id))
        with pytest.raises(HutchError) as refused:
            await hutch.call("cancel_turn", m.TurnRef(turns[0].id))
        Path(session.cwd, "go").touch()
        await log.ended(turns[2])

        mine = next(one for one in map(json.loads, shown.out.splitlines()) if one["id"] == session.id)
        assert (mine["active_state"], mine["queued"]) == ("running", 2)
        assert (cancelled.state, refused.value.reason) == ("stopped", Reason.WRONG_STATE)
        assert [one.prompt for one in log.of("turn_started")] == ["0", "2"]
        assert [one.state for one in await hutch.list_turns(session.id)] == ["completed", "stopped", "completed"]


async def test_a_prompt_sent_twice_runs_once(script_host: Host, hutch: HutchClient) -> None:
    """The same key means the same turn, even after it ended; other content under the same key is refused."""
    session = await script_host.script(hutch, [{"text": "once"}])
    prompt = m.SubmitPrompt(session.id, "go", idempotency_key="a key")
    async with log_of(hutch, session) as log:
        first: m.Turn = await hutch.call("submit_prompt", prompt)
        await log.ended(first)
        second: m.Turn = await hutch.call("submit_prompt", prompt)
        with pytest.raises(HutchError) as refused:
            await hutch.call("submit_prompt", m.SubmitPrompt(session.id, "other", idempotency_key="a key"))

        assert second.id == first.id
        assert second.state == "completed"
        assert refused.value.reason is Reason.CONFLICT
        assert len(await hutch.list_turns(session.id)) == 1


async def test_an_executor_that_ends_during_a_turn_fails_it(script_host: Host, hutch: HutchClient) -> None:
    """Its reports stay, and the prompt is not run again. The next prompt gets a new executor."""
    lines: list[dict[str, Any]] = [
        {"text": "so far"},
        {"wait_file": "go"},
        {"exit": 3},
        {"turn": True},
        {"text": "fresh"},
    ]
    session = await script_host.script(hutch, lines)
    async with log_of(hutch, session) as log:
        turn = await hutch.submit_prompt(session.id, "go")
        await log.until(lambda log: log.of("text"))
        Path(session.cwd, "go").touch()
        end = await log.ended(turn)
        again = await log.play(session, "again")

        assert (end.state, end.reason) == ("failed", "executor_lost")
        assert [one.text for one in log.of("text")] == ["so far", "fresh"]
        assert again.state == "completed"
        assert without_gaps(log.events)
