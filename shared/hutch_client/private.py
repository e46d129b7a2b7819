"""The caller's own hutchd on a host that has one for everybody: whether it has sessions.

Looks into its database and dials nothing, because a service manager may start a hutchd when a client connects.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Final, NamedTuple

from hutch_client.tables import count
from hutch_shared.host_mark import is_marked
from hutch_shared.paths import find_paths

__all__ = ["PrivateRecord", "private_record"]

_WAIT: Final = 0.2
"""Seconds to wait for a database that is locked."""


class PrivateRecord(NamedTuple):
    """The record of the caller's own hutchd, which may be running or not."""

    state: Path
    sessions: int
    """The number of open sessions."""

    def __str__(self) -> str:
        return f"your own hutchd has {count(self.sessions, 'open session')}; `hutch --private ps` lists them"


def private_record() -> PrivateRecord | None:
    """Return the record of the caller's own hutchd if it has open sessions. Starts and changes nothing."""
    state = find_paths({name: value for name, value in os.environ.items() if name != "HUTCH_HOST"}).state
    database = state / "hutch.db"
    if is_marked(state) or not database.is_file():  # a marked one is the host's, which HUTCH_STATE_DIR names
        return None
    import sqlite3  # late: most users of a host have no hutchd of their own

    # without a write-ahead log nothing has the database open, and SQLite must not make one
    immutable = "" if database.with_name("hutch.db-wal").exists() else "&immutable=1"
    uri = f"{database.absolute().as_uri()}?mode=ro{immutable}"
    try:
        with contextlib.closing(sqlite3.connect(uri, uri=True, timeout=_WAIT)) as conn:
            (sessions,) = conn.execute("SELECT count(*) FROM sessions WHERE state = 'open'").fetchone()
    except sqlite3.Error:
        return None  # damaged, or of a hutchd that is being started: `hutch --private doctor` examines it
    return PrivateRecord(state, sessions) if sessions else None
