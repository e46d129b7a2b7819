"""The table of executors."""

from __future__ import annotations

from functools import partial

import pytest

from hutch_daemon.store import executors
from hutch_daemon.store.store import Store
from hutch_shared.errors import HutchError, Reason
from tests.daemon.store.examples import AT, executor_row, with_session


@pytest.fixture
async def two(store: Store) -> Store:
    """A session and two executors."""
    await with_session(store)
    await store.write(partial(executors.insert, row=executor_row("x-2", created_at=AT + 1)))
    return store


async def test_a_session_has_one_executor_and_the_former_is_superseded(two: Store) -> None:
    """A lease takes the session from the executor that had it and returns that executor."""
    nobody = await two.write(partial(executors.lease, executor="x-1", session="s-aaaa", at=AT))
    same = await two.write(partial(executors.lease, executor="x-1", session="s-aaaa", at=AT))
    former = await two.write(partial(executors.lease, executor="x-2", session="s-aaaa", at=AT + 5))

    holder = await two.read(partial(executors.leased_to, session="s-aaaa"))
    loser = await two.read(partial(executors.get, executor="x-1"))
    assert (nobody, same, former) == (None, None, "x-1")
    assert holder is not None
    assert (holder.id, holder.leased_at) == ("x-2", AT + 5)
    assert loser is not None
    assert (loser.session, loser.leased_at) == (None, None)


async def test_an_executor_serves_one_session(two: Store) -> None:
    """An executor gets another session only after it was released."""
    await with_session(two, "s-bbbb", "x-3")
    await two.write(partial(executors.lease, executor="x-1", session="s-aaaa", at=AT))
    with pytest.raises(HutchError) as caught:
        await two.write(partial(executors.lease, executor="x-1", session="s-bbbb", at=AT))
    released = await two.write(partial(executors.release, executor="x-1"))
    again = await two.write(partial(executors.release, executor="x-1"))

    assert await two.write(partial(executors.lease, executor="x-1", session="s-bbbb", at=AT)) is None
    assert (caught.value.reason, released, again) == (Reason.WRONG_STATE, True, False)


async def test_a_launch_record_comes_back_whole_and_is_found_by_token(two: Store) -> None:
    """The data for adoption is stored and read back unchanged."""
    launched = {"cgroup": "/hutch/x-1", "pidfd": None}
    updated = await two.write(
        partial(executors.update, executor="x-1", pid=42, start_time=7, boot_id="b", launched=launched, state="ready")
    )

    assert await two.read(partial(executors.by_token_hash, token_hash=b"x-1")) == updated
    assert updated.launched == launched
    assert await two.read(partial(executors.by_token_hash, token_hash=b"none")) is None


async def test_a_gone_executor_is_forgotten_once_it_is_settled(two: Store) -> None:
    """It is not removed while its spool may still be stored."""
    await two.write(partial(executors.update, executor="x-1", state="gone", gone_at=AT, spool="/spool/x-1"))
    await two.write(partial(executors.update, executor="x-2", state="quarantined"))
    live = await two.read(executors.live)
    kept = await two.write(partial(executors.forget, before=AT + 1))
    await two.write(partial(executors.update, executor="x-1", spool=None))

    assert [row.id for row in live] == ["x-2"]
    assert kept == 0
    assert await two.write(partial(executors.forget, before=AT + 1)) == 1
