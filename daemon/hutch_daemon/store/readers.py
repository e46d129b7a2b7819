"""Short reads beside the writer, on a few read-only connections. Each read has a consistent snapshot and a deadline.

While a snapshot is open, the write-ahead log cannot shrink. So SQLite interrupts a read at its deadline.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

from hutch_daemon.store.database import connect_reader
from hutch_daemon.store.faults import StoreFault, fault_of, unavailable
from hutch_shared.errors import HutchError, Reason

__all__ = ["Readers"]

T = TypeVar("T")
_READ_SECONDS: Final = 5.0
_REOPENING: Final = 10.0
"""Seconds that a read waits while the writer reopens the database."""
_STEPS: Final = 10_000
"""The number of SQLite's virtual machine steps between two checks of the deadline: well below a millisecond."""


class Readers:
    """The read-only connections, opened on demand. All methods block and may be called from any thread."""

    def __init__(self, path: Path, *, seconds: float = _READ_SECONDS) -> None:
        """Read the database at `path`; no read lasts longer than `seconds`."""
        self._path = path
        self._seconds = seconds
        self._changed = threading.Condition()
        self._idle: list[sqlite3.Connection] = []
        self._busy: set[sqlite3.Connection] = set()
        self._open = True

    def run(self, unit: Callable[[sqlite3.Connection], T]) -> T:
        """Run `unit` on one snapshot and return its result.

        HutchError: TIMED_OUT if it takes too long, STORE_UNAVAILABLE if the disk fails or the writer does not reopen
        the database in time.
        """
        try:
            conn = self._take()
            try:
                until = time.monotonic() + self._seconds
                conn.set_progress_handler(lambda: time.monotonic() > until, _STEPS)
                conn.execute("BEGIN")
                try:
                    return unit(conn)
                finally:
                    if conn.in_transaction:
                        conn.execute("ROLLBACK")
            finally:
                self._give_back(conn)
        except sqlite3.Error as error:
            if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_INTERRUPT:
                raise HutchError(Reason.TIMED_OUT, "The record could not be read in time; ask for less.") from error
            fault = fault_of(error)
            if fault is None:
                raise
            raise unavailable(fault, str(error)) from error

    def close(self, wait: float = 1.0) -> bool:
        """Interrupt all reads and close their connections. Later reads wait for `reopen`.

        Return False if a read did not end within `wait` seconds.
        """
        with self._changed:
            self._open = False
            for conn in self._busy:
                conn.interrupt()
            ended = self._changed.wait_for(lambda: not self._busy, wait)
            while self._idle:
                self._idle.pop().close()
            return ended

    def reopen(self) -> None:
        """Accept reads again after `close`."""
        with self._changed:
            self._open = True
            self._changed.notify_all()

    def _take(self) -> sqlite3.Connection:
        with self._changed:
            if not self._changed.wait_for(lambda: self._open, _REOPENING):
                raise unavailable(StoreFault.IO, "the database is closed")
            conn = self._idle.pop() if self._idle else connect_reader(self._path)
            self._busy.add(conn)
            return conn

    def _give_back(self, conn: sqlite3.Connection) -> None:
        conn.set_progress_handler(None, 0)
        with self._changed:
            self._busy.discard(conn)
            if self._open and not conn.in_transaction:
                self._idle.append(conn)
            else:
                conn.close()
            self._changed.notify_all()
