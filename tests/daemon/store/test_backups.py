"""Backups of the database, and their restoration."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import anyio
import pytest

from hutch_daemon.store import backups, events, executors, permissions, turns
from hutch_daemon.store.lock import hold
from hutch_daemon.store.store import Store
from hutch_shared.errors import HutchError, Reason
from hutch_shared.hutchd_lock import DATABASE_LOCK, HutchdProcess, find_hutchd
from tests.daemon.store.examples import AT, permission_row, report, with_session, with_turn


async def test_a_backup_is_one_whole_file_of_its_moment(store: Store, tmp_path: Path) -> None:
    """It is made while the store is in use. It is a single file, which only its owner can read."""
    folder = tmp_path / "backups"
    folder.mkdir()
    await with_session(store)
    await report(store, *range(1, 21), size=2000)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(report, store, 21)
        done = await store.backup(folder / "copy.db")

    assert (done.journal, done.bytes) == (store.journal, (folder / "copy.db").stat().st_size)
    assert [file.name for file in folder.iterdir()] == ["copy.db"]
    assert (folder / "copy.db").stat().st_mode & 0o777 == 0o600
    async with Store.open(folder / "copy.db") as copy:
        bounds = await copy.read(partial(events.seq_range, session="s-aaaa"))
        assert bounds.head in {20, 21}


async def test_a_backup_never_overwrites(store: Store, tmp_path: Path) -> None:
    """An existing file is not touched, nor is a link."""
    (tmp_path / "there").write_text("mine")
    os.symlink(tmp_path / "elsewhere", tmp_path / "link")
    reasons = []
    for name in ("there", "link"):
        with pytest.raises(HutchError) as caught:
            await store.backup(tmp_path / name)
        reasons.append(caught.value.reason)

    assert reasons == [Reason.CONFLICT, Reason.CONFLICT]
    assert (tmp_path / "there").read_text() == "mine"
    assert not (tmp_path / "elsewhere").exists()


async def test_a_backup_into_nowhere_leaves_the_store_alone(store: Store, tmp_path: Path) -> None:
    """A target that cannot be written is reported; the store keeps working."""
    with pytest.raises(HutchError) as caught:
        await store.backup(tmp_path / "none" / "copy.db")

    assert caught.value.reason is Reason.STORE_UNAVAILABLE
    assert store.available


async def test_a_restored_journal_is_another_one_and_trusts_no_executor(tmp_path: Path) -> None:
    """The record returns under a new journal id, without tokens, leases, live turns and pending permission requests."""
    path, copy = tmp_path / "hutch.db", tmp_path / "copy.db"
    async with Store.open(path) as store:
        await with_session(store)
        await with_turn(store)
        await with_turn(store, "t-2")
        await report(store, 1, 2)
        await store.write(partial(executors.lease, executor="x-1", session="s-aaaa", at=AT))
        await store.write(lambda tx: turns.move(tx, "t-1", ["queued"], "running"))
        await store.write(partial(permissions.insert, row=permission_row()))
        await store.backup(copy)
        await report(store, 3)
        former = store.journal
    aside = backups.restore(copy, path)

    async with Store.open(path) as store:
        page = await store.read(partial(events.read, session="s-aaaa", after=0))
        executor = await store.read(partial(executors.get, executor="x-1"))
        states = [turn.state for turn in await store.read(partial(turns.list_, session="s-aaaa"))]
        question = await store.read(partial(permissions.get, permission="p-1"))
        assert store.journal != former
        assert [event.seq for event in page.events] == [1, 2]
        assert executor is not None
        assert (executor.session, executor.state, executor.token_hash == b"x-1") == (None, "gone", False)
        assert states == ["failed", "queued"]
        assert question is not None
        assert question.state == "withdrawn"
    assert aside is not None
    async with Store.open(aside) as store:
        assert store.journal == former
        assert (await store.read(partial(events.seq_range, session="s-aaaa"))).head == 3
    assert copy.exists()


async def test_nothing_is_restored_under_a_running_daemon(store: Store, tmp_path: Path) -> None:
    """A database that is locked is in use and cannot be replaced."""
    await store.backup(tmp_path / "copy.db")

    with pytest.raises(HutchError) as caught:
        backups.restore(tmp_path / "copy.db", store.path)

    assert caught.value.reason is Reason.WRONG_STATE


def test_a_restore_is_seen_as_one(tmp_path: Path) -> None:
    """Nothing stops it, and a hutchd that starts meanwhile says what it must wait for."""
    lock = tmp_path / DATABASE_LOCK
    with hold(lock, restores=True):
        found = find_hutchd(tmp_path)
        with pytest.raises(HutchError, match="by a backup; try again when it has ended"), hold(lock):
            pass

    assert found == HutchdProcess(os.getpid(), "restoring", holds_database=True)


async def test_a_damaged_copy_replaces_nothing(tmp_path: Path) -> None:
    """If the copy is not a database, the current one stays."""
    path, copy = tmp_path / "hutch.db", tmp_path / "copy.db"
    async with Store.open(path) as store:
        journal = store.journal
    copy.write_bytes(b"x" * 10_000)

    with pytest.raises(HutchError) as caught:
        backups.restore(copy, path)

    async with Store.open(path) as store:
        assert store.journal == journal
    assert caught.value.details["fault"] == "corrupt"
