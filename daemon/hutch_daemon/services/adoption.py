"""Adopts the executors and the unfinished turns of an earlier hutchd.

The launch records are read before an executor can connect. An executor whose process still lives is expected to connect
again; the others are ended with all their processes. A turn that had begun continues in its session's task if its
executor connects; otherwise it is ended with an error. Then queued turns run.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

import anyio
import structlog

from hutch_daemon.environments.port import Account
from hutch_daemon.environments.registry import Environments
from hutch_daemon.pool.executors import Executor
from hutch_daemon.pool.pool import Pool
from hutch_daemon.pool.view import ExecutorKey
from hutch_daemon.services.session_tasks import SessionTasks
from hutch_daemon.store import executors, sessions, turns
from hutch_daemon.store.records import Executes
from hutch_daemon.store.store import Store
from hutch_shared import messages as m
from hutch_shared.failpoints import failpoint

__all__ = ["end_missing", "spares_of", "take_over"]

_log = structlog.get_logger(__name__)


async def take_over(store: Store, pool: Pool, tasks: SessionTasks) -> list[Executor]:
    """Adopt the live executors and start the tasks of sessions with turns. Return the executors that must connect."""
    rows = await store.read(executors.live)
    expected = await pool.adopt(rows)
    failpoint("adoption.rows")
    for session, owner in (await store.read(_owners_with_turns)).items():
        tasks.start(session, owner)
    for executor in expected:
        session_id = executor.session
        if session_id is not None:
            row = await store.read(lambda conn, session_id=session_id: sessions.get(conn, session_id))  # type: ignore[misc]
            executor.has_namespace = row is not None and _has_namespace(row.isolation)
            executor.network = row.isolation.network if row is not None else None
            tasks.start(session_id, executor.key.account.uid if row is None else row.owner)
    _log.info("taken over", executors=len(rows), alive=len(expected))
    return expected


def _has_namespace(isolation: m.Isolation) -> bool:
    """Return whether a session's executor, which was prepared with this isolation, has a pid namespace.

    An earlier version did not record the kind of a sandbox; each was one of bubblewrap, and `strict` needed one.
    """
    return isolation.sandbox == "bubblewrap" or (isolation.sandbox is None and isolation.level == "strict")


def _owners_with_turns(conn: Executes) -> dict[str, int]:
    """Return the owners of the sessions that have unfinished turns, by session."""
    rows = [sessions.get(conn, turn.session) for turn in turns.live(conn)]
    return {row.id: row.owner for row in rows if row is not None}


async def end_missing(pool: Pool, expected: Iterable[Executor], timeout: float) -> None:
    """Give the expected executors `timeout` seconds to connect, then end those that did not."""
    with anyio.move_on_after(timeout):
        for executor in expected:
            await executor.connected.wait()
    for executor in expected:
        if not executor.connected.is_set():
            pool.retire(executor, "it did not come back after hutchd was restarted")
    failpoint("adoption.settled")


def spares_of(
    account_of: Callable[[int], Account], environments: Environments, agents: Iterable[str]
) -> list[ExecutorKey]:
    """Return the keys for which hutchd's own account keeps spares from the start."""
    account = account_of(os.getuid())
    environment = environments.choose(None, account).name
    return [ExecutorKey(account, agent, environment) for agent in agents]
