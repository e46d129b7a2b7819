"""Brings in the spools of dead executors: what they had kept while hutchd was away and never could hand in.

Only their account can read them, so a living executor of it is asked, whichever session it serves. What is stored moves
the dead executor's own receipt, so that each event is stored once however often this is begun anew; the file goes when
all of it is durable, then its directory and its mention in the store. The turns of these events have ended meanwhile:
what comes in is the record of what the agent did, not a change of how they ended.
"""

from __future__ import annotations

from math import inf
from pathlib import Path

import anyio
import structlog

from hutch_daemon.pool.executor import Executor
from hutch_daemon.services.parts import Parts
from hutch_daemon.services.reports import Reports
from hutch_daemon.store import executors
from hutch_daemon.store.rows import ExecutorRow
from hutch_shared import messages as m
from hutch_shared.errors import HutchError, Reason
from hutch_shared.failpoints import failpoint

__all__ = ["Spools"]

_log = structlog.get_logger(__name__)

_READ_TIMEOUT = 30.0
_PASSES = frozenset({Reason.STORE_UNAVAILABLE, Reason.CONNECTION_LOST, Reason.TIMED_OUT})
_TRY_AGAIN = 2.0
"""Seconds."""


class Spools:
    """Looks for what was left behind whenever it is told that something may have changed."""

    def __init__(self, parts: Parts, reports: Reports) -> None:
        self._parts = parts
        self._reports = reports
        self._news = anyio.Event()

    def look(self) -> None:
        """Have it look: an executor is gone, or one came that may read."""
        self._news.set()

    async def run(self) -> None:
        """Bring in what can be brought in, for ever. What fails is tried again at the next look.

        What cannot be stored or read just now is tried again by itself: it may hold the very room that was missing.
        """
        while True:
            self._news = news = anyio.Event()
            pause = inf
            try:
                for row in await self._parts.store.read(executors.with_spool):
                    if not await self._bring_in(row):
                        pause = _TRY_AGAIN
            except HutchError as error:
                _log.warning("spools wait", error=error.message)
                pause = _TRY_AGAIN
            with anyio.move_on_after(pause):
                await news.wait()

    async def _bring_in(self, row: ExecutorRow) -> bool:
        """Bring one in; False when that did not succeed and may soon."""
        assert row.spool is not None
        reader = self._reader(row.uid)
        if reader is None:
            return True
        try:
            acked, count = row.acked_n, 0
            while (left := await self._read(reader, row.spool, acked)).events:
                acked = await self._store(row.id, left)
                count += len(left.events)
                failpoint("spool.stored")
            await anyio.to_thread.run_sync(_remove, Path(row.spool))
            await self._parts.store.write(lambda tx: executors.update(tx, row.id, spool=None))
        except (HutchError, OSError) as error:
            _log.warning("a spool is not brought in", executor=row.id, by=reader.id, error=str(error))
            return not (isinstance(error, HutchError) and error.reason in _PASSES)
        _log.info("a spool was brought in", executor=row.id, by=reader.id, events=count)
        return True

    def _reader(self, uid: int) -> Executor | None:
        living = (one for one in self._parts.pool.all() if one.peer is not None and not one.over)
        return next((one for one in living if one.key.account.uid == uid), None)

    async def _read(self, reader: Executor, directory: str, acked: int) -> m.SpooledEvents:
        left: m.SpooledEvents = await reader.call("take_spool", m.TakeSpool(directory, acked), _READ_TIMEOUT)
        return left

    async def _store(self, executor: str, left: m.SpooledEvents) -> int:
        try:
            return await self._reports.take_left(executor, left)
        except HutchError as error:
            if error.reason is not Reason.NOT_FOUND:
                raise
            return left.events[-1].n  # of a session that was removed with its record


def _remove(directory: Path) -> None:
    """Remove the directory, which may be gone already; one in another account's folder went with what was in it."""
    try:
        directory.rmdir()
    except (FileNotFoundError, PermissionError):
        return
