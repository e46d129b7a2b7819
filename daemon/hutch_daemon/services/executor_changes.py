"""Reacts to changes of executors: wakes the session's task, and cleans up after an executor that ended."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Final

import anyio
import msgspec
import structlog
from anyio.abc import TaskGroup

from hutch_daemon.permissions.approvals import Approvals
from hutch_daemon.pool.executors import Executor, Roster
from hutch_daemon.services.agent_dirs import LeftDirs
from hutch_daemon.services.orphan_spools import OrphanSpools
from hutch_daemon.services.session_tasks import SessionTasks
from hutch_daemon.signals import Signal
from hutch_daemon.store import audit, events, executors, sessions
from hutch_daemon.store.records import Tx
from hutch_daemon.store.store import Store
from hutch_shared.backoff import Backoff
from hutch_shared.conditions import Conditions
from hutch_shared.errors import HutchError
from hutch_shared.events import Notice

__all__ = ["ExecutorChanges"]

_log = structlog.get_logger(__name__)
_STORE_PAUSES: Final = (0.25, 10.0)
"""The first and the longest pause, in seconds, before a write that failed is tried again."""


class ExecutorChanges:
    """Subscribes to changes of executors. Use it inside its `running` block."""

    def __init__(
        self,
        store: Store,
        changed: Signal[[Executor]],
        roster: Roster,
        tasks: SessionTasks,
        spools: OrphanSpools,
        left_dirs: LeftDirs,
        approvals: Approvals,
        revoke_leases: Callable[[str], Awaitable[object]],
        spool_dir: Path,
    ) -> None:
        """`revoke_leases(executor)` ends an executor's leases. `spool_dir` contains the spools that hutchd made."""
        self._store = store
        self._roster = roster
        self._conditions = Conditions(logging.getLogger(__name__))
        self._tasks = tasks
        self._spools = spools
        self._left_dirs = left_dirs
        self._approvals = approvals
        self._revoke_leases = revoke_leases
        self._spool_dir = spool_dir
        self._cleaning: TaskGroup | None = None
        changed.subscribe(self._look)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Clean up after executors while the block runs."""
        async with anyio.create_task_group() as tasks:
            self._cleaning = tasks
            try:
                yield
            finally:
                self._cleaning = None
                tasks.cancel_scope.cancel()

    def _look(self, executor: Executor) -> None:
        if executor.session is not None:
            self._tasks.wake(executor.session)
        if executor.peer is not None:
            self._spools.look()
            self._left_dirs.look()
        if executor.ended.is_set() and self._cleaning is not None:
            if executor.state == "quarantined" or executor.verified_late:
                self._cleaning.start_soon(self._record_end, executor)
            self._cleaning.start_soon(self._clean_up, executor)

    async def _record_end(self, executor: Executor) -> None:
        """Record an executor whose end could not be verified, or that it was verified later.

        A line in the audit and an event of its session say so. If the store fails, try again: the record must not keep
        saying less, or more, than what is known.
        """
        killed, backoff = executor.killed, Backoff(*_STORE_PAUSES)
        assert killed is not None, "it has ended"
        outcome = "quarantined" if killed.outcome != "gone" else "gone"
        details = msgspec.to_builtins(killed.result()) | {"why": executor.detail}

        def record(tx: Tx, others: bool) -> None:
            session = sessions.get(tx, executor.session) if executor.session is not None else None
            audit.record(
                tx,
                actor="hutchd",
                owner=session.owner if session is not None else executor.key.account.uid,
                action="end_executor",
                outcome=outcome,
                session=executor.session,
                subject=executor.id,
                details=details,
            )
            if session is None:
                return
            if killed.outcome != "gone":
                if session.state == "open":  # a closing session reports the result itself
                    message = f"Executor {executor.id} was ended ({executor.detail}), but {killed.words()}."
                    events.append(tx, session.id, None, "notice", Notice("quarantined", message, details))
                return
            message = f"Executor {executor.id}, whose end could not be verified before: {killed.words()}."
            events.append(tx, session.id, None, "notice", Notice("executor_gone", message, details))
            if session.state == "closed" and not others:
                sessions.update(tx, session.id, killed=killed.result())

        while True:
            others = executor.session is not None and bool(self._roster.quarantined(executor.session))
            try:
                await self._store.write(partial(record, others=others))
            except HutchError as error:
                self._conditions.failed("ends of executors are not recorded", error)
                await anyio.sleep(backoff.next())
            else:
                self._conditions.end("ends of executors are not recorded", "ends of executors are recorded again")
                return

    async def _clean_up(self, executor: Executor) -> None:
        """Withdraw the requests of an executor that ended, and remove its spool if it is empty.

        If the store fails, nothing is lost: the end of its turn withdraws the requests too, and spools are tried again.
        """
        try:
            await self._revoke_leases(executor.id)
            await self._approvals.withdraw_of(executor.id, "its executor is gone")
            if executor.environment.spool_of(executor.key.account, executor.id) is not None:
                self._spools.look()  # only an executor of its account can read the spool
                return
            await anyio.to_thread.run_sync((self._spool_dir / executor.id).rmdir)
            await self._store.write(lambda tx: executors.update(tx, executor.id, spool=None))
        except FileNotFoundError:  # it never had a spool
            return
        except (OSError, HutchError) as error:  # the spool holds events, or the store is unavailable
            if isinstance(error, HutchError):
                _log.error("what an executor left is not cleaned up", executor=executor.id, error=error.message)
            self._spools.look()
