"""Followers: history, then live events, each once; no follower slows another."""

from __future__ import annotations

from functools import partial

import anyio
import pytest

from hutch_daemon.events.fanout import Fanout, Follower, FollowOver, QueueLimits
from hutch_daemon.store import events, sessions
from hutch_daemon.store.store import Store
from hutch_shared.errors import HutchError, Reason
from tests.daemon.store.examples import AT, report, with_session


@pytest.fixture
async def opened(store: Store) -> Store:
    await with_session(store)
    return store


async def take(follower: Follower, count: int) -> list[int]:
    """Return the numbers of the next events, at least `count`."""
    got: list[int] = []
    with anyio.fail_after(30):
        while len(got) < count:
            got += [follower.number(event) for event in await follower.next()]
    return got


async def test_history_is_followed_by_live_events(opened: Store) -> None:
    """A follower gets the stored events after its cursor, then those that are committed."""
    fanout = Fanout(opened)
    await report(opened, 1, 2, 3)
    async with fanout.follow("s-aaaa", 1) as follower:
        history = await take(follower, 2)
        await report(opened, 4, 5)
        live = await take(follower, 2)

    assert (history, live) == ([2, 3], [4, 5])
    assert (follower.head, follower.oldest) == (3, 1)


async def test_a_follow_may_start_at_the_present(opened: Store) -> None:
    """The cursor -1 means the newest event at that time."""
    fanout = Fanout(opened)
    await report(opened, 1, 2)
    async with fanout.follow("s-aaaa", -1) as follower:
        await report(opened, 3)

        assert await take(follower, 1) == [3]


async def test_waiting_ends_with_the_next_commit(opened: Store) -> None:
    """A follower without new events waits and is woken by the next."""
    fanout = Fanout(opened)
    got: list[int] = []

    async def follow() -> None:
        async with fanout.follow("s-aaaa") as follower:
            got.extend(await take(follower, 1))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(follow)
        await anyio.wait_all_tasks_blocked()
        await report(opened, 1)

    assert got == [1]


async def test_all_sessions_are_followed_in_one_order(opened: Store) -> None:
    """`"*"` follows by position, the events of all users or of one owner."""
    await with_session(opened, "s-bbbb", "x-2", owner=2000)
    fanout = Fanout(opened)
    await report(opened, 1)
    async with fanout.follow("*") as every, fanout.follow("*", owner=2000) as theirs:
        first = await take(every, 1)
        await report(opened, 1, session="s-bbbb", executor="x-2")
        await report(opened, 2)
        await report(opened, 2, session="s-bbbb", executor="x-2")

        assert first + await take(every, 3) == [1, 2, 3, 4]
        assert await take(theirs, 2) == [2, 4]


async def test_skipped_kinds_are_not_sent_and_move_the_cursor(opened: Store) -> None:
    """This holds for history and for live events."""
    fanout = Fanout(opened)
    await report(opened, 1, kind="text_delta")
    await report(opened, 2)
    async with fanout.follow("s-aaaa", skip=["text_delta"]) as follower:
        history = await take(follower, 1)
        await report(opened, 3, kind="text_delta")
        await report(opened, 4)

        assert history + await take(follower, 1) == [2, 4]
        assert follower.cursor == 4


async def test_a_slow_follower_uses_bounded_memory_and_misses_nothing(opened: Store) -> None:
    """A follower that does not read uses at most its bound of memory; later it reads all events from the store."""
    fanout = Fanout(opened, QueueLimits(events=8, bytes=1000))
    async with fanout.follow("s-aaaa") as slow, fanout.follow("s-aaaa") as fast:
        await report(opened, 1)
        seen = [await take(slow, 1), await take(fast, 1)]
        queued = 0
        for n in range(2, 102):
            await report(opened, n)
            seen[1] += await take(fast, 1)
            queued = max(queued, int(repr(slow).split(", ")[1].split()[0]))
        seen[0] += await take(slow, 100)

    assert seen == [list(range(1, 102))] * 2
    assert queued <= 8


async def test_an_event_larger_than_the_bound_passes(opened: Store) -> None:
    """Such an event still passes."""
    fanout = Fanout(opened, QueueLimits(events=8, bytes=1000))
    async with fanout.follow("s-aaaa") as follower:
        await report(opened, 1, 2, size=50_000)
        history = await take(follower, 2)
        await report(opened, 3, size=50_000)

        assert history + await take(follower, 1) == [1, 2, 3]


