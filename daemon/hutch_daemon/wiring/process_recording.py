"""Keeps the record of the processes that outlive hutchd, by which a client ends them when hutchd is gone."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Final

import anyio

from hutch_daemon.pool.executors import Executor, Roster
from hutch_shared.conditions import Conditions
from hutch_shared.latch import Latch
from hutch_shared.process_record import BROKER, RecordedProcess, write_record
from hutch_shared.processes import start_time

__all__ = ["ProcessRecording"]

_LOOK_EVERY: Final = 1.0
"""Seconds after which the record is compared again: nothing reports a new broker."""
_GATHER: Final = 0.02
"""Seconds in which changes gather, since many executors can start or end together."""

_log: Final = logging.getLogger(__name__)


class ProcessRecording:
    """Writes the record after each change, on the event loop: the file has some kilobytes and is not synced."""

    def __init__(self, state: Path, roster: Roster, broker_pid: Callable[[], int]) -> None:
        """`broker_pid` returns the linked broker's pid, or 0."""
        self._state = state
        self._roster = roster
        self._broker_pid = broker_pid
        self._written: list[RecordedProcess] | None = None
        self._changed = Latch()
        self._conditions = Conditions(_log)

    def notify(self, _: Executor) -> None:
        """Note that an executor may have changed."""
        self._changed.notify()

    async def run(self) -> None:
        """Write the record when it changes, until cancelled, and then once more."""
        try:
            while True:
                self.write()
                with anyio.move_on_after(_LOOK_EVERY):
                    await self._changed.wait()
                    await anyio.sleep(_GATHER)
        finally:
            self.write()

    def write(self) -> None:
        """Write the record if it changed. A failure is logged, and tried again later."""
        processes = [
            RecordedProcess(f"executor {one.id}", one.launched.pid, one.launched.start_time, one.session or "")
            for one in self._roster.all()
            if one.launched is not None
        ]
        broker = self._broker_pid()
        if broker and (started := start_time(broker)) is not None:
            processes.append(RecordedProcess(BROKER, broker, started))
        if processes == self._written:
            return
        try:
            write_record(self._state, processes)
        except OSError as error:
            self._conditions.begin("record", f"the record of processes cannot be written: {error.strerror}")
        else:
            self._written = processes
            self._conditions.end("record", "the record of processes is written again")
