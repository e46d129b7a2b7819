"""Reacts to changes of executors: wakes the session's task, and cleans up after an executor that ended."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import structlog
from anyio.abc import TaskGroup

from hutch_daemon.permissions.approvals import Approvals
from hutch_daemon.pool.executors import Executor
from hutch_daemon.services.agent_dirs import LeftDirs
from hutch_daemon.services.orphan_spools import OrphanSpools
from hutch_daemon.services.session_tasks import SessionTasks
from hutch_daemon.signals import Signal
from hutch_daemon.store import executors
from hutch_daemon.store.store import Store
from hutch_shared.errors import HutchError

__all__ = ["ExecutorChanges"]

_log = structlog.get_logger(__name__)


class ExecutorChanges:
    """Subscribes to changes of executors. Use it inside its `running` block."""

    def __init__(
        self,
        store: Store,
        changed: Signal[[Executor]],
        tasks: SessionTasks,
        spools: OrphanSpools,
        left_dirs: LeftDirs,
        approvals: Approvals,
        revoke_leases: Callable[[str], Awaitable[object]],
        spool_dir: Path,
    ) -> None:
        """`revoke_leases(executor)` ends an executor's leases. `spool_dir` contains the spools that hutchd made."""
        self._store = store
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
            self._cleaning.start_soon(self._clean_up, executor)

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
