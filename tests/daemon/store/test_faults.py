"""A disk that fails under a running store: only durable data is acknowledged, and the store recovers by itself.

The faults are real ones of SQLite and the kernel: a database at its largest size (SQLITE_FULL), a lock of another
process (SQLITE_BUSY), a limit on file sizes (a write that fails with an I/O error).
"""

from __future__ import annotations

import os
import resource
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

import anyio
import pytest

from hutch_daemon.store import events, executors, meta
from hutch_daemon.store.records import Tx
from hutch_daemon.store.rows import StoredEvent
from hutch_daemon.store.store import Store
from hutch_shared.errors import HutchError, Reason
from tests.daemon.store.examples import report, with_session


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Limit the files of this process to `size` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


async def refused(store: Store, *numbers: int, size: int = 10) -> HutchError:
    """Report events that cannot be stored."""
    with pytest.raises(HutchError) as caught:
        await report(store, *numbers, size=size)
    assert caught.value.reason is Reason.STORE_UNAVAILABLE
    return caught.value


async def healed(store: Store) -> None:
    with anyio.fail_after(30):
        while not store.available:
            await anyio.sleep(0.01)


async def stored(store: Store) -> tuple[list[int], int]:
    """Return the stored seqs and the executor's receipt."""
    page = await store.read(partial(events.read, session="s-aaaa", after=0))
    row = await store.read(partial(executors.get, executor="x-1"))
    assert row is not None
    return [event.seq for event in page.events], row.acked_n


@pytest.fixture
async def opened(store: Store) -> Store:
    await with_session(store)
    await report(store, 1, 2)
    return store


async def limit_pages(store: Store, pages: int) -> None:
    await store.write(lambda tx: tx.execute(f"PRAGMA max_page_count = {pages}").fetchone())


async def test_a_full_disk_refuses_and_heals_when_there_is_space(opened: Store) -> None:
    """A report that does not fit is neither stored nor published; the same report succeeds afterwards."""
    published: list[StoredEvent] = []
    opened.on_committed(published.extend)
    await limit_pages(opened, 1)  # SQLite raises this limit to the current size
    error = await refused(opened, 3, 4, size=100_000)
    during = (await stored(opened), published[:])
    await healed(opened)
    await limit_pages(opened, 1_000_000)
    await report(opened, 3, 4, size=100_000)

    assert error.details["fault"] == "full"
    assert "full" in error.message
    assert during == (([1, 2], 2), [])
    assert await stored(opened) == ([1, 2, 3, 4], 4)
    assert [event.seq for event in published] == [3, 4]


async def test_if_one_unit_of_a_group_does_not_fit_none_is_acknowledged(opened: Store) -> None:
    """None of the group's units is stored."""
    await limit_pages(opened, 1)
    outcomes: dict[str, bool] = {}

    async def one(name: str, size: int) -> None:
        def unit(tx: Tx) -> None:
            meta.put(tx, name, "x" * size)

        try:
            await opened.write(unit)
        except HutchError:
            outcomes[name] = False
        else:
            outcomes[name] = True

    async with anyio.create_task_group() as tasks:
        for name, size in (("a", 1), ("b", 500_000), ("c", 1)):
            tasks.start_soon(one, name, size)

    there = {name: await opened.read(partial(meta.get, key=name)) is not None for name in outcomes}
    assert outcomes["b"] is False
    assert there == outcomes


async def test_a_foreign_lock_refuses_writes_until_it_is_released(opened: Store) -> None:
    """Each write fails after a moment with the fault `busy`."""
    with closing(sqlite3.connect(opened.path, isolation_level=None)) as stranger:
        stranger.execute("BEGIN IMMEDIATE")
        error = await refused(opened, 3)
        at_once = await refused(opened, 3)
        during = await stored(opened)
    await healed(opened)
    await report(opened, 3)

    assert (error.details["fault"], at_once.details["fault"]) == ("busy", "busy")
    assert during == ([1, 2], 2)
    assert await stored(opened) == ([1, 2, 3], 3)


async def test_after_an_io_error_the_database_is_reopened(opened: Store) -> None:
    """A failed write never counts as stored. Senders that retry lose nothing and repeat nothing."""
    published: list[StoredEvent] = []
    opened.on_committed(published.extend)
    with largest_file(opened.status().wal_bytes + 50_000):
        error = await refused(opened, *range(3, 103), size=5000)
        again = await refused(opened, *range(3, 103), size=5000)
    await healed(opened)
    seqs, acked = await stored(opened)
    await report(opened, *range(acked + 1, 103), size=10)

    assert (error.details["fault"], again.details["fault"]) == ("io", "io")
    assert seqs == list(range(1, acked + 1))
    assert await stored(opened) == (list(range(1, 103)), 102)
    assert [event.seq for event in published] == list(range(3, 103))


