"""The pool of executors: starts them, leases them to sessions, watches, ends and adopts them.

What is always true:

- The row is stored before the action: it is `starting` before the process exists, and `leased` before the executor
  gets a session.
- An executor serves at most one session in its life. A spare serves none.
- An executor occupies a slot until it is `gone`, that is, until a search found no process of it left. If that cannot be
  verified, it is `quarantined` and checked again; it still counts against `maximum`.
- Every process is watched from its start, or its adoption, to its end. Cancelling `running` ends no executor.
- A failed start is retried after a pause that doubles. After too many failures there is a longer pause.

`plan` decides; this module keeps the state that it decides on, and carries out the plan.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import anyio
import msgspec
from anyio.abc import TaskGroup

from hutch_daemon.environments.port import Account, Killed
from hutch_daemon.environments.registry import Environments
from hutch_daemon.pool import adoption
from hutch_daemon.pool.ending import Ender
from hutch_daemon.pool.executors import Executor, ExecutorPeer, Roster
from hutch_daemon.pool.leases import LeaseRequest, WaitingLeases
from hutch_daemon.pool.made_of import Composition
from hutch_daemon.pool.plan import look_interval, plan
from hutch_daemon.pool.starting import StartContext, Starter
from hutch_daemon.pool.tokens import IssuedToken
from hutch_daemon.pool.view import ExecutorKey, PoolPlan, PoolState
from hutch_daemon.settings import SettingsInForce
from hutch_daemon.store import executors
from hutch_daemon.store.records import Tx
from hutch_daemon.store.rows import ExecutorRow
from hutch_daemon.store.store import Store
from hutch_shared import messages as m
from hutch_shared.errors import HutchError, Reason
from hutch_shared.times import now_ms

__all__ = ["Pool"]

_SPARE_DELAY: Final = 0.5
"""Seconds before a spare that was leased is replaced, so that the session's first turn is not slowed down."""
_MAX_CONCURRENT_STARTS: Final = 2 * (os.cpu_count() or 1)
"""The most executors that start at the same time. With more, some would miss the deadline for their hello."""


