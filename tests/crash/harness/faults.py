"""The faults that can be planted: each with the code that it replaces and the violations that show it.

`planted.py` starts hutchd with one of them. Each replacement is made from the original and takes the same parameters.
"""

from __future__ import annotations

import importlib
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, Final

import anyio
import msgspec

from hutch_shared import messages as m

__all__ = ["FAULTS", "Fault", "Target"]

Function = Callable[..., Any]
MOMENT: Final = 0.02
"""Seconds that a fault waits between two steps, so that a kill can come there."""


@dataclass(frozen=True, slots=True)
class Target:
    """A function of the product: its module, and its name there (`function` or `Class.method`)."""

    module: str
    name: str

    def find(self) -> tuple[Any, str, Function]:
        """Return the object that has the function, its name there, and the function.

        AttributeError if it does not exist.
        """
        holder: Any = importlib.import_module(self.module)
        *classes, name = self.name.split(".")
        for one in classes:
            holder = getattr(holder, one)
        return holder, name, getattr(holder, name)


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault: its description, its replacement, the kills that make it visible, and the violations that show it."""

    what: str
    replaces: Mapping[Target, Callable[[Function], Function]]
    actions: tuple[str, ...]
    caught_as: frozenset[str]


# ---------------------------------------------------------------- the store


def _ack_before_commit(original: Function) -> Function:
    def run_group(self: Any, jobs: Any, tx: Any) -> Any:
        results = original(self, jobs, tx)
        self._deliver(tx.events, tx.effects, results)
        time.sleep(MOMENT)
        return []

    return run_group


def _publish_before_commit(original: Function) -> Function:
    def run_group(self: Any, jobs: Any, tx: Any) -> Any:
        results = original(self, jobs, tx)
        self._deliver(tx.events, [], [])
        tx.events = []
        time.sleep(MOMENT)
        return results

    return run_group


def _drop_event(original: Function) -> Function:
    def insert(on: Any, events: Any) -> None:
        original(on, [event for event in events if event.seq % 50])

    return insert


def _lose_result(original: Function) -> Function:
    def append(tx: Any, session: str, parts: Any) -> Any:
        return original(tx, session, [part for part in parts if part[2] != "tool_result"])

    return append


def _reorder(original: Function) -> Function:
    def append_reported(tx: Any, executor: str, session: str, events: Any) -> Any:
        turned = [msgspec.structs.replace(one, n=at.n) for one, at in zip(reversed(events), events, strict=True)]
        return original(tx, executor, session, turned)

    return append_reported


def _forget_key(original: Function) -> Function:
    def insert(tx: Any, row: Any) -> Any:
        return original(tx, replace(row, idempotency_key=None))

    return insert


def _last_decision_stands(original: Function) -> Function:
    def settle(tx: Any, permission: str, state: Any, **fields: Any) -> Any:
        tx.execute("UPDATE permissions SET state = 'pending' WHERE id = ?", (permission,))
        return original(tx, permission, state, **fields)

    return settle


def _look_pending(original: Function) -> Function:
    async def get(self: Any, permission: str) -> Any:
        return replace(await original(self, permission), state="pending")

    return get


# ---------------------------------------------------------------- followers


def _follow_gap(original: Function) -> Function:
    async def read(self: Any) -> Any:
        page = await original(self)
        await anyio.sleep(MOMENT)
        self._queue.clear()
        self._queue_bytes = 0
        return page

    return read


def _stale_cursor(original: Function) -> Function:
    @asynccontextmanager
    async def follow(
        self: Any, session: str, after: int = 0, *, skip: Any = (), owner: Any = None, answers: bool = False
    ) -> AsyncIterator[Any]:
        before = after - 1 if after > 0 else after
        async with original(self, session, before, skip=skip, owner=owner, answers=answers) as follower:
            yield follower

    return follow


# ---------------------------------------------------------------- turns and permission requests


def _ack_ahead(original: Function) -> Function:
    async def report_message(self: Any, executor: Any, params: Any) -> None:
        if executor.peer is not None:
            await executor.peer.notify("ack_events", m.AckEvents(params.events[-1].n))
            await anyio.sleep(MOMENT)
        await original(self, executor, params)

    return report_message


def _store_again(original: Function) -> Function:
    def keep(self: Any, tx: Any, executor: str, session: str, batch: Any, may: Any) -> Any:
        if batch:
            tx.execute("UPDATE executors SET acked_n = ? WHERE id = ?", (batch[0].n - 1, executor))
        return original(self, tx, executor, session, batch, may)

    return keep


def _replay_prompt(original: Function) -> Function:
    async def settle(self: Any, active: Any, turn: Any, ended: Any) -> None:
        from hutch_daemon.store import turns

        if turn.state == "queued":
            await original(self, active, turn, ended)
            return
        await self._store.write(lambda tx: turns.move(tx, turn.id, {turn.state}, "queued", executor=None))
        active.executor, active.request.prompt_sent = None, None

    return settle


def _silent_end(original: Function) -> Function:
    def end(self: Any, tx: Any, turn: Any, ended: Any, *, reported: bool = False) -> Any:
        return original(self, tx, turn, ended, reported=True)

    return end


def _take_up_none(original: Function) -> Function:
    async def take_up_pending(self: Any) -> None:
        return None

    return take_up_pending


def _withdraw_none(original: Function) -> Function:
    def withdraw(self: Any, tx: Any, turn: str, why: str) -> None:
        return None

    return withdraw


def _withdraw_none_of(original: Function) -> Function:
    async def withdraw_of(self: Any, executor: str, why: str) -> None:
        return None

    return withdraw_of


# ---------------------------------------------------------------- processes


def _leak_child(original: Function) -> Function:
    async def kill(self: Any, launched: Any) -> Any:
        from hutch_daemon.environments.port import Killed

        with suppress(ProcessLookupError):
            os.kill(launched.pid, signal.SIGKILL)
        return Killed("gone")

    return kill


def _adopt_none(original: Function) -> Function:
    def adopt(self: Any, state: Any) -> None:
        return None

    return adopt


# ---------------------------------------------------------------- the executor


def _send_again(original: Function) -> Function:
    async def say_hello(self: Any, peer: Any) -> int:
        await original(self, peer)
        acked: int = self._reporter.outbox.acked
        return acked

    return say_hello


def _skip_epoch(original: Function) -> Function:
    async def say_hello(self: Any, peer: Any) -> Any:
        self.epoch = 0
        return await original(self, peer)

    return say_hello


def _run_denied(original: Function) -> Function:
    async def request_permission(
        self: Any, kind: Any, call: Any, *, cwd: Any = None, questions: Any = (), plan: Any = None
    ) -> Any:
        decision = await original(self, kind, call, cwd=cwd, questions=questions, plan=plan)
        return msgspec.structs.replace(decision, decision="allow") if decision.decision == "deny" else decision

    return request_permission


def _lose_spool(original: Function) -> Function:
    def take_spool(directory: Any, acked: int) -> Any:
        return original(directory, 1 << 60)

    return take_spool


# ---------------------------------------------------------------- the table

_STORE: Final = "hutch_daemon.store."
_RUN_GROUP: Final = Target(_STORE + "writer", "Writer._run_group")
_HELLO: Final = Target("hutch_executor.link.daemon_link", "DaemonLink._say_hello")
_APPROVALS: Final = "hutch_daemon.permissions.approvals"

FAULTS: dict[str, Fault] = {
    "ack_before_commit": Fault(
        "what is written is called durable, and published, before its commit",
        {_RUN_GROUP: _ack_before_commit},
        ("hutchd@store.before_commit:60",),
        frozenset({"lost_event", "ack_not_durable", "prompt_lost", "decision_changed", "question_lost", "forgotten"}),
    ),
    "publish_before_commit": Fault(
        "followers get events before their commit",
        {_RUN_GROUP: _publish_before_commit},
        ("hutchd@store.before_commit:60",),
        frozenset({"lost_event"}),
    ),
    "drop_event": Fault(
        "an event gets its number and is not stored",
        {Target(_STORE + "events", "_insert"): _drop_event},
        (),
        frozenset({"gap", "lost_event", "incomplete", "garbled"}),
    ),
    "store_resent": Fault(
        "an executor sends again what is stored, and it is stored again",
        {_HELLO: _send_again, Target("hutch_daemon.services.reports", "ReportService._keep"): _store_again},
        ("hutchd@report.ack:10", "hutchd@report.ack:10"),
        frozenset({"garbled"}),
    ),
    "lose_result": Fault(
        "the result of a tool call is not stored, and its executor has the receipt",
        {Target(_STORE + "events", "_append"): _lose_result},
        (),
        frozenset({"not_as_made"}),
    ),
    "reorder": Fault(
        "the events of a batch are stored in reverse",
        {Target(_STORE + "events", "append_reported"): _reorder},
        (),
        frozenset({"garbled"}),
    ),
    "ack_ahead": Fault(
        "an executor gets its receipt before its events are stored",
        {Target("hutch_daemon.services.reports", "ReportService.report_message"): _ack_ahead},
        ("hutchd@report.came:20",),
        frozenset({"ack_not_durable"}),
    ),
    "follow_gap": Fault(
        "an event that is committed while a follower reads history never reaches it",
        {Target("hutch_daemon.events.fanout", "Follower._read"): _follow_gap},
        ("client", "client", "client"),
        frozenset({"incomplete"}),
    ),
    "stale_cursor": Fault(
        "a follower that comes back gets its last event again",
        {Target("hutch_daemon.events.fanout", "Fanout.follow"): _stale_cursor},
        ("client",),
        frozenset({"doubled"}),
    ),
    "replay_prompt": Fault(
        "a prompt whose executor is gone runs again",
        {Target("hutch_daemon.services.session_loop", "SessionLoop._settle"): _replay_prompt},
        ("busy",) * 2,
        frozenset({"ran_twice", "garbled"}),
    ),
    "forget_key": Fault(
        "a prompt that is submitted twice is two turns",
        {Target(_STORE + "turns", "insert"): _forget_key},
        ("client",),
        frozenset({"prompt_doubled"}),
    ),
    "silent_end": Fault(
        "a turn that hutchd ends itself ends without an event",
        {Target("hutch_daemon.services.turn_lifecycle", "TurnLifecycle.end"): _silent_end},
        ("busy",) * 2,
        frozenset({"end_wrong"}),
    ),
    "forget_question": Fault(
        "a permission request that waited before a restart is not taken up again",
        {Target(_APPROVALS, "Approvals._take_up_pending"): _take_up_none},
        ("hold question", "hutchd"),
        frozenset({"undelivered", "question_lost", "bug"}),
    ),
    "keep_question": Fault(
        "the permission requests of a turn that ended wait on",
        {
            Target(_APPROVALS, "Approvals.withdraw"): _withdraw_none,
            Target(_APPROVALS, "Approvals.withdraw_of"): _withdraw_none_of,
        },
        ("asker",),
        frozenset({"question_left"}),
    ),
    "double_answer": Fault(
        "the last decision stands, not the first",
        {
            Target(_STORE + "permissions", "settle"): _last_decision_stands,
            Target(_APPROVALS, "Approvals.get"): _look_pending,
        },
        (),
        frozenset({"decision_changed"}),
    ),
    "run_denied": Fault(
        "an agent runs a call that was denied",
        {Target("hutch_executor.link.daemon_port", "LinkedDaemon.request_permission"): _run_denied},
        (),
        frozenset({"ran_unasked", "undelivered"}),
    ),
    "leak_child": Fault(
        "a process that an agent started in the background outlives its session",
        {Target("hutch_daemon.environments.same_user", "SameUser.kill"): _leak_child},
        ("all executors",),
        frozenset({"process_left"}),
    ),
    "lose_spool": Fault(
        "the spool of a dead executor is removed before it is stored",
        {Target("hutch_executor.events.orphan_spool", "take_spool"): _lose_spool},
        ("spool",) * 2,
        frozenset({"spool_lost"}),
    ),
    "adopt_none": Fault(
        "a new hutchd ends the executors that it finds",
        {Target("hutch_daemon.environments.same_user", "SameUser.adopt"): _adopt_none},
        ("hutchd",),
        frozenset({"failed_alone"}),
    ),
    "skip_epoch": Fault(
        "an executor obeys a hutchd that is older than one it knew",
        {_HELLO: _skip_epoch},
        ("old hutchd",),
        frozenset({"obeyed"}),
    ),
}
