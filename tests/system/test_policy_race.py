"""Two clients decide the same permission requests concurrently, many times."""

from __future__ import annotations

from collections import Counter

import anyio
import pytest

from hutch_client.client import HutchClient
from hutch_shared import messages as m
from hutch_shared.errors import HutchError, Reason
from tests.system.host import Host
from tests.system.log import data
from tests.system.policing import SPARELESS, audit_of, bash, policed, step

pytestmark = [pytest.mark.system, pytest.mark.timeout(240)]

SESSIONS = 8


@pytest.mark.parametrize("questions", [25, pytest.param(125, marks=pytest.mark.full)])
async def test_of_two_decisions_one_stands_and_the_other_is_refused(questions: int) -> None:
    """Each request has one decision, one event and one audit line; the loser gets the settled request."""
    async with policed(None, SPARELESS) as host, host.client() as one, host.client() as two:
        outcomes: dict[str, list[str]] = {}
        async with anyio.create_task_group() as group:
            for number in range(SESSIONS):
                group.start_soon(_race, host, one, two, (number, questions), outcomes)
        lines = await audit_of(one, action="permission")

    assert len(outcomes) == SESSIONS * questions
    assert {tuple(sorted(said)) for said in outcomes.values()} <= {
        ("allowed", "already allowed"),
        ("already denied", "denied"),
    }
    assert Counter(line.subject for line in lines) == dict.fromkeys(outcomes, 1)
    assert all(line.outcome in outcomes[str(line.subject)] for line in lines)


async def _race(
    host: Host, one: HutchClient, two: HutchClient, race: tuple[int, int], outcomes: dict[str, list[str]]
) -> None:
    number, questions = race
    line = {"repeat": {"times": questions, "line": step(bash("true"), run=False)}}
    session = await host.script(one, [line], f"race-{number}")
    async with one.follow(m.FollowEvents(session.id, answers=True)) as follow:
        await one.submit_prompt(session.id, "go")
        while (event := await anext(follow)).kind != "turn_ended":
            if event.kind == "permission_asked":
                asked = data(event).permission["id"]
                said = outcomes[asked] = []
                async with anyio.create_task_group() as group:
                    group.start_soon(_answer, one, m.AnswerPermission(asked, "allow"), said)
                    group.start_soon(_answer, two, m.AnswerPermission(asked, "deny"), said)


async def _answer(client: HutchClient, answer: m.AnswerPermission, said: list[str]) -> None:
    try:
        said.append((await client.answer_permission(answer)).state)
    except HutchError as error:
        if error.reason is not Reason.ALREADY_SETTLED:
            raise
        said.append(f"already {error.details['permission']['state']}")
