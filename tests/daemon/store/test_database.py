"""Databases that must not be opened, and the errors about them."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from hutch_daemon.store import database
from hutch_daemon.store.store import Store
from hutch_shared.errors import HutchError, Reason
from tests.daemon.store.examples import report, with_session


async def filled(path: Path) -> None:
    """Make a database with some content, closed cleanly."""
    async with Store.open(path) as store:
        await with_session(store)
        await report(store, *range(1, 101), size=2000)


async def refusal(path: Path) -> HutchError:
    with pytest.raises(HutchError) as caught:
        async with Store.open(path):
            pass
    assert caught.value.reason is Reason.STORE_UNAVAILABLE
    return caught.value


def halve(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def overwrite_beginning(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(b"not a database at all")


def overwrite_middle(path: Path) -> None:
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(os.urandom(size - 8192))


def another_application(path: Path) -> None:
    path.unlink()
    with closing(sqlite3.connect(path)) as conn:
        conn.execute("CREATE TABLE theirs (a)")


@pytest.mark.parametrize("harm", [halve, empty, overwrite_beginning, overwrite_middle, another_application])
async def test_damage_is_named_and_the_file_left_as_it_is(tmp_path: Path, harm: Callable[[Path], None]) -> None:
    """A damaged or foreign file is refused at the start, and no byte of it changes."""
    path = tmp_path / "hutch.db"
    await filled(path)
    harm(path)
    before = path.read_bytes()

    error = await refusal(path)

    assert "damaged" in error.message
    assert error.details["fault"] == "corrupt"
    assert str(path) in error.details["detail"] or "malformed" in error.details["detail"]
    assert path.read_bytes() == before


async def test_a_log_without_its_database_is_damage(tmp_path: Path) -> None:
    """hutchd does not create a new database beside an existing log."""
    path = tmp_path / "hutch.db"
    database.wal_of(path).write_bytes(b"x")

    error = await refusal(path)

    assert "write-ahead log" in error.details["detail"]
    assert not path.exists()


async def test_a_newer_schema_is_refused_with_both_numbers(tmp_path: Path) -> None:
    """An older Hutch does not open the database of a newer one."""
    path = tmp_path / "hutch.db"
    await filled(path)
    with closing(sqlite3.connect(path)) as conn:
        conn.execute(f"PRAGMA user_version = {database.LATEST + 1}")

    error = await refusal(path)

    assert error.details == {"schema": database.LATEST + 1, "known": database.LATEST}


async def test_remains_of_an_unfinished_first_start_are_replaced(tmp_path: Path) -> None:
    """A new database appears at its path only once it is complete."""
    path = tmp_path / "hutch.db"
    path.with_name("hutch.db.new").write_bytes(b"half")

    await filled(path)

    assert sorted(file.name for file in tmp_path.iterdir()) == ["hutch.db", "hutch.db.lock"]


async def test_a_missing_directory_is_an_error(tmp_path: Path) -> None:
    """The store creates files, not directories."""
    error = await refusal(tmp_path / "none" / "hutch.db")

    assert str(tmp_path / "none") in error.details["detail"]


async def test_commits_are_synced_and_foreign_keys_kept(store: Store) -> None:
    """The writing connection has the settings on which durability depends."""
    names = ("journal_mode", "synchronous", "foreign_keys")
    found = await store.write(lambda tx: [tx.execute(f"PRAGMA {name}").fetchone()[0] for name in names])

    assert found == ["wal", 2, 1]