async def test_a_replaced_database_is_not_written_to(opened: Store, tmp_path: Path) -> None:
    """After reopening, the store must find its own journal."""
    other = tmp_path / "other" / "hutch.db"
    other.parent.mkdir()
    async with Store.open(other):
        pass
    with largest_file(8192):  # too small for the store to recover meanwhile
        await refused(opened, *range(3, 103), size=5000)
        other.replace(opened.path)
        opened.path.with_name("hutch.db-wal").unlink()
    with anyio.fail_after(30):
        while "another database" not in opened.status().detail:
            await anyio.sleep(0.01)

    error = await refused(opened, 3)
    assert error.details["fault"] == "corrupt"


async def test_damage_seen_by_a_reader_stops_all_writes(tmp_path: Path) -> None:
    """Nothing is written to a damaged file, not even the log, until a user acts."""
    path = tmp_path / "hutch.db"
    overwrite = "import os, sys; f = open(sys.argv[1], 'r+b'); f.seek(8192); f.write(os.urandom(1_000_000))"
    async with Store.open(path) as store:
        await with_session(store)
        await report(store, *range(1, 301), size=5000)
    async with Store.open(path) as store:
        await report(store, 301)
        subprocess.run([sys.executable, "-c", overwrite, str(path)], check=True)
        damaged = path.stat()
        with pytest.raises(HutchError) as caught:
            await store.read(lambda conn: conn.execute("SELECT sum(length(body)) FROM events").fetchone())
        error = await refused(store, 302)

        assert caught.value.reason is Reason.STORE_UNAVAILABLE
        assert error.details["fault"] == "corrupt"
        assert "hutch doctor" in store.status().detail
    assert path.stat().st_mtime_ns == damaged.st_mtime_ns
    assert path.with_name("hutch.db-wal").stat().st_size > 0


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of 4 MB."""
    mount = tmp_path / "tiny"
    mount.mkdir()
    if os.geteuid() != 0:
        pytest.skip("mounting takes root")
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(mount)], check=False).returncode:
        pytest.skip("kernel: mounting is not allowed here")
    try:
        yield mount
    finally:
        subprocess.run(["umount", "-l", str(mount)], check=True)


def fill(folder: Path, but: int = 0) -> Path:
    """Fill a file system except for `but` bytes; return the file that takes the space."""
    filler = folder / "filler"
    disk = os.statvfs(folder)
    with filler.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, disk.f_bavail * disk.f_frsize - but)
    return filler


async def test_the_store_recovers_when_a_full_file_system_has_space_again(tiny: Path) -> None:
    """Meanwhile writes get `store_unavailable`, and reads work."""
    async with Store.open(tiny / "hutch.db") as store:
        await with_session(store)
        await report(store, 1)
        filler = fill(tiny, but=8192)
        error = await refused(store, 2, 3, size=50_000)
        during = await stored(store)
        filler.unlink()
        await healed(store)
        await report(store, 2, 3, size=50_000)

        assert error.details["fault"] in {"full", "io"}
        assert during == ([1], 1)
        assert await stored(store) == ([1, 2, 3], 3)


async def test_a_large_log_is_checkpointed_on_a_full_file_system(tiny: Path) -> None:
    """The reserve provides the space that the log needs before it can shrink."""
    async with Store.open(tiny / "hutch.db") as store:
        await with_session(store)
        with closing(sqlite3.connect(f"file:{store.path}?mode=ro", uri=True)) as reader:
            reader.execute("BEGIN")
            reader.execute("SELECT count(*) FROM events").fetchone()
            for n in range(1, 9):
                await report(store, n, size=100_000)
            filler = fill(tiny)
            large = store.status().wal_bytes
        await refused(store, 9, size=600_000)
        with anyio.fail_after(30):
            while store.status().wal_bytes > large / 4:
                await anyio.sleep(0.01)
        filler.unlink()
        await healed(store)
        await report(store, 9, size=600_000)

        assert large > 800_000
        assert (await stored(store))[1] == 9


async def test_the_reserve_exists_while_the_store_is_open(tiny: Path) -> None:
    """A start frees it, even after a kill; while no hutchd runs, others can use the space."""
    reserve = tiny / "hutch.db-reserve"
    reserve.write_bytes(bytes(3_900_000))
    async with Store.open(tiny / "hutch.db"):
        size = reserve.stat().st_size

    assert size == 1 << 20
    assert not reserve.exists()
