"""Imports orphan spools: events that an executor wrote to disk while hutchd was away, and did not report in time.

Only the executor's account can read its spool, so another live executor of the same account reads it. Storing an event
advances the dead executor's receipt, so that each event is stored once even if an import is interrupted. When all
events are durable, the file is removed, then its directory, then the reference in the store. The turns of these events
have usually ended; then the events only complete the history. For a turn that was queued again because its executor may
not have accepted it, they show that it had.
"""

from __future__ import annotations

import logging
from math import inf
from pathlib import Path

import anyio
import structlog

from hutch_daemon.pool.executors import Executor
from hutch_daemon.pool.pool import Pool
from hutch_daemon.services.reports import ReportService
from hutch_daemon.store import executors
from hutch_daemon.store.store import Store
from hutch_shared import messages as m
from hutch_shared.backoff import Backoff
from hutch_shared.conditions import Conditions
from hutch_shared.errors import HutchError, Reason
from hutch_shared.failpoints import failpoint
from hutch_shared.latch import Latch

__all__ = ["OrphanSpools"]

_log = structlog.get_logger(__name__)

_READ_TIMEOUT = 30.0
_PASSES = frozenset({Reason.STORE_UNAVAILABLE, Reason.CONNECTION_LOST, Reason.TIMED_OUT})
_PAUSES = (2.0, 60.0)
"""The first and the longest pause, in seconds, before another look after a failure."""


class OrphanSpools:
    """Imports orphan spools when they appear or can be read."""

    def __init__(self, store: Store, pool: Pool, reports: ReportService) -> None:
        """Executors in `pool` read the spools; `reports` stores their events."""
        self._store = store
        self._pool = pool
        self._reports = reports
        self._changed = Latch()
        self._conditions = Conditions(logging.getLogger(__name__))
        self._importing = anyio.Lock()

    def look(self) -> None:
        """Look for spools again. Call it when an executor is gone, or when one that can read spools has connected."""
        self._changed.notify()

    async def run(self) -> None:
        """Import spools until cancelled. A failed import is retried at the next look.

        If the store or the reader is unavailable, the next look follows after a pause.
        """
        backoff = Backoff(*_PAUSES)
        while True:
            try:
                rows = await self._store.read(executors.with_spool)
                complete = all([await self._import(row.id) for row in rows])
            except HutchError as error:
                self._conditions.failed("spools wait", error)
                complete = False
            if complete:
                backoff.reset()
                self._conditions.end("spools wait", "spools are imported again")
            with anyio.move_on_after(inf if complete else backoff.next()):
                await self._changed.wait()

    async def import_spool(self, executor: str) -> bool:
        """Import the spool of one executor now, if it left one; return whether nothing is left of it."""
        await self._import(executor)
        row = await self._store.read(lambda conn: executors.get(conn, executor))
        return row is None or row.spool is None

    async def _import(self, executor: str) -> bool:
        """Import the spool of one executor, if it left one. Return False if that failed but may succeed soon."""
        async with self._importing:
            row = await self._store.read(lambda conn: executors.get(conn, executor))
            if row is None or row.spool is None or (reader := self._reader(row.uid)) is None:
                return True
            try:
                acked, count = row.acked_n, 0
                while (left := await self._read(reader, row.spool, acked)).events:
                    acked = await self._take(executor, left)
                    count += len(left.events)
                    failpoint("spool.stored")
                await anyio.to_thread.run_sync(_remove, Path(row.spool))
                await self._store.write(lambda tx: executors.update(tx, executor, spool=None))
            except (HutchError, OSError) as error:
                if not isinstance(error, HutchError) or error.reason not in _PASSES:
                    _log.warning("a spool is not imported", executor=executor, by=reader.id, error=str(error))
                return not (isinstance(error, HutchError) and error.reason in _PASSES)
            _log.info("a spool was imported", executor=executor, by=reader.id, events=count)
            return True

    def _reader(self, uid: int) -> Executor | None:
        return next((one for one in self._pool.roster.connected() if one.key.account.uid == uid), None)

    async def _read(self, reader: Executor, directory: str, acked: int) -> m.SpooledEvents:
        left: m.SpooledEvents = await reader.call("take_spool", m.TakeSpool(directory, acked), _READ_TIMEOUT)
        return left

    async def _take(self, executor: str, left: m.SpooledEvents) -> int:
        try:
            return await self._reports.take_left(executor, left)
        except HutchError as error:
            if error.reason is not Reason.NOT_FOUND:
                raise
            return left.events[-1].n  # the session was removed, so its events are dropped


def _remove(directory: Path) -> None:
    """Remove the directory, if hutchd made it. In another account's folder, the reading executor removed it."""
    try:
        directory.rmdir()
    except (FileNotFoundError, PermissionError):
        return
