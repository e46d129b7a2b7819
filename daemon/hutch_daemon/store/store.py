"""The store: one SQLite database, one thread that writes, and short reads beside it.

What is always true:

- `write` returns after its commit reached the disk (WAL, synchronous=FULL). If it raises, nothing was acknowledged.
- Units that wait at the same time share a commit; each runs in its own savepoint. A lone unit commits at once.
- After each commit, in this order and on the event loop: its events go to the sinks, its effects run
  (`Tx.after_commit`), and the `write` calls of its units return. Commits are handled in their order.
- A read sees only whole commits.

While the store cannot write, it refuses each `write` at once. `faults` lists the causes and the cures.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final, TypeVar

import anyio
import structlog
from anyio import to_thread

from hutch_daemon.signals import Signal
from hutch_daemon.store import backups, database
from hutch_daemon.store.faults import StoreFault, fault_of, unavailable
from hutch_daemon.store.lock import hold
from hutch_daemon.store.readers import Readers
from hutch_daemon.store.records import Effect, Tx
from hutch_daemon.store.reserve import Reserve
from hutch_daemon.store.rows import StoredEvent
from hutch_daemon.store.writer import Job, JobResult, StoreLimits, Writer
from hutch_shared import messages as m
from hutch_shared.errors import HutchError, Reason
from hutch_shared.failpoints import failpoint

__all__ = ["Store", "StoreLimits", "Tx"]

log = structlog.get_logger("hutchd.store")

T = TypeVar("T")
Sink = Callable[[Sequence[StoredEvent]], None]

_WAITING_UNITS: Final = 1024
_MAX_CONCURRENT_READS: Final = 3
_LIMITS: Final = StoreLimits()


class Store:
    """The store, for use on the event loop. Use `Store.open` to create it."""

    def __init__(self, path: Path, limits: StoreLimits, reserve: Reserve) -> None:
        """Open a database that is prepared and locked."""
        self.path = path
        self._loop = asyncio.get_running_loop()
        self._sinks: list[Sink] = []
        self.policy_changed: Signal[[int]] = Signal()
        """Emitted with an owner after each commit that changes the data by which the owner's calls are judged.

        It is an effect of the commit (see `Tx.after_commit`).
        """
        self._room = anyio.Semaphore(_WAITING_UNITS, fast_acquire=True)
        self._read_limiter = anyio.CapacityLimiter(_MAX_CONCURRENT_READS)
        self._readers = Readers(path, seconds=limits.read_seconds)
        self._writer = Writer(path, self._readers, self._deliver, self.policy_changed.emit, limits, reserve)
        self.journal = self._writer.journal
        """The journal's id, which is part of each client's cursor. A restored database has a new id."""
        self.epoch = self._writer.epoch
        """The number of times that this journal was opened, including this time."""
        self._open = True
        self._writing = True

    @classmethod
    @asynccontextmanager
    async def open(cls, path: Path, *, limits: StoreLimits = _LIMITS) -> AsyncIterator[Store]:
        """Open the database at `path`, or create it in its existing directory, and start a new epoch.

        At the end of the block, commit the units that were already passed to `write`, run their effects, and close.
        HutchError: WRONG_STATE if another hutchd uses the database; STORE_UNAVAILABLE if the database is damaged or
        written by a newer Hutch, or if the disk fails.
        """
        with hold(path.with_name(path.name + ".lock")):
            reserve = Reserve(path)
            await to_thread.run_sync(database.prepare, path)
            try:
                store = cls(path, limits, reserve)
            except sqlite3.Error as error:
                raise unavailable(fault_of(error) or StoreFault.IO, f"{path}: {error}") from error
            try:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(store._run)
                    try:
                        yield store
                    finally:
                        store._close()
            except BaseExceptionGroup as group:
                if len(group.exceptions) > 1:
                    raise
                raise group.exceptions[0] from None  # the body's exception, unwrapped

    @property
    def available(self) -> bool:
        """True if no known fault prevents writing."""
        return self._writer.fault is None

    @property
    def writing(self) -> bool:
        """True while the writer thread runs. It also runs while a fault prevents writing."""
        return self._writing

    def on_committed(self, sink: Sink) -> None:
        """Call `sink` with the events of each commit that has events. It must neither block nor raise."""
        self._sinks.append(sink)

    async def write(self, unit: Callable[[Tx], T]) -> T:
        """Run `unit` on the writer thread in a transaction; return its result once it is durable.

        If the unit raises, only this unit is rolled back, and the exception is raised here. If the caller is cancelled,
        the unit still runs; use `Tx.after_commit` for work that must follow it. At most 1024 units wait; further
        callers block. HutchError: SHUTTING_DOWN after closing, STORE_UNAVAILABLE if the unit could not be made durable.
        After STORE_UNAVAILABLE the unit may be stored nevertheless, so a retry must check for duplicates.
        """
        async with self._room:
            self._check_open()
            if self._writer.fault is not None:
                raise unavailable(self._writer.fault, self._writer.detail)
            receipt: asyncio.Future[T] = self._loop.create_future()
            self._writer.put(Job(unit, receipt))
            return await receipt

    async def erased(self, key: str, seconds: float) -> tuple[Path, ...]:
        """Return the files that still contain sealed bytes of the removed or replaced credential `key`.

        Wait up to `seconds` for the write-ahead log; a reader may keep it in use. The writer
        empties it later. Databases that a restore moved aside are changed too.
        """
        left = list(await to_thread.run_sync(backups.erase, self.path, key))
        receipt: asyncio.Future[None] = self._loop.create_future()
        self._writer.when_erased(receipt)
        with anyio.move_on_after(seconds):
            await receipt
            return tuple(left)
        return (*left, database.wal_of(self.path))

    async def read(self, unit: Callable[[sqlite3.Connection], T]) -> T:
        """Run `unit` in a thread on one consistent snapshot; return its result. Keep units short: read in pages.

        Reads work while the store cannot write. A cancelled caller waits for the unit to end. HutchError: TIMED_OUT
        after `StoreLimits.read_seconds`, STORE_UNAVAILABLE if the disk fails.
        """
        self._check_open()
        try:
            return await to_thread.run_sync(self._readers.run, unit, limiter=self._read_limiter)
        except HutchError as error:
            if error.details.get("fault") == "corrupt":
                self._writer.report(StoreFault.CORRUPT)
            raise

    def status(self) -> m.StoreStatus:
        """Return the store's state. The only disk access is for the sizes of its files."""
        fault = self._writer.fault
        return m.StoreStatus(
            ok=fault is None,
            journal=self.journal,
            path=str(self.path),
            detail="" if fault is None else f"{fault.sentence} ({self._writer.detail})",
            events=self._writer.position,
            bytes=_size(self.path),
            wal_bytes=_size(database.wal_of(self.path)),
        )

    async def backup(self, target: Path) -> m.BackupDone:
        """Write a consistent, durable copy to the new file `target` (0600) while the store is in use.

        HutchError: CONFLICT if `target` exists, STORE_UNAVAILABLE if reading or writing fails.
        """
        self._check_open()
        size = await to_thread.run_sync(backups.copy, self.path, target)
        return m.BackupDone(path=str(target), bytes=size, journal=self.journal)

    async def _run(self) -> None:
        try:
            await to_thread.run_sync(self._writer.run, limiter=anyio.CapacityLimiter(1))
        finally:
            self._writing = False

    def _close(self) -> None:
        self._open = False
        self._writer.stop()

    def _check_open(self) -> None:
        if not self._open:
            raise HutchError(Reason.SHUTTING_DOWN)

    def _deliver(self, events: list[StoredEvent], effects: list[Effect], results: list[JobResult]) -> None:
        """Send a commit's events, effects and results to the event loop. Called on the writer thread."""
        with suppress(RuntimeError):  # the loop is closed, so no caller waits any more
            self._loop.call_soon_threadsafe(self._settle, events, effects, results)

    def _settle(self, events: list[StoredEvent], effects: list[Effect], results: list[JobResult]) -> None:
        try:
            if events:
                failpoint("store.before_publish")
                for sink in self._sinks:
                    sink(events)
        finally:
            for effect in effects:
                try:
                    effect()
                except Exception:
                    log.exception("effect_failed", effect=repr(effect))
            for result in results:
                receipt: asyncio.Future[object] = result.job.receipt
                if receipt.done():  # its caller was cancelled
                    continue
                if result.error is not None:
                    receipt.set_exception(result.error)
                else:
                    receipt.set_result(result.value)


def _size(path: Path) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0