@pytest.mark.parametrize(
    ("session", "after", "reason"),
    [
        ("s-none", 0, Reason.NOT_FOUND),
        ("s-aaaa", 0, Reason.COMPACTED),
        ("s-aaaa", 9, Reason.INVALID_PARAMS),
        ("*", 0, Reason.COMPACTED),
    ],
)
async def test_a_cursor_that_cannot_be_kept_is_refused(opened: Store, session: str, after: int, reason: Reason) -> None:
    """A cursor or session that is gone, missing or in the future is refused at the start."""
    fanout = Fanout(opened)
    await report(opened, 1, 2, 3)
    await opened.write(partial(events.prune, before=AT + 2))

    with pytest.raises(HutchError) as caught:
        async with fanout.follow(session, after):
            pass

    assert caught.value.reason is reason
    assert fanout.live(session) == 0


async def test_somebody_elses_session_cannot_be_followed(opened: Store) -> None:
    """Another owner's session looks like a missing one."""
    with pytest.raises(HutchError) as caught:
        async with Fanout(opened).follow("s-aaaa", owner=2000):
            pass

    assert caught.value.reason is Reason.NOT_FOUND


async def test_a_slow_follower_whose_events_are_gone_gets_its_cursor(opened: Store) -> None:
    """If retention removes events that a follower needs, the follow ends; none is skipped silently."""
    fanout = Fanout(opened, QueueLimits(events=1))
    async with fanout.follow("s-aaaa") as follower:
        await report(opened, 1)
        await take(follower, 1)
        await report(opened, 2, 3, 4)
        await opened.write(partial(events.prune, before=AT + 4))

        with pytest.raises(FollowOver) as caught:
            await take(follower, 3)

    assert (caught.value.why, caught.value.after) == ("too_slow", 1)


@pytest.mark.parametrize("why", ["session_removed", "shutting_down"])
async def test_a_waiting_follower_is_told_of_the_end(opened: Store, why: str) -> None:
    """Removing its session or stopping hutchd ends a follow at once."""
    fanout = Fanout(opened)
    await report(opened, 1)
    caught: list[tuple[str, int]] = []
    waiting = anyio.Event()

    async def follow() -> None:
        async with fanout.follow("s-aaaa") as follower:
            await take(follower, 1)
            waiting.set()
            try:
                await follower.next()
            except FollowOver as over:
                caught.append((over.why, over.after))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(follow)
        await waiting.wait()
        await anyio.wait_all_tasks_blocked()
        if why == "session_removed":
            await opened.write(partial(sessions.delete, session="s-aaaa"))
            fanout.remove("s-aaaa")
        else:
            fanout.close()

    assert caught == [(why, 1)]
    assert fanout.live("s-aaaa") == 0


async def test_a_closed_fanout_takes_no_new_followers(opened: Store) -> None:
    """After closing, a new follow is refused."""
    fanout = Fanout(opened)
    fanout.close()

    with pytest.raises(HutchError) as caught:
        async with fanout.follow("s-aaaa"):
            pass

    assert caught.value.reason is Reason.SHUTTING_DOWN


async def test_followers_that_can_answer_are_counted(opened: Store) -> None:
    """Followers of the session and of all sessions count if they may see it; listeners hear of changes."""
    fanout = Fanout(opened)
    counts: list[tuple[int, int]] = []
    fanout.presence_changed.subscribe(
        lambda: counts.append((fanout.answering("s-aaaa", 1000), fanout.answering("s-bbbb", 2000)))
    )
    async with (
        fanout.follow("s-aaaa"),
        fanout.follow("s-aaaa", answers=True),
        fanout.follow("*", owner=2000, answers=True),
        fanout.follow("*", answers=True),
    ):
        pass

    assert counts == [(1, 0), (1, 1), (2, 2), (1, 1), (1, 0), (0, 0)]


async def test_a_cancelled_wait_loses_nothing(opened: Store) -> None:
    """After a cancel, the next call returns the events of the cancelled one."""
    fanout = Fanout(opened)
    await report(opened, 1)
    async with fanout.follow("s-aaaa") as follower:
        await take(follower, 1)
        with anyio.CancelScope() as scope:
            scope.cancel()
            await follower.next()
        await report(opened, 2)

        assert await take(follower, 1) == [2]
