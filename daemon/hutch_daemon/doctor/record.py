"""Examines hutchd's state directory: its permissions, the database, the master key, and the free space."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Final

from hutch_daemon.doctor.finding import Finding
from hutch_daemon.doctor.space import space
from hutch_daemon.keys.master import MasterKeyError, load_master_keys, master_file
from hutch_daemon.settings import Settings
from hutch_daemon.store import database, keys
from hutch_daemon.store.faults import StoreFault, fault_of
from hutch_shared.errors import HutchError
from hutch_shared.host_mark import MARK
from hutch_shared.paths import Paths

__all__ = ["examine_record"]

_CHECK_SECONDS: Final = 60.0


def examine_record(paths: Paths, settings: Settings) -> Iterator[Finding]:
    """Examine the state directory, as the account that owns it."""
    if not paths.state.exists():
        yield Finding(f"state: {paths.state} does not exist yet; hutchd makes it")
        return
    yield _private(paths.state)
    if paths.state.is_dir() and os.access(paths.state, os.R_OK | os.X_OK):
        yield from _database(paths.state / "hutch.db")
        yield _master_key(paths, settings)
        yield space(paths.state, "", "on a full disk hutchd accepts nothing. It goes on by itself afterwards.")


def _private(folder: Path) -> Finding:
    """Check that only the owner can read or change a directory and its entries; everybody may read a host's mark."""
    try:
        open_to_others = [path for path in (folder, *folder.iterdir()) if path.lstat().st_mode & _forbidden(path)]
        foreign = [path for path in folder.iterdir() if path.lstat().st_uid != folder.lstat().st_uid]
    except OSError as error:
        return Finding(f"state: {folder}", f"It cannot be examined: {error.strerror}. Ask its owner.")
    advice = None
    if open_to_others:
        advice = f"Other accounts can read or change {_few(open_to_others)}: forbid that with `chmod go=`."
    elif foreign:
        advice = f"{_few(foreign)} belongs to another account than the directory: give it back with `chown`."
    return Finding(f"state: {folder}", advice)


def _forbidden(path: Path) -> int:
    return 0o022 if path.name == MARK else 0o066


def _database(path: Path) -> Iterator[Finding]:
    subject = f"database: {path}"
    if not path.exists() and not database.wal_of(path).exists():
        yield Finding(f"{subject} does not exist yet; hutchd makes it")
        return
    size = path.stat().st_size if path.exists() else 0
    try:
        if not size:
            raise sqlite3.DatabaseError("it is empty, or missing while its write-ahead log exists")
        with closing(database.connect_reader(path)) as conn:
            database.check(conn, path, seconds=_CHECK_SECONDS)
            schema = conn.execute("PRAGMA user_version").fetchone()[0]
    except HutchError as error:
        named = error.details.get("detail")
        yield Finding(subject, _recovery(path, str(named)) if named is not None else error.message)
    except sqlite3.Error as error:
        damaged = fault_of(error) in (None, StoreFault.CORRUPT)
        yield Finding(subject, _recovery(path, str(error)) if damaged else f"It cannot be read: {error}.")
    else:
        yield Finding(f"{subject}, {size:,} bytes, schema {schema}, sound")
    kept = sorted(path.parent.glob(f"{path.name}.before-restore-*[0-9a-f]"))
    if kept:
        yield Finding(f"kept from earlier restores: {_few(kept)}; remove them when you no longer need them")


def _recovery(path: Path, damage: str) -> str:
    wal = database.wal_of(path)
    return (
        f"It is damaged ({damage}). It was left as it is: {path}"
        + (f" with {wal.name} beside it" if wal.exists() else "")
        + ". To recover: `hutch daemon stop` if hutchd runs, then `hutch daemon restore BACKUP`, which keeps this file"
        " too. Without a backup, move it and its -wal away: hutchd then starts with an empty database."
    )


def _master_key(paths: Paths, settings: Settings) -> Finding:
    path = master_file(paths, settings)
    if settings.keys.keyring or "CREDENTIALS_DIRECTORY" in os.environ:
        return Finding("master key: not a file; `hutch status` says where a running hutchd got it")
    if path.exists():
        try:
            return Finding(f"master key: {load_master_keys(path).source}")
        except MasterKeyError as error:
            return Finding(f"master key: {path}", f"{error}.")
    if _keys_stored(paths.state / "hutch.db"):
        return Finding(
            f"master key: {path} is missing",
            "Without it no stored key can be opened: restore it from your copy before hutchd makes another one, or add"
            " the keys again.",
        )
    return Finding(f"master key: {path} does not exist yet; hutchd makes it")


def _keys_stored(path: Path) -> bool:
    try:
        with closing(database.connect_reader(path)) as conn:
            return bool(keys.list_(conn))
    except sqlite3.Error:
        return False


def _few(paths: list[Path]) -> str:
    names = ", ".join(str(path) for path in paths[:3])
    return names if len(paths) <= 3 else f"{names} and {len(paths) - 3} more"
