"""Backs up the whole database, and restores a backup."""

from __future__ import annotations

import math
import os
import secrets
import sqlite3
from contextlib import closing, suppress
from pathlib import Path

from hutch_daemon.store import database, keys, meta
from hutch_daemon.store.faults import StoreFault, fault_of, fault_of_os, unavailable
from hutch_daemon.store.lock import hold
from hutch_shared.errors import HutchError, Reason
from hutch_shared.ids import new_id

__all__ = ["copy", "erase", "restore"]

_ASIDE = ".before-restore-"


def copy(source: Path, target: Path) -> int:
    """Copy the database at `source`, which may be in use, to the new file `target` (0600); return its size in bytes.

    The copy is durable when this returns. HutchError, without leaving a `target`: CONFLICT if `target` exists,
    STORE_UNAVAILABLE if a disk fails.
    """
    try:
        os.close(os.open(target, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600))
    except FileExistsError:
        raise HutchError(Reason.CONFLICT, f"{target} exists; a backup never overwrites a file.") from None
    except OSError as error:
        raise unavailable(fault_of_os(error), str(error)) from error
    try:
        with closing(database.connect_reader(source)) as old, closing(sqlite3.connect(target)) as new:
            new.execute("PRAGMA synchronous = FULL")
            old.backup(new)
            new.execute("PRAGMA journal_mode = DELETE")  # so the copy has no log beside it
        database.sync_directory(target.parent)
        return target.stat().st_size
    except BaseException as error:
        with suppress(FileNotFoundError):
            target.unlink()
        if isinstance(error, OSError):
            raise unavailable(fault_of_os(error), str(error)) from error
        if isinstance(error, sqlite3.Error):
            raise unavailable(fault_of(error) or StoreFault.IO, str(error)) from error
        raise


def restore(backup: Path, path: Path) -> Path | None:
    """Replace the database at `path`, which must not be in use, with `backup`; return the path of the old database.

    The journal gets a new id; tokens and leases of executors become invalid; turns that were active fail as
    `outcome_unknown`. HutchError, without changing anything: NOT_FOUND if `backup` does not exist, WRONG_STATE while a
    hutchd runs, STORE_UNAVAILABLE if the backup is damaged.
    """
    if not backup.is_file():
        raise HutchError(Reason.NOT_FOUND, f"There is no file {backup}.")
    draft = path.with_name(f"{path.name}.restored")
    with hold(path.with_name(path.name + ".lock"), restores=True):
        with suppress(FileNotFoundError):
            draft.unlink()
        copy(backup, draft)
        database.prepare(draft)
        with closing(database.connect_writer(draft)) as conn:
            database.check(conn, draft, seconds=math.inf)
            conn.execute("BEGIN IMMEDIATE")
            meta.put(conn, "journal", new_id("journal"))
            conn.execute(
                "UPDATE executors SET token_hash = randomblob(32), token_until = 0, session = NULL, state = 'gone'"
            )
            conn.execute(
                "UPDATE turns SET state = 'failed', reason = 'outcome_unknown', message = 'Restored from a backup.'"
                " WHERE state IN ('dispatching', 'running', 'stopping')"
            )
            conn.execute("UPDATE permissions SET state = 'withdrawn', settled_by = 'restore' WHERE state = 'pending'")
            conn.execute("COMMIT")
            database.truncate_wal(conn)
        aside = _move_aside(path)
        draft.replace(path)
        database.sync_directory(path.parent)
        return aside


def erase(path: Path, key: str) -> list[Path]:
    """Remove a credential from the databases that restores of `path` moved aside; return those that still have it."""
    left = []
    for aside in path.parent.glob(f"{path.name}{_ASIDE}????????"):
        try:
            with closing(database.connect_writer(aside)) as conn:
                conn.execute("BEGIN IMMEDIATE")
                keys.erase(conn, key)
                conn.execute("COMMIT")
                if not database.truncate_wal(conn):
                    left.append(aside)
        except sqlite3.Error:
            left.append(aside)
    return left


def _move_aside(path: Path) -> Path | None:
    """Rename the database and its log instead of deleting them; return the new name."""
    if not path.exists():
        return None
    aside = path.with_name(f"{path.name}{_ASIDE}{secrets.token_hex(4)}")
    with suppress(FileNotFoundError):
        database.wal_of(path).replace(database.wal_of(aside))
    with suppress(FileNotFoundError):
        path.with_name(path.name + "-shm").unlink()
    path.replace(aside)
    return aside
