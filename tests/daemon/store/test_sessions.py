"""The table of sessions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from hutch_daemon.store import events, executors, permissions, sessions, turns
from hutch_daemon.store.records import Tx
from hutch_daemon.store.store import Store
from hutch_shared.errors import HutchError, Reason
from tests.daemon.store.examples import AT, permission_row, report, session_row, with_session, with_turn


@pytest.fixture
async def filled(store: Store) -> Store:
    """Three sessions of two owners."""

    def unit(tx: Tx) -> None:
        sessions.insert(tx, session_row("s-abcd1", name="work"))
        sessions.insert(tx, session_row("s-abcd2", name="play", created_at=AT + 1))
        sessions.insert(tx, session_row("s-zzzz1", name="work", owner=2000, created_at=AT + 2))

    await store.write(unit)
    return store


@pytest.mark.parametrize(
    ("owner", "ref", "found"),
    [
        (1000, "s-abcd1", "s-abcd1"),
        (1000, "s-abcd2", "s-abcd2"),
        (1000, "work", "s-abcd1"),
        (2000, "work", "s-zzzz1"),
        (2000, "s-zz", "s-zzzz1"),
        (None, "s-zzz", "s-zzzz1"),
        (None, "play", "s-abcd2"),
    ],
)
async def test_a_session_is_found_by_id_prefix_or_name(filled: Store, owner: int | None, ref: str, found: str) -> None:
    """A reference is an id, a prefix of four or more characters, or a name, among the sessions that the caller may
    see."""
    row = await filled.read(partial(sessions.find, owner=owner, ref=ref))

    assert row.id == found


@pytest.mark.parametrize(
    ("owner", "ref", "reason"),
    [
        (1000, "s-abcd", Reason.INVALID_PARAMS),
        (None, "work", Reason.INVALID_PARAMS),
        (1000, "s-zzzz1", Reason.NOT_FOUND),
        (1000, "s-z", Reason.NOT_FOUND),
        (2000, "s-z", Reason.NOT_FOUND),
        (1000, "s-%%%%", Reason.NOT_FOUND),
        (1000, "", Reason.NOT_FOUND),
    ],
)
async def test_an_unknown_or_ambiguous_reference_is_an_error(
    filled: Store, owner: int | None, ref: str, reason: Reason
) -> None:
    """Another user's session looks like a missing one."""
    with pytest.raises(HutchError) as caught:
        await filled.read(partial(sessions.find, owner=owner, ref=ref))

    assert caught.value.reason is reason


@pytest.mark.parametrize(
    ("first", "ref", "found"),
    [
        (1000, "work", "s-abcd1"),
        (2000, "work", "s-zzzz1"),
        (2000, "s-zz", "s-zzzz1"),
        (2000, "play", "s-abcd2"),
        (1000, "s-zzzz1", "s-zzzz1"),
        (3000, "s-abcd2", "s-abcd2"),
    ],
)
async def test_a_name_means_an_administrators_own_session_first(
    filled: Store, first: int, ref: str, found: str
) -> None:
    """This holds even if another user has a session of that name."""
    row = await filled.read(partial(sessions.find, owner=None, ref=ref, first=first))

    assert row.id == found


async def test_an_open_name_is_taken_until_it_closes(filled: Store) -> None:
    """Two open sessions of an owner never share a name; closing a session frees its name."""
    again = partial(sessions.insert, row=session_row("s-new", name="work", created_at=AT + 9))
    with pytest.raises(HutchError) as caught:
        await filled.write(again)
    await filled.write(partial(sessions.update, session="s-abcd1", state="closed", closed_at=AT))
    _, fresh = await filled.write(again)

    found = await filled.read(partial(sessions.find, owner=1000, ref="work"))
    assert (caught.value.reason, fresh, found.id) == (Reason.CONFLICT, True, "s-new")


async def test_an_idempotency_key_opens_one_session(store: Store) -> None:
    """The same key gives the same session; with another directory it is a conflict."""
    first = session_row("s-1", idempotency_key="k")
    opened, fresh = await store.write(partial(sessions.insert, row=first))
    again, not_fresh = await store.write(partial(sessions.insert, row=session_row("s-2", idempotency_key="k")))
    with pytest.raises(HutchError) as caught:
        await store.write(partial(sessions.insert, row=session_row("s-3", idempotency_key="k", cwd="/other")))

    assert (opened.id, fresh, again.id, not_fresh) == ("s-1", True, "s-1", False)
    assert caught.value.reason is Reason.CONFLICT


@pytest.mark.parametrize(
    ("unit", "ids"),
    [
        (partial(sessions.list_), ["s-zzzz1", "s-abcd2", "s-abcd1"]),
        (partial(sessions.list_, owner=1000), ["s-abcd2", "s-abcd1"]),
        (partial(sessions.list_, state="closed"), ["s-abcd2"]),
        (partial(sessions.list_, owner=1000, state="open", limit=1), ["s-abcd1"]),
        (partial(sessions.in_directory, cwd="/home/ada/work"), ["s-abcd1", "s-zzzz1"]),
    ],
)
async def test_lists_are_filtered_and_newest_first(filled: Store, unit: Callable[..., object], ids: list[str]) -> None:
    """Owner, state and limit restrict; a directory's sessions are its open ones."""
    await filled.write(partial(sessions.update, session="s-abcd2", state="closed"))

    rows = await filled.read(unit)

    assert [row.id for row in rows] == ids  # type: ignore[attr-defined]


async def test_a_removed_session_takes_its_record_along_and_frees_its_executor(store: Store) -> None:
    """Removing a session removes its turns and events, and ends its executor's lease."""
    await with_session(store)
    await with_turn(store)
    await report(store, 1, 2)
    await store.write(partial(executors.lease, executor="x-1", session="s-aaaa", at=AT))

    removed = await store.write(partial(sessions.delete, session="s-aaaa"))

    left = await store.read(
        lambda conn: [conn.execute(f"SELECT count(*) FROM {t}").fetchone()[0] for t in ("events", "turns", "sessions")]
    )
    executor = await store.read(partial(executors.get, executor="x-1"))
    assert removed
    assert left == [0, 0, 0]
    assert executor is not None
    assert executor.session is None


async def test_positions_are_not_reused_after_a_removal(store: Store) -> None:
    """A cursor over all sessions stays valid when the newest events are removed."""
    await with_session(store)
    await report(store, 1, 2, 3)
    await store.write(partial(sessions.delete, session="s-aaaa"))
    await with_session(store, "s-bbbb", "x-2")

    (event,) = await report(store, 1, session="s-bbbb", executor="x-2")

    assert (event.position, event.seq) == (4, 1)
    assert await store.read(partial(events.seq_range, session="*")) == events.SeqRange(head=4, oldest=1)


async def test_a_sessions_activity_has_its_turn_queue_and_requests(store: Store) -> None:
    """The active turn, the number of queued turns and of pending requests, and no usage before the first report."""
    await with_session(store)
    idle = await store.read(partial(sessions.activity, session="s-aaaa"))
    for turn in ("t-1", "t-2", "t-3"):
        await with_turn(store, turn)
    await store.write(lambda tx: turns.move(tx, "t-1", {"queued"}, "dispatching", executor="x-1"))
    await store.write(lambda tx: permissions.insert(tx, permission_row("p-1")))
    busy = await store.read(partial(sessions.activity, session="s-aaaa"))

    assert idle == sessions.SessionActivity(active=None, queued=0, pending=0, usage=None)
    assert busy == sessions.SessionActivity(sessions.ActiveTurn("t-1", "dispatching"), queued=2, pending=1, usage=None)