class Pool:
    """All executors of this hutchd. Its methods are called on the event loop."""

    def __init__(
        self,
        store: Store,
        environments: Environments,
        settings: SettingsInForce,
        issue: Callable[[], IssuedToken],
        account_of: Callable[[int], Account],
        account_named: Callable[[str], Account],
        *,
        socket: str,
        server_uid: int,
        boot_id: str,
        output_dir: Path,
        files: Callable[[], str],
        clock: Callable[[], float] = time.monotonic,
        on_change: Callable[[Executor], None],
        on_notice: Callable[[str, str], None],
    ) -> None:
        """`socket` is the socket for executors; `output_dir` is the directory of their log files; `files` returns the
        version of the files that a new executor would import.

        `on_change` is called with each executor whose state or connection changed; `on_notice` with the name of a
        notice and a sentence for the administrator, or an empty text to end the notice. Neither may block.
        """
        self._store = store
        self._environments = environments
        self._settings = settings
        self._account_of = account_of
        self._server_uid = server_uid
        self._output_dir = output_dir
        self._clock = clock
        self.roster = Roster(store, on_change, on_notice, settings, clock)
        """The executors that are not gone: look them up here."""
        self._ender = Ender(self.roster, self._spawn)
        self._composition = Composition(account_of, account_named, environments, settings, files, clock)
        context = StartContext(
            environments, settings, self._composition, issue, socket, server_uid, boot_id, output_dir
        )
        self._starter = Starter(self.roster, self._ender, store, context, self._spawn, self._fail_oldest_lease)
        self._leases = WaitingLeases(self.roster.changed.notify)
        self._kept: dict[ExecutorKey, None] = {}
        self._tasks: TaskGroup | None = None
        self._stopping = False

    def __repr__(self) -> str:
        return f"<Pool {len(self.roster.all())} executors, {self._leases!r}{', stopping' * self._stopping}>"

    # ------------------------------------------------------------ life

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the pool's tasks while the block runs. Leaving it ends the tasks, but no executor."""
        async with anyio.create_task_group() as tasks:
            self._tasks = tasks
            tasks.start_soon(self._run)
            try:
                yield
            finally:
                self._stop()
                tasks.cancel_scope.cancel()

    def stop_starting(self) -> None:
        """Start no more executors, refuse the waiting leases, and end the spares."""
        self._stop()
        for one in self.roster.all():
            if one.session is None:
                self.retire(one, "hutchd stops", grace=2.0)

    def _stop(self) -> None:
        self._stopping = True
        self._starter.stop()
        self.roster.changed.notify()

    # ------------------------------------------------------------ leasing

    async def lease(self, session: str, key: ExecutorKey) -> Executor:
        """Return an executor that serves `session` from now on. The lease is durable; a former executor is retired.

        Waits for a free slot. `agent_unavailable` or `isolation_unavailable`, with the reason, if none can be started;
        `shutting_down` if the pool is stopping.
        """
        executor = await self._wait_for(LeaseRequest(session, key))
        for former in self.roster.all():
            if former.session == session and former is not executor:
                self.retire(former, "another executor serves its session")
        try:
            await self._store.write(lambda tx: _lease(tx, executor.id, session))
        except BaseException:
            self.retire(executor, "its lease could not be stored")
            raise
        self.warm([key])
        self.roster.report(executor)
        return executor

    async def _wait_for(self, lease: LeaseRequest) -> Executor:
        try:
            return await self._leases.wait(lease)
        except BaseException:
            if lease.executor is not None:
                self.retire(lease.executor, "its lease was given up")
            raise

    def warm(self, keys: Iterable[ExecutorKey]) -> None:
        """Keep spares of these keys from now on, if the settings want spares of their agents."""
        self._kept |= dict.fromkeys(keys)
        self.roster.changed.notify()

    @property
    def kept(self) -> tuple[ExecutorKey, ...]:
        """The keys of which spares are kept."""
        return tuple(self._kept)

    def retire(self, executor: Executor, detail: str, *, grace: float = 0.0) -> None:
        """End an executor and all its processes in the background; see `Executor.ended` and `killed`.

        It is asked to shut down and is killed after `grace` seconds, or at once if `grace` is 0.
        """
        self._ender.retire(executor, detail, grace)

    async def end(self, executor: Executor, detail: str, *, grace: float = 0.0) -> Killed:
        """End an executor like `retire`, and wait for the result. If the caller is cancelled, the ending continues.

        A quarantined executor is checked again first.
        """
        if executor.state == "quarantined":
            await self._ender.check(executor).wait()
        self.retire(executor, detail, grace=grace)
        await executor.ended.wait()
        assert executor.killed is not None
        return executor.killed

    # ------------------------------------------------------------ connections

    async def attach(self, executor: Executor, peer: ExecutorPeer, hello: m.Hello) -> None:
        """Use a connection on which an admitted executor sent its hello, and close its older connection.

        `lease_lost` if the executor was given up. Tasks that `on_change` wakes run only after the caller's next step,
        so that the reply to the hello is sent first.
        """
        state: m.ExecutorState = "leased" if executor.session is not None else "ready"
        if executor.launching:
            await self._ask_kernel(executor)
        if not executor.over:
            made_of = msgspec.to_builtins(executor.made_of)
            await self.roster.save(
                executor, state=state, protocol=hello.protocol, version=hello.version, made_of=made_of
            )
        if executor.over:  # given up before or during the write; the code that ends it stores its state
            raise HutchError(Reason.LEASE_LOST, f"This executor was given up: {executor.detail}.")
        former, executor.peer = executor.peer, peer
        executor.disconnected = anyio.Event()
        executor.attached += 1
        executor.last_seen = self._clock()
        executor.turn = hello.turn
        executor.prepared = executor.prepared or hello.session is not None
        executor.protocol, executor.abilities = hello.protocol, hello.abilities
        if former is not None:
            former.close()
        if executor.state != state:
            self.roster.move(executor, state)
        executor.connected.set()
        self.roster.report(executor)

    async def _ask_kernel(self, executor: Executor) -> None:
        """Record the limits and groups that a started executor really has."""
        made_of, launched = executor.made_of, executor.launched
        assert made_of is not None, "its start set this"
        assert launched is not None, "its start set this"
        found = await anyio.to_thread.run_sync(executor.environment.in_force, launched)
        gids = made_of.gids if found.gids is None else found.gids
        executor.made_of = msgspec.structs.replace(made_of, applied=found.limits, gids=gids)

    def detach(self, executor: Executor, peer: ExecutorPeer) -> None:
        """Record that a connection has ended and all its data was read. Ignore a connection that was replaced."""
        if executor.peer is not peer:
            return
        executor.peer = None
        executor.disconnected.set()
        if executor.state in ("ready", "leased"):
            self.roster.move(executor, "detached")
        self.roster.report(executor)

    # ------------------------------------------------------------ adoption

    async def adopt(self, rows: Iterable[ExecutorRow]) -> list[Executor]:
        """Adopt the executors of an earlier hutchd. Return those that live and should dial in; end the others."""
        await anyio.to_thread.run_sync(adoption.remove_old_output, self._output_dir)
        return adoption.adopt(rows, self.roster, self._ender, self._environments, self._account_of, self._spawn)

    # ------------------------------------------------------------ carrying out

    def _spawn(self, run: Callable[..., Any], *args: object) -> None:
        assert self._tasks is not None, "the pool runs"
        self._tasks.start_soon(run, *args)

    async def _run(self) -> None:
        """Plan and carry out the plan: after each change, at the plan's `look_at`, and after `look_interval` at most.

        New settings and heartbeats change the plan without waking this task.
        """
        trim_at = self._clock()
        while True:
            before = self._clock()
            if self._leases:
                self._composition.refresh()
            self._forget_kinds()
            due = plan(self._state(), before)
            self._carry_out(due)
            self.roster.look_at = math.inf if self._leases else due.look_at
            pause = max(0.0, min(due.look_at - before, look_interval(self._settings.current.executors)))
            with anyio.move_on_after(pause):
                await self.roster.changed.wait()
            passed = self._clock() - before
            self._excuse(passed, pause)
            if self._clock() >= trim_at:
                trim_at = self._clock() + look_interval(self._settings.current.executors)
                for one in self.roster.all():
                    if one.launched is not None:
                        one.environment.trim_output(one.launched)

    def _excuse(self, passed: float, pause: float) -> None:
        """Extend the executors' deadlines by the time in which hutchd did not run or could not store their events."""
        late = passed - pause
        if not self._store.available:
            late = passed
        elif late < look_interval(self._settings.current.executors):
            return
        self.roster.excuse(late)

    def _carry_out(self, due: PoolPlan) -> None:
        by_id = {one.id: one for one in self.roster.all()}
        for each in due.retire:
            self.retire(by_id[each.executor], each.detail, grace=each.grace)
        for executor in due.check:
            self._ender.check(by_id[executor])
        for number, executor in due.hand_out:
            self._hand_out(self._leases.take(number), by_id[executor])
        for number in due.refuse:
            lease = self._leases.take(number)
            stops = HutchError(Reason.SHUTTING_DOWN)
            lease.refuse(stops if self._stopping else self._starter.blocked_error(lease.key))
        for key in due.start:
            self._starter.start(key)
        for executor in due.abandon:
            self._starter.abandon(by_id[executor])

    def _hand_out(self, lease: LeaseRequest, executor: Executor) -> None:
        self.roster.assign(executor, lease.session)
        self.roster.move(executor, "leased")
        self.roster.delay_spare(lease.key, _SPARE_DELAY)
        lease.grant(executor)

    def _fail_oldest_lease(self, key: ExecutorKey, error: Exception) -> bool:
        """Refuse the oldest waiting lease of a key with `error`; return False if none waits."""
        lease = self._leases.take_first(key)
        if lease is None:
            return False
        lease.refuse(error)
        return True

    def _forget_kinds(self) -> None:
        """Forget the keys that need no spares: of accounts that are gone, and of other accounts without sessions."""
        used = {one.key for one in self.roster.all() if not one.over} | self._leases.keys()
        for key in [*self._kept]:
            gone = self._composition.account(key) is None
            if gone or (key not in used and key.uid != self._server_uid):
                del self._kept[key]
        for key in self.roster.spare_at.keys() - used - self._kept.keys():
            del self.roster.spare_at[key]
        self._starter.forget(used | self._kept.keys())

    def _state(self) -> PoolState:
        return PoolState(
            settings=self._settings.current.executors,
            own_uid=self._server_uid,
            starts_at_once=_MAX_CONCURRENT_STARTS,
            account_limit=self._settings.limits.executors,
            executors=self.roster.view(self._composition),
            leases=self._leases.view(),
            kept=tuple(self._kept),
            spare_at=self.roster.spare_at,
            histories=self._starter.histories,
            stopping=self._stopping,
        )


def _lease(tx: Tx, executor: str, session: str) -> None:
    executors.lease(tx, executor, session, now_ms())
    executors.update(tx, executor, state="leased")
