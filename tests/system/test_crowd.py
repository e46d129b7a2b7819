"""Many concurrent sessions on real processes: no event is lost, duplicated or reordered."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import anyio
import pytest

from hutch_client.client import HutchClient
from hutch_shared import messages as m
from hutch_shared.events import Event
from tests.system.host import Host, host
from tests.system.log import data

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

EVENTS = 200


@pytest.mark.parametrize("count", [12, pytest.param(50, marks=pytest.mark.full)])
async def test_many_sessions_at_once_lose_nothing_at_two_followers(count: int) -> None:
    """Two followers of all sessions get every event of each session in order."""
    async with host("[executors]\nspares = 0\nmaximum = 60\nhello_timeout = 120.0\n") as made:
        lines = [{"wait_file": "go"}, *({"text": str(n)} for n in range(EVENTS))]
        path = made.script_file("crowd", lines)
        folder = made.folder("crowd")
        seen: list[list[Event]] = [[], []]
        async with made.client() as hutch, made.client() as other, anyio.create_task_group() as group:
            group.start_soon(_follow, hutch, count, seen[0])
            group.start_soon(_follow, other, count, seen[1])
            options = m.AgentOptions(script=path)
            sessions = [
                await hutch.open_session(m.OpenSession("script", str(folder), options=options)) for _ in range(count)
            ]
            for session in sessions:
                await hutch.submit_prompt(session.id, "go")
            await _all_run(made, hutch, count)
            (folder / "go").touch()

        assert [event.position for event in seen[0]] == list(range(1, len(seen[0]) + 1))
        assert [(event.position, event.session, event.seq) for event in seen[1]] == [
            (event.position, event.session, event.seq) for event in seen[0]
        ]
        told: dict[str, list[Event]] = defaultdict(list)
        for event in seen[0]:
            told[event.session].append(event)
        assert told.keys() == {session.id for session in sessions}
        assert {session: _story(events) for session, events in told.items()} == dict.fromkeys(told, _WHOLE_STORY)


_WHOLE_STORY = [(n + 2, str(n)) for n in range(EVENTS)]


def _story(events: Sequence[Event]) -> list[tuple[int, str]]:
    """Return the numbered texts of a session's turn, which began with 1 and ended after the last."""
    assert (events[0].seq, events[0].kind) == (1, "turn_started")
    assert (events[-1].seq, events[-1].kind) == (EVENTS + 2, "turn_ended")
    return [(event.seq, data(event).text) for event in events[1:-1]]


async def _follow(hutch: HutchClient, count: int, seen: list[Event]) -> None:
    """Keep all events of all sessions until each session's turn has ended."""
    ended = 0
    async with hutch.follow(m.FollowEvents("*")) as follow:
        while ended < count:
            seen.append(await anext(follow))
            ended += seen[-1].kind == "turn_ended"


async def _all_run(made: Host, hutch: HutchClient, count: int) -> None:
    """Wait until every session's turn runs, each in its own executor."""
    with anyio.fail_after(200):
        while (status := await hutch.get_status()).turns_running < count:
            assert not status.notices, (status.notices, made.log_text())
            await anyio.sleep(0.2)
    assert len({one.pid for one in status.executors}) == count
