"""The table of turns."""

from __future__ import annotations

import sqlite3
from functools import partial

import pytest

from hutch_daemon.store import sessions, turns
from hutch_daemon.store.store import Store
from hutch_shared.errors import HutchError, Reason
from hutch_shared.events import UsageSeen
from tests.daemon.store.examples import AT, turn_row, with_session, with_turn


@pytest.fixture
async def opened(store: Store) -> Store:
    await with_session(store)
    return store


async def test_turns_are_numbered_and_queued_in_order(opened: Store) -> None:
    """A session's turns are numbered 1, 2, 3 …; the oldest queued one is next."""
    rows = [await with_turn(opened, f"t-{letter}") for letter in "cab"]
    following = await opened.read(partial(turns.next_queued, session="s-aaaa"))
    waiting = await opened.read(partial(turns.queued, session="s-aaaa"))

    assert [row.number for row in rows] == [1, 2, 3]
    assert following == rows[0]
    assert waiting == 3


async def test_a_page_has_the_newest_turns_that_fit(opened: Store) -> None:
    """A page is bounded by number and by bytes, oldest first, and says whether older turns exist."""
    for name, size in (("t-1", 1), ("t-2", 3 << 20), ("t-3", 1)):
        await with_turn(opened, name, prompt="x" * size)

    by_bytes, older = await opened.read(partial(turns.page, session="s-aaaa", limit=200))
    by_number, also_older = await opened.read(partial(turns.page, session="s-aaaa", limit=1))

    assert ([row.id for row in by_bytes], older) == (["t-2", "t-3"], True)
    assert ([row.id for row in by_number], also_older) == (["t-3"], True)


async def test_an_idempotency_key_queues_one_turn(opened: Store) -> None:
    """Repeating a submission returns the turn it made; another prompt under the same key is a conflict."""
    first, fresh = await opened.write(partial(turns.insert, row=turn_row("t-1", idempotency_key="k")))
    again, not_fresh = await opened.write(partial(turns.insert, row=turn_row("t-2", idempotency_key="k")))
    with pytest.raises(HutchError) as caught:
        await opened.write(partial(turns.insert, row=turn_row("t-3", idempotency_key="k", prompt="else")))

    assert (again, fresh, not_fresh) == (first, True, False)
    assert caught.value.reason is Reason.CONFLICT


@pytest.mark.parametrize(("session", "reason"), [("s-none", Reason.NOT_FOUND), ("s-aaaa", Reason.SESSION_CLOSED)])
async def test_a_closed_or_missing_session_gets_no_turn(opened: Store, session: str, reason: Reason) -> None:
    """A refused turn uses up no number."""
    await opened.write(partial(sessions.update, session="s-aaaa", state="closed"))

    with pytest.raises(HutchError) as caught:
        await opened.write(partial(turns.insert, row=turn_row("t-1", session)))
    row = await opened.read(partial(sessions.get, session="s-aaaa"))

    assert caught.value.reason is reason
    assert row is not None
    assert row.turns == 0


async def test_the_first_terminal_state_stands(opened: Store) -> None:
    """A turn moves only from the states named; a second writer learns that it was not the first."""
    await with_turn(opened)
    usage = UsageSeen(input_tokens=3, usd=0.5, total=True)
    started = await opened.write(lambda tx: turns.move(tx, "t-1", ["queued"], "dispatching", executor="x-1"))
    won = await opened.write(
        partial(
            turns.move,
            turn="t-1",
            from_states=("dispatching", "running"),
            to_state="completed",
            ended_at=AT,
            reason="done",
            usage=usage,
        )
    )
    lost = await opened.write(
        partial(turns.move, turn="t-1", from_states=("running", "stopping"), to_state="failed", reason="late")
    )

    row = await opened.read(partial(turns.get, turn="t-1"))
    assert (started, won, lost) == (True, True, False)
    assert row is not None
    assert (row.state, row.reason, row.executor, row.usage) == ("completed", "done", "x-1", usage)


async def test_a_session_never_has_two_active_turns(opened: Store) -> None:
    """The database itself refuses a second active turn; nothing else is undone."""
    await with_turn(opened, "t-1")
    await with_turn(opened, "t-2")
    await opened.write(lambda tx: turns.move(tx, "t-1", ["queued"], "running"))

    with pytest.raises(sqlite3.IntegrityError):
        await opened.write(lambda tx: turns.move(tx, "t-2", ["queued"], "dispatching"))

    active = await opened.read(partial(turns.active, session="s-aaaa"))
    live = await opened.read(turns.live)
    assert active is not None
    assert active.id == "t-1"
    assert [(row.id, row.state) for row in live] == [("t-1", "running"), ("t-2", "queued")]


async def test_the_newest_turns_are_listed_oldest_first(opened: Store) -> None:
    """With a limit, the newest turns are listed."""
    for turn in ("t-1", "t-2", "t-3"):
        await with_turn(opened, turn)
    await opened.write(partial(turns.update, turn="t-3", message="hello"))

    rows = await opened.read(partial(turns.list_, session="s-aaaa", limit=2))

    assert [(row.id, row.message) for row in rows] == [("t-2", None), ("t-3", "hello")]
