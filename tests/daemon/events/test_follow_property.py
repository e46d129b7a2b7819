"""For any behaviour of the followers while events are committed, each gets each event once and in order."""

from __future__ import annotations

import tempfile
from pathlib import Path

import anyio
from hypothesis import given, settings
from hypothesis import strategies as st

from hutch_daemon.events.fanout import Fanout, QueueLimits
from hutch_daemon.store.store import Store
from tests.daemon.store.examples import report, with_session
from tests.fakes.stores import new_database

SESSIONS = {"s-aaaa": "x-1", "s-bbbb": "x-2"}

batches = st.lists(st.tuples(st.sampled_from(sorted(SESSIONS)), st.integers(1, 6)), min_size=1, max_size=12)
# the number of calls that a follower makes before it drops its connection and returns, repeated
habits = st.tuples(st.sampled_from(["s-aaaa", "s-bbbb", "*"]), st.lists(st.integers(1, 4), min_size=1, max_size=6))


@given(batches=batches, followers=st.lists(habits, min_size=1, max_size=4), room=st.integers(1, 5))
@settings(max_examples=20)
def test_each_event_reaches_each_follower_once_and_in_order(
    batches: list[tuple[str, int]], followers: list[tuple[str, list[int]]], room: int
) -> None:
    """History, live, lagging and returning, for one session or all: no gap and no duplicate."""
    totals = {name: sum(count for session, count in batches if session == name) for name in SESSIONS}
    totals["*"] = sum(totals.values())
    seen: list[list[int]] = [[] for _ in followers]

    async def follow(fanout: Fanout, session: str, habit: list[int], got: list[int]) -> None:
        visit = 0
        while len(got) < totals[session]:
            async with fanout.follow(session, got[-1] if got else 0) as follower:
                for _ in range(habit[visit % len(habit)]):
                    if len(got) < totals[session]:
                        got += [follower.number(event) for event in await follower.next()]
            visit += 1

    async def append(store: Store) -> None:
        next_n = dict.fromkeys(SESSIONS, 1)
        for session, count in batches:
            first = next_n[session]
            next_n[session] += count
            await report(store, *range(first, first + count), session=session, executor=SESSIONS[session])

    async def run(path: Path) -> None:
        async with Store.open(new_database(path)) as store:
            fanout = Fanout(store, QueueLimits(events=room))
            for session, executor in SESSIONS.items():
                await with_session(store, session, executor)
            with anyio.fail_after(60):
                async with anyio.create_task_group() as tasks:
                    for (session, habit), got in zip(followers, seen, strict=True):
                        tasks.start_soon(follow, fanout, session, habit, got)
                    tasks.start_soon(append, store)

    with tempfile.TemporaryDirectory() as folder:
        anyio.run(run, Path(folder) / "hutch.db")

    assert seen == [list(range(1, totals[session] + 1)) for session, _ in followers]
