"""The handlers of the methods that hutchd calls on an executor; `hutch_shared.methods.TO_EXECUTOR` has their types.

The connection's reader calls a plain function, which must be quick; an async function runs in a task of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from anyio import to_thread

from hutch_executor.account import agent_dir, notify, paths
from hutch_executor.events import orphan_spool
from hutch_executor.turns import timed_out
from hutch_executor.worker import Worker
from hutch_shared import messages as m
from hutch_shared.events import TurnEnded
from hutch_shared.failpoints import witness
from hutch_shared.rpc.dispatch import Handler

__all__ = ["HANDLERS"]


async def prepare_session(worker: Worker, params: m.PrepareSession) -> m.Prepared:
    """Assign the session and connect the agent. Idempotent by session."""
    return await worker.open_session(params)


def execute_prompt(worker: Worker, params: m.ExecutePrompt) -> m.Accepted:
    """Start a turn. Idempotent by turn."""
    return worker.execute_prompt(params)


async def interrupt_turn(worker: Worker, params: m.InterruptExecutor) -> m.Interrupted:
    """Stop the turn. After the reply the turn starts nothing more."""
    cause = timed_out() if params.timed_out else TurnEnded("stopped", "interrupted", "The turn was interrupted.")
    return m.Interrupted(was_running=await worker.stop_turn(params.turn, cause))


async def set_permission_mode(worker: Worker, params: m.SetMode) -> m.Nothing:
    """Pass the mode on to the agent."""
    await worker.set_permission_mode(params)
    return m.Nothing()


async def resolve_paths(worker: Worker, params: m.ResolvePaths) -> m.ResolvedPaths:
    """Resolve paths as the account."""
    return m.ResolvedPaths(await paths.resolve_paths(params.paths, worker.cwd, worker.path_threads))


async def run_notify(worker: Worker, params: m.RunNotify) -> m.Notified:
    """Run the notify command as the account."""
    return await notify.run_notify(params, worker.setup, (worker.cwd,))


async def take_spool(worker: Worker, params: m.TakeSpool) -> m.SpooledEvents:
    """Return events from the spool of a dead executor of the account."""
    return await to_thread.run_sync(orphan_spool.take_spool, Path(params.directory), params.acked)


async def remove_agent_dir(_worker: Worker, params: m.RemoveAgentDir) -> m.Nothing:
    """Remove the directory of a removed session's agent."""
    await to_thread.run_sync(agent_dir.remove, params.directory)
    return m.Nothing()


def shutdown(worker: Worker, params: m.Shutdown) -> m.Nothing:
    """End this executor soon (see `Worker.leave`), or once it is alone with `if_alone`."""
    if params.if_alone is None:
        worker.leave(params.reason, finish_turn=params.finish_turn)
    else:
        worker.link.expect_absence(params.if_alone)
    return m.Nothing()


def ack_events(worker: Worker, params: m.AckEvents) -> None:
    """Forget the events that hutchd has stored."""
    witness("acked", worker.boot.executor, min(params.n, worker.reporter.outbox.sent))
    worker.reporter.acknowledge(params.n)


HANDLERS: Final[Mapping[str, Handler[Any]]] = {
    "prepare_session": prepare_session,
    "execute_prompt": execute_prompt,
    "interrupt_turn": interrupt_turn,
    "set_permission_mode": set_permission_mode,
    "resolve_paths": resolve_paths,
    "run_notify": run_notify,
    "take_spool": take_spool,
    "remove_agent_dir": remove_agent_dir,
    "shutdown": shutdown,
    "ack_events": ack_events,
}
