"""The writer thread: takes units of work, commits them in groups, and delivers each unit's result.

A group consists of the units that wait when the thread becomes free; the next group gathers during a commit. So a lone
unit is never delayed, and a busy store makes few commits. A group has at most 256 units and takes at most 10 ms.

After a fault (`faults`) the open transaction is rolled back and none of its units is acknowledged. A failed sync is
never repeated: the writer closes and reopens the database, and writes the commits in the write-ahead log into the
database with a new sync before it continues. A refused group may turn out to be stored, if its bytes reached the log
and the log's index was lost. Then its events are published and its effects run, and callers that retry are recognised
as duplicates.

A unit that removes secret bytes (`Tx.erases`) makes the writer empty the write-ahead log after the commit. While a
reader prevents that, the writer tries again, less and less often; `erased` reports when it is done.
"""

from __future__ import annotations

import logging
import os
import queue
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import structlog

from hutch_daemon.store import events, meta
from hutch_daemon.store.database import connect_reader, connect_writer, truncate_wal, wal_of
from hutch_daemon.store.faults import Cure, StoreFault, fault_of, fault_of_os, unavailable
from hutch_daemon.store.readers import Readers
from hutch_daemon.store.records import Effect, Tx
from hutch_daemon.store.reserve import Reserve
from hutch_daemon.store.rows import StoredEvent
from hutch_shared.conditions import Conditions
from hutch_shared.failpoints import failpoint

__all__ = ["Job", "JobResult", "StoreLimits", "Writer"]

log = structlog.get_logger("hutchd.store")

_GROUP_SECONDS: Final = 0.010
_GROUP_UNITS: Final = 256
_LOG_PAGES: Final = 1000
"""The number of pages in the log at which SQLite starts a checkpoint; fewer on a small disk."""
_HEAL_SECONDS: Final = 0.5
_TRUNCATE_SECONDS: Final = 1.0
_ERASE_SECONDS: Final = (0.25, 5.0)
"""The first and the longest pause between two attempts to empty the log. Each attempt may take 0.25 s."""


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """Limits of the store: sizes in bytes, times in seconds."""

    wal: int = 64 << 20
    """The size above which the write-ahead log is emptied as soon as no reader uses it."""
    wal_held: int = 512 << 20
    """The size of the log above which the store refuses all writes until no reader uses the log."""
    read_seconds: float = 5.0
    """The longest time that a read may take."""


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """A unit of work and the future that receives its result."""

    unit: Callable[[Tx], Any]
    receipt: Any


@dataclass(frozen=True, slots=True)
class JobResult:
    """The result of a job: a value or an error."""

    job: Job
    value: Any = None
    error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class _WhenErased:
    """Asks for a result once no removed secret bytes are left in the log."""

    job: Job


Deliver = Callable[[list[StoredEvent], list[Effect], list[JobResult]], None]
"""Called with a commit's events, its effects and the results of its units."""


