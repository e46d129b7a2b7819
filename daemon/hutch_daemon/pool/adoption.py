"""Adopts the executors that an earlier hutchd started."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from hutch_daemon.environments.port import Account, Killed
from hutch_daemon.environments.registry import Environments
from hutch_daemon.pool.ending import Ender, Spawn
from hutch_daemon.pool.executors import Executor, Roster
from hutch_daemon.pool.made_of import read_made_of
from hutch_daemon.pool.starting import launched_as_stored
from hutch_daemon.pool.view import ExecutorKey
from hutch_daemon.store.rows import ExecutorRow
from hutch_shared.errors import HutchError

__all__ = ["adopt", "remove_old_output"]

_OUTPUT_KEPT: Final = 7 * 24 * 3600.0
"""Seconds during which an executor's log file is kept after its last line."""


def adopt(
    rows: Iterable[ExecutorRow],
    roster: Roster,
    ender: Ender,
    environments: Environments,
    account_of: Callable[[int], Account],
    spawn: Spawn,
) -> list[Executor]:
    """Adopt the executors of these rows. Return those that live and should dial in; end the others."""
    living: list[Executor] = []
    for row in rows:
        environment = environments.get(row.environment)
        if environment is None:
            roster.notice("environment_gone", f"{row.id} was started in {row.environment}, which is not set up now.")
            continue
        why_not = ""
        try:
            account = account_of(row.uid)
        except HutchError as error:  # the account is gone: its executor is ended below, by uid
            why_not, account = error.message, Account(row.uid, row.uid, row.account, "/")
            roster.notice(f"account_gone:{row.id}", f"{row.id} is ended: {why_not}")
        executor = Executor(row.id, ExecutorKey(account, row.agent, row.environment), environment, roster.clock())
        executor.state = "detached" if row.state in ("starting", "ready", "leased") else row.state
        executor.adopted, executor.protocol = True, row.protocol
        executor.detail, executor.made_of = row.detail, read_made_of(row.made_of)
        roster.add(executor)
        if (session := row.session or row.served) is not None:
            roster.assign(executor, session)
        found = environment.adopt(row.launched) if row.launched is not None else None
        executor.launched = found or launched_as_stored(row)
        executor.started.set()
        if executor.state == "draining":
            spawn(ender.end, executor, 0.0)
        elif executor.state == "detached" and why_not:
            ender.retire(executor, why_not)
        elif executor.state == "detached" and found is None:  # its descendants may still live
            ender.retire(executor, "it was gone when hutchd came back")
        elif executor.state == "detached":
            living.append(executor)
            spawn(ender.watch, executor)
        elif executor.state == "quarantined":
            executor.killed = Killed("unknown", why="it was not found out before hutchd was restarted")
            executor.ended.set()
            executor.connected.set()
            ender.report_quarantine(executor)
    roster.changed.notify()
    return living


def remove_old_output(folder: Path) -> None:
    """Remove the log files of executors that ended long ago. Blocks."""
    before = time.time() - _OUTPUT_KEPT
    for file in folder.glob("x-*.log"):
        with contextlib.suppress(OSError):
            if file.stat().st_mtime < before:
                file.unlink()
