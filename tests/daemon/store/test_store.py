"""The store: commits in groups, events in order, short reads, one owner."""

from __future__ import annotations

import itertools
import sqlite3
import threading
from collections import Counter
from functools import partial
from pathlib import Path

import anyio
import pytest

from hutch_daemon.store import events, meta
from hutch_daemon.store.records import Tx
from hutch_daemon.store.rows import StoredEvent
from hutch_daemon.store.store import Store, StoreLimits
from hutch_shared.errors import HutchError, Reason
from hutch_shared.events import Notice
from tests.daemon.store.examples import report, with_session


def put(key: str, value: str = "x") -> partial[None]:
    return partial(meta.put, key=key, value=value)


async def value(store: Store, key: str) -> str | None:
    return await store.read(partial(meta.get, key=key))


async def test_data_is_there_after_reopening(tmp_path: Path) -> None:
    """The journal keeps its id and content; each opening is a new epoch."""
    path = tmp_path / "hutch.db"
    async with Store.open(path) as store:
        await store.write(put("k"))
        first = (store.journal, store.epoch)
    async with Store.open(path) as store:
        second = (store.journal, store.epoch)

        assert await value(store, "k") == "x"
    assert second == (first[0], first[1] + 1)
    assert path.stat().st_mode & 0o077 == 0


async def test_a_unit_returns_its_value_and_reads_its_own_writes(store: Store) -> None:
    """`write` returns the unit's result once it is durable."""

    def unit(tx: Tx) -> str | None:
        meta.put(tx, "k", "v")
        return meta.get(tx, "k")

    assert await store.write(unit) == "v"


async def test_a_failing_unit_is_undone_alone(store: Store) -> None:
    """Of the units that share a commit, only the one that raises leaves no trace, nor do its events."""
    await with_session(store)
    published: list[StoredEvent] = []
    store.on_committed(published.extend)
    gate = threading.Event()

    def wait(_: Tx) -> None:
        gate.wait(10)

    def fail(tx: Tx) -> None:
        meta.put(tx, "bad", "x")
        events.append(tx, "s-aaaa", None, "notice", Notice("word", "Said."))
        raise LookupError("mine")

    caught: list[Exception] = []

    async def failing() -> None:
        try:
            await store.write(fail)
        except LookupError as error:
            caught.append(error)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(store.write, wait)
        tasks.start_soon(store.write, put("before"))
        tasks.start_soon(failing)
        tasks.start_soon(store.write, put("after"))
        await anyio.wait_all_tasks_blocked()
        gate.set()

    assert [str(error) for error in caught] == ["mine"]
    assert [await value(store, key) for key in ("before", "bad", "after")] == ["x", None, "x"]
    assert published == []
    (event,) = await report(store, 1)
    assert (event.seq, event.position) == (1, 1)


async def test_a_violated_constraint_is_the_callers_error(store: Store) -> None:
    """It is not a fault of the store."""
    with pytest.raises(sqlite3.IntegrityError):
        await store.write(lambda tx: tx.execute("INSERT INTO meta VALUES ('k', NULL)"))

    assert store.available
    await store.write(put("k"))


async def test_events_are_published_in_order_before_their_writes_return(store: Store) -> None:
    """When `write` returns, the events of its unit have been published."""
    await with_session(store)
    published: list[int] = []
    store.on_committed(lambda batch: published.extend(event.position for event in batch))
    counter = itertools.count(1)
    seen_at_return: list[bool] = []

    async def one() -> None:
        stored = await report(store, next(counter))
        seen_at_return.append(stored[0].position in published)

    async with anyio.create_task_group() as tasks:
        for _ in range(50):
            tasks.start_soon(one)

    assert published == list(range(1, 51))
    assert seen_at_return == [True] * 50


async def test_units_that_wait_share_commits(store: Store) -> None:
    """Units that gather during a commit make few commits, of at most 256 units each."""
    gate = threading.Event()
    groups: list[Tx] = []

    def unit(tx: Tx) -> None:
        groups.append(tx)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(store.write, lambda _: gate.wait(30))
        for _ in range(600):
            tasks.start_soon(store.write, unit)
        await anyio.wait_all_tasks_blocked()
        gate.set()

    sizes = Counter(id(tx) for tx in groups)
    assert sum(sizes.values()) == 600
    assert len(sizes) < 200
    assert max(sizes.values()) <= 256


async def test_a_cancelled_caller_does_not_undo_its_unit(store: Store) -> None:
    """The unit still runs; the caller learns nothing."""
    started, gate = threading.Event(), threading.Event()

    def unit(tx: Tx) -> None:
        started.set()
        gate.wait(10)
        meta.put(tx, "k", "v")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(store.write, unit)
        await anyio.to_thread.run_sync(started.wait)
        tasks.cancel_scope.cancel()
    gate.set()
    await store.write(put("later"))

    assert await value(store, "k") == "v"


