"""The table of permission requests."""

from __future__ import annotations

from functools import partial

import pytest

from hutch_daemon.store import permissions
from hutch_daemon.store.store import Store
from hutch_shared import messages as m
from hutch_shared.errors import HutchError, Reason
from tests.daemon.store.examples import AT, permission_row, with_session, with_turn


@pytest.fixture
async def asked(store: Store) -> Store:
    """Two requests of a turn and one of another session."""
    await with_session(store)
    await with_session(store, "s-bbbb", "x-2", owner=2000)
    await with_turn(store, "t-1")
    await with_turn(store, "t-2", "s-bbbb")
    for row in (
        permission_row("p-1"),
        permission_row("p-2", asked_at=AT + 1),
        permission_row("p-3", session="s-bbbb", turn="t-2", executor="x-2"),
    ):
        await store.write(partial(permissions.insert, row=row))
    return store


async def test_pages_join_without_a_gap(asked: Store) -> None:
    """The next page starts after the last request of a page; the last page says that it is the last."""
    found: list[str] = []
    more, after = True, None
    while more:
        page = partial(permissions.page, owner=None, session=None, state=None, after=after, limit=1)
        (row,), more = await asked.read(page)
        found.append(after := row.id)

    assert found == ["p-1", "p-3", "p-2"]


async def test_a_page_of_the_newest_is_listed_oldest_first(asked: Store) -> None:
    """It says whether older ones exist."""
    page = partial(permissions.page, owner=None, session=None, state=None, after=None, newest=True)
    two, more = await asked.read(partial(page, limit=2))
    every, no_more = await asked.read(partial(page, limit=10))

    assert ([row.id for row in two], more) == (["p-3", "p-2"], True)
    assert ([row.id for row in every], no_more) == (["p-1", "p-3", "p-2"], False)


async def test_a_page_is_bounded_in_bytes_and_never_empty(asked: Store) -> None:
    """Huge calls fill pages of their own, and each page says whether more follow."""
    call = m.ToolCall("c", "edit", "Write", {"content": "x" * (3 << 20)})
    for row in (permission_row("p-4", call=call, asked_at=AT + 4), permission_row("p-5", call=call, asked_at=AT + 5)):
        await asked.write(partial(permissions.insert, row=row))

    page = partial(permissions.page, owner=1000, session=None, state="pending", limit=100)
    first, more = await asked.read(partial(page, after="p-1"))
    last, no_more = await asked.read(partial(page, after="p-4"))

    assert ([row.id for row in first], more) == (["p-2", "p-4"], True)
    assert ([row.id for row in last], no_more) == (["p-5"], False)


@pytest.mark.parametrize("after", ["p-none", "p-3"])
async def test_a_page_starts_only_after_ones_own_request(asked: Store, after: str) -> None:
    """Another user's request looks like a missing one."""
    with pytest.raises(HutchError) as caught:
        await asked.read(partial(permissions.page, owner=1000, session=None, state=None, after=after, limit=1))

    assert caught.value.reason is Reason.NOT_FOUND


async def test_a_repeated_request_finds_its_record(asked: Store) -> None:
    """After a reconnect the executor's repeated request finds the record and the decision."""
    await asked.write(partial(permissions.settle, permission="p-1", state="denied", message="no"))

    row, fresh = await asked.write(partial(permissions.insert, row=permission_row("p-9", ask="a-p-1")))

    assert (row.id, row.state, row.message, fresh) == ("p-1", "denied", "no", False)


async def test_the_first_decision_stands(asked: Store) -> None:
    """Of two decisions the first stands; the second gets the request as it stands."""
    first, won = await asked.write(
        partial(permissions.settle, permission="p-1", state="allowed", updated_input={"command": "ls -l"}, scope="once")
    )
    second, won_too = await asked.write(partial(permissions.settle, permission="p-1", state="denied", message="late"))

    assert (won, won_too) == (True, False)
    assert second == first
    assert (first.state, first.updated_input, first.message) == ("allowed", {"command": "ls -l"}, None)


async def test_settling_a_missing_request_is_an_error(asked: Store) -> None:
    """An unknown id is never settled."""
    with pytest.raises(HutchError) as caught:
        await asked.write(partial(permissions.settle, permission="p-none", state="denied"))

    assert caught.value.reason is Reason.NOT_FOUND


@pytest.mark.parametrize(
    ("filters", "ids"),
    [
        ({}, ["p-3", "p-2"]),
        ({"state": None}, ["p-1", "p-3", "p-2"]),
        ({"state": "withdrawn"}, ["p-1"]),
        ({"owner": 1000}, ["p-2"]),
        ({"owner": 2000, "state": None}, ["p-3"]),
        ({"session": "s-aaaa", "state": None}, ["p-1", "p-2"]),
        ({"turn": "t-1"}, ["p-2"]),
        ({"state": None, "limit": 1}, ["p-1"]),
    ],
)
async def test_requests_are_listed_oldest_first(asked: Store, filters: dict[str, object], ids: list[str]) -> None:
    """The default is pending requests; owner, session, turn, state and limit restrict the list."""
    await asked.write(partial(permissions.settle, permission="p-1", state="withdrawn"))

    rows = await asked.read(partial(permissions.list_, **filters))  # type: ignore[arg-type]

    assert [row.id for row in rows] == ids
    assert await asked.read(partial(permissions.pending, session="s-aaaa")) == 1