class Writer:
    """Owns the read-write connection. `run` is the thread; the other methods may be called from any thread."""

    def __init__(
        self,
        path: Path,
        readers: Readers,
        deliver: Deliver,
        policy_changed: Callable[[int], object],
        limits: StoreLimits,
        reserve: Reserve,
    ) -> None:
        """Open the database at `path` (see `database.prepare`), start a new epoch and take the reserve.

        `policy_changed(owner)` is an effect of units that change the data by which calls are judged.
        sqlite3.Error if the database cannot be opened.
        """
        self.fault: StoreFault | None = None
        self.detail = ""
        self.position = 0
        """The position of the newest committed event."""
        self._path = path
        self._wal = wal_of(path)
        self._readers = readers
        self._deliver = deliver
        self._policy_changed = policy_changed
        self._limits = limits
        self._inbox: queue.SimpleQueue[Job | StoreFault | _WhenErased | None] = queue.SimpleQueue()
        self._stopping = False
        self._heal_at = 0.0
        self._truncate_at = 0.0
        self._erase_pause: float | None = None
        """The pause before the next attempt to empty the log; None if nothing must be erased from it."""
        self._erase_at = 0.0
        self._when_erased: list[Job] = []
        self._refused: Tx | None = None
        """The last transaction whose commit failed. Reopening the database may show that it was stored."""
        self._reserve = reserve
        self._conditions = Conditions(logging.getLogger("hutchd.store"))
        self._conn = self._connect()
        try:
            self._empty_wal()
            self.journal = str(meta.get(self._conn, "journal"))
            self.epoch = int(meta.get(self._conn, "epoch") or 0) + 1
            meta.put(self._conn, "epoch", str(self.epoch))
            self.position = events.seq_range(self._conn, events.EVERY).head
        except BaseException:
            self._conn.close()
            raise
        reserve.take()

    def _connect(self) -> sqlite3.Connection:
        conn = connect_writer(self._path)
        conn.execute(f"PRAGMA journal_size_limit = {self._limits.wal}")
        pages = self._reserve.log // conn.execute("PRAGMA page_size").fetchone()[0]
        conn.execute(f"PRAGMA wal_autocheckpoint = {max(1, min(_LOG_PAGES, pages))}")
        return conn

    def put(self, job: Job) -> None:
        """Hand over a job; its result is delivered later."""
        self._inbox.put(job)

    def report(self, fault: StoreFault) -> None:
        """Report damage that a reader found. The writer then stops writing."""
        self._inbox.put(fault)

    def when_erased(self, receipt: Any) -> None:
        """Deliver None to `receipt` once the secret bytes that were removed until now have left the log."""
        self._inbox.put(_WhenErased(Job(_nothing, receipt)))

    def stop(self) -> None:
        """End `run` after the jobs that were handed over before."""
        self._inbox.put(None)

    def run(self) -> None:
        """Process jobs until `stop`; then close the database."""
        try:
            while not self._stopping:
                self._turn()
        finally:
            self._close()

    def _close(self) -> None:
        self._readers.close()
        if self.fault is StoreFault.CORRUPT:
            with suppress(sqlite3.Error), self._log_in_use():
                self._conn.close()
        with suppress(sqlite3.Error):
            self._conn.close()
        self._reserve.release()

    def _turn(self) -> None:
        """Take one item from the inbox and process it, or do what is due: recover from a fault, empty the log."""
        try:
            item = self._inbox.get(timeout=self._pause())
        except queue.Empty:
            if self.fault is None:
                self._erase()
            else:
                self._heal()
            return
        if item is None:
            self._stopping = True
        elif isinstance(item, StoreFault):
            self._fail(item, "seen by a reader")
        elif isinstance(item, _WhenErased):
            self._when_erased.append(item.job)
            self._erase()
        elif self.fault is not None:
            self._deliver([], [], [JobResult(item, error=unavailable(self.fault, self.detail))])
        else:
            self._commit_group(item)
            self._erase()
            self._bound_wal()

    def _pause(self) -> float | None:
        """Return the seconds until something is due without a new item; None if nothing is."""
        if self.fault is not None:
            return max(0.0, self._heal_at - time.monotonic())
        return None if self._erase_pause is None else max(0.0, self._erase_at - time.monotonic())

    def _commit_group(self, first: Job) -> None:
        jobs = [first]
        tx = Tx(self._conn, self._policy_changed)
        try:
            self._conn.execute("BEGIN IMMEDIATE")
            results = self._run_group(jobs, tx)
            failpoint("store.before_commit")
            self._conn.execute("COMMIT")
        except sqlite3.Error as error:
            self._fail(fault_of(error) or StoreFault.IO, str(error))
            refused = [JobResult(job, error=unavailable(self.fault or StoreFault.IO, self.detail)) for job in jobs]
            self._refused = tx
            self._deliver([], [], refused)
            return
        failpoint("store.after_commit")
        if tx.erases:
            self._erase_pause, self._erase_at = _ERASE_SECONDS[0], 0.0
        if tx.events:
            self.position = tx.events[-1].position
        if results:
            self._deliver(tx.events, tx.effects, results)

    def _run_group(self, jobs: list[Job], tx: Tx) -> list[JobResult]:
        """Run the first job and the waiting jobs, which are appended to `jobs`. sqlite3.Error as from `_run`."""
        results: list[JobResult] = []
        until = time.monotonic() + _GROUP_SECONDS
        while True:
            results.append(self._run(jobs[-1], tx))
            if len(jobs) >= _GROUP_UNITS or time.monotonic() >= until:
                return results
            following = self._next()
            if following is None:
                return results
            jobs.append(following)

    def _next(self) -> Job | None:
        """Return the next waiting job that may join the group, or None."""
        with suppress(queue.Empty):
            item = self._inbox.get_nowait()
            if isinstance(item, Job):
                return item
            if item is None:
                self._stopping = True
            else:
                self._inbox.put(item)
        return None

    def _run(self, job: Job, tx: Tx) -> JobResult:
        """Run a unit in its savepoint. sqlite3.Error if the disk fails, which loses the whole group."""
        events_before, effects_before = len(tx.events), len(tx.effects)
        self._conn.execute("SAVEPOINT unit")
        try:
            value = job.unit(tx)
        except Exception as error:
            if fault_of(error) is not None or not self._conn.in_transaction:
                raise
            del tx.events[events_before:]
            del tx.effects[effects_before:]
            self._conn.execute("ROLLBACK TO unit")
            self._conn.execute("RELEASE unit")
            return JobResult(job, error=error)
        self._conn.execute("RELEASE unit")
        return JobResult(job, value)

    def _fail(self, fault: StoreFault, detail: str) -> None:
        """Refuse writes from now on, and roll back the open transaction."""
        if self.fault is None or fault.cure is Cure.NONE:
            self.fault, self.detail = fault, detail
        self._conditions.begin("store", f"store_unavailable: {self.fault.name.lower()}: {self.detail}")
        self._heal_at = time.monotonic() + _HEAL_SECONDS
        with suppress(sqlite3.Error):
            if self._conn.in_transaction:
                self._conn.execute("ROLLBACK")

    def _heal(self) -> None:
        assert self.fault is not None
        self._heal_at = time.monotonic() + _HEAL_SECONDS
        try:
            if self.fault.cure is Cure.NONE:
                return
            if self.fault.cure is Cure.REOPEN and not self._reopen():
                return
            if self.fault is StoreFault.HELD and not truncate_wal(self._conn):
                return
            if self.fault is StoreFault.FULL and not self._make_room():
                self._conditions.begin("store", f"store_unavailable: full: {self.detail}")
                return
            meta.put(self._conn, "probe", str(time.time_ns()))
        except sqlite3.Error as error:
            self._fail(fault_of(error) or StoreFault.IO, str(error))
            return
        self._conditions.end("store", f"store_available after {self.fault.name.lower()}")
        self.fault, self.detail, self._refused = None, "", None

    def _make_room(self) -> bool:
        """Empty the log to free disk space; return whether there is enough to continue for some time."""
        self._reserve.release()
        self._empty_wal()
        if self._reserve.take(with_room=True):
            return True
        self._reserve.take()
        return False

    def _empty_wal(self) -> None:
        """Write as much of the log into the database as readers and the disk allow."""
        try:
            truncate_wal(self._conn)
        except sqlite3.Error as error:
            if fault_of(error) is not StoreFault.FULL:
                raise

    def _reopen(self) -> bool:
        """Close and reopen the database, make its content durable, and publish the stored events not published yet.

        Return False if this must be tried again. Until then reads work: the log's index, which is kept, does not
        contain the refused group.
        """
        ended = self._readers.close()
        try:
            if not ended:
                return False
            with self._log_in_use():
                with suppress(sqlite3.Error):
                    self._conn.close()
                self._conn = self._connect()
                if not truncate_wal(self._conn):
                    return False
            if meta.get(self._conn, "journal") != self.journal:
                self._fail(StoreFault.CORRUPT, "another database lies in its place")
                return False
        finally:
            if self.fault is not StoreFault.CORRUPT:
                self._readers.reopen()
        found = events.found_after(self._conn, self.position)
        self.position = events.seq_range(self._conn, events.EVERY).head
        self._deliver(found, self._effects_of_found(), [])
        return True

    def _effects_of_found(self) -> list[Effect]:
        """Return the effects of the refused transaction if its events turned out to be stored."""
        refused, self._refused = self._refused, None
        if refused is None or not refused.events or refused.events[-1].position > self.position:
            return []
        return refused.effects

    @contextmanager
    def _log_in_use(self) -> Iterator[None]:
        """Keep a reading connection open while the block closes the writing one.

        Without it, two things would go wrong: the last writing connection checkpoints the log when it closes, and a
        connection that opens an unused log takes every readable group in it as committed, even a refused one.
        """
        with closing(connect_reader(self._path)) as user:
            user.execute("PRAGMA user_version").fetchone()  # the cheapest statement that opens the log
            yield

    def _erase(self) -> None:
        """Empty the log if it may contain removed secret bytes and an attempt is due."""
        if self._erase_pause is not None and self.fault is None and time.monotonic() >= self._erase_at:
            try:
                if truncate_wal(self._conn):
                    self._erase_pause = None
            except sqlite3.Error as error:
                self._fail(fault_of(error) or StoreFault.IO, str(error))
        if self._erase_pause is None:
            erased, self._when_erased = self._when_erased, []
            if erased:
                self._deliver([], [], [JobResult(job) for job in erased])
        elif time.monotonic() >= self._erase_at:
            self._erase_at = time.monotonic() + self._erase_pause
            self._erase_pause = min(2 * self._erase_pause, _ERASE_SECONDS[1])

    def _bound_wal(self) -> None:
        """Empty a log that exceeds its limit. Refuse writes if readers prevent this and the log exceeds `wal_held`."""
        now = time.monotonic()
        try:
            size = os.stat(self._wal).st_size
            held = size > self._limits.wal_held
            if size <= self._limits.wal or (now < self._truncate_at and not held) or self.fault is not None:
                return
            self._truncate_at = now + _TRUNCATE_SECONDS
            if not truncate_wal(self._conn) and held:
                self._fail(StoreFault.HELD, f"{size} bytes")
        except sqlite3.Error as error:
            self._fail(fault_of(error) or StoreFault.IO, str(error))
        except OSError as error:
            self._fail(fault_of_os(error), str(error))


def _nothing(tx: Tx) -> None:
    """The unit of a job that only waits."""
