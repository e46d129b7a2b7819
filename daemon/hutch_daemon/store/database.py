"""The database file: create it, open it, check it, migrate it to the latest schema. No threads.

A new database is created under another name and renamed when it is complete. So a file at the path without a valid
header is damaged, never new. An existing database is migrated step by step, each step in one transaction. While a
connection is open, the process must not open the file by other means: closing any descriptor of the file would release
all locks that the process holds on it.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from importlib import resources
from pathlib import Path
from typing import Final

from hutch_daemon.store import meta
from hutch_daemon.store.faults import StoreFault, fault_of, fault_of_os, unavailable
from hutch_shared.errors import HutchError, Reason
from hutch_shared.failpoints import failpoint
from hutch_shared.ids import new_id

__all__ = ["LATEST", "check", "connect_reader", "connect_writer", "prepare", "sync_directory", "truncate_wal", "wal_of"]

_APPLICATION: Final = 0x48746368  # "Htch": distinguishes our files from other SQLite databases
_BUSY_MS: Final = 250
_CHECK_SECONDS: Final = 0.5


def _migrations() -> list[tuple[int, str]]:
    folder = resources.files("hutch_daemon.store").joinpath("migrations")
    found = [(int(file.name[:4]), file.read_text("utf-8")) for file in folder.iterdir() if file.name.endswith(".sql")]
    return sorted(found)


LATEST: Final = max(number for number, _ in _migrations())
"""The number of the latest schema that this code knows."""


def wal_of(path: Path) -> Path:
    """Return the path of the write-ahead log of the database at `path`."""
    return path.with_name(path.name + "-wal")


def prepare(path: Path) -> None:
    """Create, or check and migrate, the database at `path`. Its directory must exist and be locked.

    HutchError(STORE_UNAVAILABLE) if the database is damaged, has a newer schema or is not Hutch's; if the disk fails.
    """
    try:
        if not path.exists():
            _make(path)
        if path.stat().st_size == 0:
            raise unavailable(StoreFault.CORRUPT, f"{path} is empty")
        with closing(connect_reader(path)) as conn:  # closing a reader does not write to a file that may be damaged
            check(conn, path)
        with closing(connect_writer(path)) as conn:
            for number, script in _migrations():
                if number > conn.execute("PRAGMA user_version").fetchone()[0]:
                    _migrate(conn, number, script)
    except sqlite3.Error as error:
        raise unavailable(fault_of(error) or StoreFault.IO, f"{path}: {error}") from error
    except OSError as error:
        raise unavailable(fault_of_os(error), str(error)) from error


def connect_writer(path: Path) -> sqlite3.Connection:
    """Open the read-write connection. A commit is on the disk when it returns. Never creates a file.

    Deleted content is overwritten with zeros.
    """
    return _connect(
        path,
        "rw",
        "journal_mode = WAL",
        "synchronous = FULL",
        "foreign_keys = ON",
        "cache_size = -16384",
        "secure_delete = ON",
    )


def connect_reader(path: Path) -> sqlite3.Connection:
    """Open a read-only connection. Any thread may use it, but only one at a time."""
    return _connect(path, "ro", "query_only = ON")


def truncate_wal(conn: sqlite3.Connection) -> bool:
    """Write the whole write-ahead log into the database, sync, and empty the log; False if a reader prevents it."""
    busy: int = conn.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
    return not busy


def sync_directory(folder: Path) -> None:
    """Make the names in `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _connect(path: Path, mode: str, *settings: str) -> sqlite3.Connection:
    conn = sqlite3.connect(
        f"{path.absolute().as_uri()}?mode={mode}", uri=True, isolation_level=None, check_same_thread=False
    )
    try:
        for setting in (f"busy_timeout = {_BUSY_MS}", *settings):
            conn.execute(f"PRAGMA {setting}")
    except BaseException:
        conn.close()
        raise
    return conn


def _make(path: Path) -> None:
    if wal_of(path).exists():
        raise unavailable(StoreFault.CORRUPT, f"{path} is gone, but its write-ahead log is there")
    draft = path.with_name(path.name + ".new")
    for leftover in (
        draft,
        wal_of(draft),
        draft.with_name(draft.name + "-shm"),
        draft.with_name(draft.name + "-journal"),
    ):
        with suppress(FileNotFoundError):
            leftover.unlink()
    os.close(os.open(draft, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600))
    with closing(connect_writer(draft)) as conn:
        conn.execute(f"PRAGMA application_id = {_APPLICATION}")
        for number, script in _migrations():
            _migrate(conn, number, script)
        meta.put(conn, "journal", new_id("journal"))
    failpoint("store.before_new_database")
    draft.replace(path)
    sync_directory(path.parent)


def _migrate(conn: sqlite3.Connection, number: int, script: str) -> None:
    failpoint("store.before_migration")
    try:
        conn.executescript(f"BEGIN IMMEDIATE;\n{script}\nPRAGMA user_version = {number};")
        failpoint("store.in_migration")
        conn.execute("COMMIT")
    except BaseException:
        if conn.in_transaction:
            conn.execute("ROLLBACK")
        raise


def check(conn: sqlite3.Connection, path: Path, *, seconds: float = _CHECK_SECONDS) -> None:
    """Check that the database is Hutch's and has a known schema, and look for damage for up to `seconds`.

    HutchError(STORE_UNAVAILABLE) otherwise, with `detail` if it is damaged; sqlite3.Error if it cannot be read.
    """
    application = conn.execute("PRAGMA application_id").fetchone()[0]
    schema = conn.execute("PRAGMA user_version").fetchone()[0]
    if application != _APPLICATION or schema == 0:
        raise unavailable(StoreFault.CORRUPT, f"{path} is not a database of Hutch")
    if schema > LATEST:
        raise HutchError(
            Reason.STORE_UNAVAILABLE,
            f"The database was written by a newer Hutch (schema {schema}, this one knows {LATEST}); update Hutch.",
            schema=schema,
            known=LATEST,
        )
    damage = next(_damage(conn, seconds), None)
    if damage is not None:
        raise unavailable(StoreFault.CORRUPT, f"{path}: {damage}")


def _damage(conn: sqlite3.Connection, seconds: float) -> Iterator[str]:
    """Yield the damage that `quick_check` finds within `seconds`. It may check only a part of a large database."""
    until = time.monotonic() + seconds
    conn.set_progress_handler(lambda: time.monotonic() > until, 1000)
    try:
        for (line,) in conn.execute("PRAGMA quick_check(1)"):
            if line != "ok":
                yield line
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode != sqlite3.SQLITE_INTERRUPT:
            raise
    finally:
        conn.set_progress_handler(None, 0)
