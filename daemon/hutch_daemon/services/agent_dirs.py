"""The agents' own directories: where a session's is, and their removal when the session is removed.

A session's directory lies beside the spools of its account, and its agent's program keeps conversations, plans and
long results there. The executor makes it. In another account's folder only an executor of that account can remove it,
so a removed session's directory stays in the store until that has happened.
"""

from __future__ import annotations

import logging
import os
from math import inf
from pathlib import Path

import anyio
import structlog

from hutch_daemon.environments.port import Account, Environment
from hutch_daemon.pool.pool import Pool
from hutch_daemon.store import left_dirs
from hutch_daemon.store.rows import LeftDirRow
from hutch_daemon.store.store import Store
from hutch_shared import messages as m
from hutch_shared.backoff import Backoff
from hutch_shared.conditions import Conditions
from hutch_shared.errors import HutchError
from hutch_shared.latch import Latch
from hutch_shared.removal import remove_tree

__all__ = ["LeftDirs", "agent_dir"]

_log = structlog.get_logger(__name__)

_REMOVE_TIMEOUT = 60.0
_PAUSES = (2.0, 60.0)
"""The first and the longest pause, in seconds, before another try while the store or an executor is unavailable."""


def agent_dir(environment: Environment, account: Account, spool_dir: Path, session: str) -> str:
    """Return the directory of a session's agent, without links above it. `spool_dir` has the spools that hutchd makes.

    May block for a moment.
    """
    beside = environment.spool_of(account, "agents") or spool_dir / "agents"
    return os.path.join(os.path.realpath(beside), session)


class LeftDirs:
    """Removes the directories of removed sessions, and the folders of temporary files of closed ones."""

    def __init__(self, store: Store, pool: Pool) -> None:
        """Executors in `pool` remove what hutchd cannot."""
        self._store = store
        self._pool = pool
        self._changed = Latch()
        self._conditions = Conditions(logging.getLogger(__name__))

    def look(self) -> None:
        """Look for directories again. Call it when a session was removed, or when an executor has connected."""
        self._changed.notify()

    async def run(self) -> None:
        """Remove directories until cancelled. What fails is tried again when an executor has connected."""
        backoff = Backoff(*_PAUSES)
        while True:
            try:
                for row in await self._store.read(left_dirs.list_):
                    await self._remove(row)
                available = True
                backoff.reset()
                self._conditions.end("directories of removed sessions stay for now", "directories are removed again")
            except HutchError as error:
                self._conditions.failed("directories of removed sessions stay for now", error)
                available = False
            with anyio.move_on_after(inf if available else backoff.next()):
                await self._changed.wait()

    async def _remove(self, row: LeftDirRow) -> None:
        """Remove one directory, if that is possible now. HutchError if the store is unavailable."""
        if not await self._removed_here(row.path) and not await self._removed_by_executor(row):
            return
        await self._store.write(lambda tx: left_dirs.remove(tx, row.path))
        _log.info("what a session left is removed", directory=row.path)

    async def _removed_here(self, path: str) -> bool:
        """Remove a directory of hutchd's own account; return False if it is another account's."""
        try:
            await anyio.to_thread.run_sync(_remove_own, path)
        except FileNotFoundError:
            return True
        except PermissionError:
            return False
        except OSError as error:
            _log.warning("a removed session's directory stays", directory=path, error=str(error))
            return False
        return True

    async def _removed_by_executor(self, row: LeftDirRow) -> bool:
        for executor in self._pool.roster.connected():
            if executor.key.account.name != row.account:
                continue
            try:
                await executor.call("remove_agent_dir", m.RemoveAgentDir(row.path), _REMOVE_TIMEOUT)
            except HutchError as error:
                _log.warning("a removed session's directory stays", directory=row.path, error=error.message)
                continue
            return True
        return False


def _remove_own(path: str) -> None:
    if os.lstat(os.path.dirname(path)).st_uid != os.geteuid():
        raise PermissionError
    remove_tree(path)