async def test_closing_commits_accepted_units_and_refuses_later_ones(tmp_path: Path) -> None:
    """Closing drops no unit that was accepted."""
    path = tmp_path / "hutch.db"
    async with anyio.create_task_group() as tasks:
        async with Store.open(path) as store:
            for number in range(20):
                tasks.start_soon(store.write, put(f"k{number}"))
            await anyio.wait_all_tasks_blocked()
        with pytest.raises(HutchError) as caught:
            await store.write(put("late"))
    async with Store.open(path) as again:
        kept = [await value(again, f"k{number}") for number in range(20)]

        assert kept == ["x"] * 20
    assert caught.value.reason is Reason.SHUTTING_DOWN
    assert not path.with_name("hutch.db-wal").exists()


async def test_a_second_daemon_on_the_directory_is_refused(store: Store) -> None:
    """The error names the process that holds the lock."""
    with pytest.raises(HutchError, match=r"Another hutchd \(pid \d+\)") as caught:
        async with Store.open(store.path):
            pass

    assert caught.value.reason is Reason.WRONG_STATE
    await store.write(put("k"))


async def test_a_read_cannot_write(store: Store) -> None:
    """Reading connections are read-only."""
    with pytest.raises(HutchError) as caught:
        await store.read(put("k"))

    assert caught.value.reason is Reason.STORE_UNAVAILABLE
    assert store.available


async def test_a_read_is_one_snapshot(store: Store) -> None:
    """A read does not see commits that come while it runs."""
    await store.write(put("k", "old"))
    begun, gate = threading.Event(), threading.Event()
    seen: list[str | None] = []

    def unit(conn: sqlite3.Connection) -> None:
        seen.append(meta.get(conn, "k"))
        begun.set()
        gate.wait(10)
        seen.append(meta.get(conn, "k"))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(store.read, unit)
        await anyio.to_thread.run_sync(begun.wait)
        await store.write(put("k", "new"))
        gate.set()

    assert seen == ["old", "old"]
    assert await value(store, "k") == "new"


async def test_an_endless_read_is_stopped(tmp_path: Path) -> None:
    """A read has a deadline, so that it cannot block the log for ever; the next read works."""
    endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n"
    async with Store.open(tmp_path / "hutch.db", limits=StoreLimits(read_seconds=0.05)) as store:
        with pytest.raises(HutchError) as caught:
            await store.read(lambda conn: conn.execute(endless).fetchone())

        assert caught.value.reason is Reason.TIMED_OUT
        assert await value(store, "journal") == store.journal


async def test_the_log_is_emptied_beyond_its_bound(tmp_path: Path) -> None:
    """If no reader holds it, a log beyond its bound is emptied by the commit that exceeded it."""
    async with Store.open(tmp_path / "hutch.db", limits=StoreLimits(wal=200_000)) as store:
        await with_session(store)
        await report(store, *range(1, 101), size=5000)
        await report(store, 101)

        assert store.status().wal_bytes < 100_000
        assert (await store.read(partial(events.seq_range, session="s-aaaa"))).head == 101


async def test_a_reader_that_holds_the_log_stops_writing_before_the_disk_is_full(tmp_path: Path) -> None:
    """While another process holds a snapshot, writes are refused at the log's bound; when it ends, they resume."""
    async with Store.open(tmp_path / "hutch.db", limits=StoreLimits(wal=100_000, wal_held=400_000)) as store:
        await with_session(store)
        stranger = sqlite3.connect(store.path, isolation_level=None)
        stranger.execute("BEGIN")
        stranger.execute("SELECT count(*) FROM meta").fetchone()
        refused = None
        first = 1
        while refused is None and store.status().wal_bytes < 50_000_000:
            try:
                await report(store, *range(first, first + 10), size=10_000)
                first += 10
            except HutchError as error:
                refused = error
        stranger.close()

        assert refused is not None
        assert refused.reason is Reason.STORE_UNAVAILABLE
        with anyio.fail_after(20):
            while not store.available:
                await anyio.sleep(0.01)
        await report(store, first)


async def test_status_describes_the_store(store: Store) -> None:
    """It has the journal, the path, the newest event and the sizes."""
    await with_session(store)
    await report(store, 1, 2)
    status = store.status()

    assert (status.ok, status.journal, status.path, status.events) == (True, store.journal, str(store.path), 2)
    assert status.bytes > 0
    assert status.wal_bytes > 0
