"""Taking over what an earlier hutchd left: its executors, its turns, its queue.

First, before anybody can dial in, the launch records are read: executors whose very process lives are expected to say
hello again, all others are ended with whatever they started. Turns that were on their way continue in their session's
task: with the executor that has them, or settled visibly when it does not come. Then queued turns go on.

The spool of an executor that died before it could hand in its events lies in its directory below `Parts.spool_dir`; it
is brought in by the account's next executor, which alone can read it. `executors.spool` names it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from functools import partial

import anyio
import structlog

from hutch_daemon.pool.executor import Executor, ExecutorKey
from hutch_daemon.services.parts import Parts
from hutch_daemon.services.session_loop import SessionLoop
from hutch_daemon.store import executors, sessions, turns
from hutch_daemon.store.records import Executes
from hutch_shared.failpoints import failpoint

__all__ = ["keys_to_keep", "settle", "take_over"]

_log = structlog.get_logger(__name__)


async def take_over(parts: Parts, loop_of: Callable[[str, int], SessionLoop]) -> list[Executor]:
    """Adopt what lives and start the tasks of sessions that have turns; return the executors that should dial in."""
    rows = await parts.store.read(executors.live)
    expected = await parts.pool.adopt(rows)
    failpoint("adoption.rows")
    for session, owner in (await parts.store.read(_with_turns)).items():
        loop_of(session, owner)
    for executor in expected:
        if executor.session is not None:
            whose: int | None = await parts.store.read(partial(_owner_of, session=executor.session))
            loop_of(executor.session, executor.key.account.uid if whose is None else whose)
    _log.info("taken over", executors=len(rows), alive=len(expected))
    return expected


def _owner_of(conn: Executes, session: str) -> int | None:
    row = sessions.get(conn, session)
    return None if row is None else row.owner


def _with_turns(conn: Executes) -> dict[str, int]:
    """Return the sessions that have turns which did not end, and whose they are."""
    rows = [sessions.get(conn, turn.session) for turn in turns.live(conn)]
    return {row.id: row.owner for row in rows if row is not None}


async def settle(parts: Parts, expected: Iterable[Executor]) -> None:
    """Give the expected executors their time to say hello, then end those that did not."""
    with anyio.move_on_after(parts.settings().executors.adopt_timeout):
        for executor in expected:
            await executor.connected.wait()
    for executor in expected:
        if not executor.connected.is_set():
            parts.pool.retire(executor, "it did not come back after hutchd was restarted")
    failpoint("adoption.settled")


def keys_to_keep(parts: Parts) -> list[ExecutorKey]:
    """Return the kinds of spares to have from the start: those of the account that hutchd runs as."""
    if not parts.own_spares:
        return []
    account = parts.account_of(os.getuid())
    environment = parts.environments.choose(None, account).name
    return [ExecutorKey(account, agent, environment) for agent in parts.settings().executors.spare_agents]
