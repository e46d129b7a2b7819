"""The pool: starts executors, hands them out, watches them, ends them, and finds those of an earlier hutchd again.

What is always true:

- Intent is stored before the act: a row says `starting` before a process exists, `leased` before it gets a session.
- An executor serves one session and no second one after it. A spare serves none.
- Its slot is free when it is `gone`, which is said only after a look that found nothing left of it; until then it is
  `quarantined`, counts against `maximum`, and is looked at again.
- Every process is watched from its start, or its adoption, to its end. Cancelling `run` ends nobody: executors live on.
- What cannot start is not tried in a busy loop: the pause doubles, then it is left alone for a while, with one notice.

When `maximum` executors (or `memory` bytes) are in use, a lease first takes the place of a spare, then of the session
that has been idle longest, else it waits.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, Protocol

import anyio
import structlog
from anyio.abc import TaskGroup

from hutch_daemon.environments.port import Account, Exited, Killed, Launched, LaunchSpec
from hutch_daemon.environments.registry import Environments
from hutch_daemon.pool.executor import Executor, ExecutorKey, ExecutorPeer
from hutch_daemon.pool.start_history import StartHistory
from hutch_daemon.settings import ExecutorSettings, LimitSettings
from hutch_daemon.store import executors
from hutch_daemon.store.rows import ExecutorRow
from hutch_daemon.store.store import Store
from hutch_daemon.store.tx import Tx
from hutch_shared import messages as m
from hutch_shared.errors import HutchError, Reason
from hutch_shared.failpoints import failpoint
from hutch_shared.ids import new_id
from hutch_shared.secret import Secret
from hutch_shared.times import now_ms

__all__ = ["IssuedToken", "Pool"]

_SPARE_DELAY: Final = 0.5
"""Seconds before a spare that was handed out is replaced: the session that got it goes first."""
_STARTS_AT_ONCE: Final = 2 * (os.cpu_count() or 1)
"""More would only make each other miss the deadline of the hello."""
_OUTPUT_KEPT: Final = 7 * 24 * 3600.0
"""Seconds that the output of an executor is kept after its last line."""
_HEARTBEAT: Final = 5.0
"""Seconds between the signs of life of an executor, or a quarter of the time after which it counts as silent."""
_LAST_WORDS: Final = 5.0
"""Seconds to read what an executor that has ended still left in its socket."""

_log = structlog.get_logger(__name__)


class IssuedToken(Protocol):
    """A fresh token, as whoever issues them makes it."""

    @property
    def secret(self) -> Secret: ...
    @property
    def hash(self) -> bytes: ...
    @property
    def until(self) -> int: ...
    @property
    def maximum(self) -> int: ...


class Pool:
    """All executors of this hutchd. Its methods are called on the event loop."""

    def __init__(
        self,
        store: Store,
        environments: Environments,
        settings: Callable[[], ExecutorSettings],
        issue: Callable[[], IssuedToken],
        account_of: Callable[[int], Account],
        *,
        socket: str,
        server_uid: int,
        boot_id: str,
        output_dir: Path,
        limits: Callable[[], LimitSettings] = LimitSettings,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`socket` is where executors dial in; `output_dir` is where their own output goes; `limits` are in force."""
        self._store = store
        self._environments = environments
        self._settings = settings
        self._issue = issue
        self._account_of = account_of
        self._limits = limits
        self._socket, self._server_uid, self._boot_id = socket, server_uid, boot_id
        self._output_dir = output_dir
        self._clock = clock
        self._executors: dict[str, Executor] = {}
        self._starts: dict[ExecutorKey, StartHistory] = {}
        self._kept: set[ExecutorKey] = set()
        self._starting = anyio.CapacityLimiter(_STARTS_AT_ONCE)
        self._starts_of: dict[int, anyio.CapacityLimiter] = {}
        self._retrying: set[str] = set()
        self._freed = anyio.Event()
        self._missing = anyio.Event()
        self._tasks: TaskGroup | None = None
        self._stopping = False
        self.on_change: Callable[[Executor], None] = lambda _: None
        """Told whenever an executor's state or connection changed; must not block."""
        self.on_notice: Callable[[str, str], None] = lambda _word, _message: None
        """Told what an administrator should know."""

    # ------------------------------------------------------------ life

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Keep the pool's tasks; leaving ends the tasks and no executor."""
        async with anyio.create_task_group() as tasks:
            self._tasks = tasks
            tasks.start_soon(self._look_after)
            try:
                yield
            finally:
                self._stopping = True
                tasks.cancel_scope.cancel()

    def stop_starting(self) -> None:
        """Start no more executors and end the spares that wait."""
        self._stopping = True
        for one in self.all():
            if one.session is None:
                self.retire(one, "hutchd stops", grace=2.0)

    # ------------------------------------------------------------ looking

    def all(self) -> list[Executor]:
        """Return those that are not gone, oldest first."""
        return list(self._executors.values())

    def get(self, executor: str) -> Executor | None:
        """Return one that is not gone."""
        return self._executors.get(executor)

    def of_session(self, session: str) -> Executor | None:
        """Return the executor that serves a session now."""
        return next((one for one in self._executors.values() if one.session == session and not one.over), None)

    def pids(self) -> dict[int, str]:
        """Return the processes of executors that may still have children, by pid."""
        return {one.launched.pid: one.id for one in self._executors.values() if one.launched is not None}

    # ------------------------------------------------------------ handing out

    async def lease(self, session: str, key: ExecutorKey) -> Executor:
        """Return an executor that serves `session` from now on, durably; another one that did is retired.

        Waits for a free slot. `agent_unavailable` or `isolation_unavailable` when none can be started, with the reason.
        """
        while (executor := self._take(key)) is None:
            await self._start(key)
        executor.session = session
        executor.move("leased", self._clock())
        for former in self.all():
            if former.session == session and former is not executor:
                self.retire(former, "another executor serves its session")
        try:
            await self._store.write(lambda tx: _lease(tx, executor.id, session))
        except BaseException:
            self.retire(executor, "its lease could not be stored")
            raise
        self._keep_spares(key)
        self.on_change(executor)
        return executor

    def warm(self, keys: Iterable[ExecutorKey]) -> None:
        """Keep spares of these kinds from now on."""
        for key in keys:
            self._keep_spares(key)

    def retire(self, executor: Executor, detail: str, *, grace: float = 0.0) -> None:
        """End an executor and all that it started, in the background; see `Executor.ended` and `killed`.

        With `grace` it is asked first and has so many seconds; without, it is killed at once.
        """
        if executor.over:
            return
        assert self._tasks is not None, "the pool runs"
        executor.move("draining", self._clock())
        executor.detail = detail
        self._tasks.start_soon(self._end, executor, grace)
        self.on_change(executor)

    async def end(self, executor: Executor, detail: str, *, grace: float = 0.0) -> Killed:
        """Do as `retire` and wait for what came of it. Cancelled, the end goes on."""
        self.retire(executor, detail, grace=grace)
        await executor.ended.wait()
        assert executor.killed is not None
        return executor.killed

    # ------------------------------------------------------------ connections

    async def attach(self, executor: Executor, peer: ExecutorPeer, hello: m.Hello) -> None:
        """Take the connection on which an admitted executor said hello; an older connection of it is closed.

        What `on_change` wakes runs after the caller's next step, so that the answer to the hello goes out first.
        """
        state: m.ExecutorState = "leased" if executor.session is not None else "ready"
        if not executor.over:
            await self._save(executor, state=state, protocol=hello.protocol, version=hello.version)
        if executor.over:  # before, or while that was stored; its end stores what it is
            raise HutchError(Reason.LEASE_LOST, f"This executor was given up: {executor.detail}.")
        former, executor.peer = executor.peer, peer
        executor.disconnected = anyio.Event()
        executor.attached += 1
        executor.heard = self._clock()
        executor.turn = hello.turn
        executor.prepared = executor.prepared or hello.session is not None
        executor.protocol = hello.protocol
        if former is not None:
            former.close()
        if executor.state != state:
            executor.move(state, executor.heard)
        executor.connected.set()
        self.on_change(executor)

    def detach(self, executor: Executor, peer: ExecutorPeer) -> None:
        """Note that a connection is over and everything on it was read; one that was replaced does not matter."""
        if executor.peer is not peer:
            return
        executor.peer = None
        executor.disconnected.set()
        if executor.state in ("ready", "leased"):
            executor.move("detached", self._clock())
        self.on_change(executor)

    def idle(self, executor: Executor) -> None:
        """Note that its session has nothing to do: from now on it may be let go for another one."""
        if executor.idle_since is None:
            executor.idle_since = self._clock()
            self._wake_waiting()

    def heard(self, executor: Executor, beat: m.Heartbeat) -> None:
        """Note a sign of life."""
        executor.heard = self._clock()
        executor.rss = beat.rss_bytes

    # ------------------------------------------------------------ adoption

    async def adopt(self, rows: Iterable[ExecutorRow]) -> list[Executor]:
        """Take over what an earlier hutchd started: return those that live and should dial in; the rest is ended."""
        assert self._tasks is not None, "the pool runs"
        await anyio.to_thread.run_sync(_remove_old, self._output_dir)
        living: list[Executor] = []
        for row in rows:
            environment = self._environments.get(row.environment)
            gone = ""
            try:
                account = self._account_of(row.uid)
            except HutchError as error:  # what runs of it is ended all the same
                gone, account = error.message, Account(row.uid, row.uid, row.account, "/")
                self.on_notice("account_gone", f"{row.id} is ended: {gone}")
            key = ExecutorKey(account, row.agent, row.environment)
            if environment is None:
                self.on_notice(
                    "environment_gone", f"{row.id} was started in {row.environment}, which is not set up now."
                )
                continue
            executor = Executor(row.id, key, environment, self._clock())
            executor.state = "detached" if row.state in ("starting", "ready", "leased") else row.state
            executor.session, executor.acked, executor.protocol = row.session, row.acked_n, row.protocol
            executor.adopted = True
            self._executors[row.id] = executor
            found = environment.adopt(row.launched) if row.launched is not None else None
            executor.launched = found or _remains(row)
            executor.started.set()
            if executor.state == "draining":
                self._tasks.start_soon(self._end, executor, 0.0)
            elif executor.state == "detached" and gone:
                self.retire(executor, gone)
            elif executor.state == "detached" and found is None:  # what a dead one started may live
                self.retire(executor, "it was gone when hutchd came back")
            elif executor.state == "detached":
                living.append(executor)
                self._tasks.start_soon(self._watch, executor)
        return living

    # ------------------------------------------------------------ starting

    def _take(self, key: ExecutorKey) -> Executor | None:
        ready = (one for one in self._executors.values() if one.state == "ready" and one.key == key)
        return next(ready, None)

    async def _start(self, key: ExecutorKey) -> None:
        """Start one executor of `key` and wait for its hello; then it is `ready`, unless somebody was quicker.

        A failed start returns too, after it was noted, until so many failed that it raises. `shutting_down` when the
        pool is to start nothing more.
        """
        settings = self._settings()
        limit, window = settings.start_attempts, settings.start_window
        starts = self._starts.get(key, StartHistory())
        pause = starts.not_before(limit, window) - self._clock()
        if starts.blocked(limit) and pause > 0:
            raise HutchError(
                Reason.AGENT_UNAVAILABLE,
                f"{key} could not be started {len(starts.failures)} times; it is tried again in {pause:.0f} s."
                f" {starts.error}",
                retry_after=round(pause, 1),
            )
        if pause > 0:
            await anyio.sleep(pause)
        try:
            async with self._own_starts(key):
                await self._start_in_turn(key, settings)
        except HutchError as error:
            if error.reason is not Reason.AGENT_UNAVAILABLE:
                raise
            starts = self._starts.get(key, StartHistory()).failed(self._clock(), error.message, window)
            self._starts[key] = starts
            _log.warning(
                "executor did not start", executor_key=str(key), error=error.message, failures=len(starts.failures)
            )
            if starts.blocked(limit):
                if len(starts.failures) == limit:
                    self.on_notice(
                        "start_loop", f"{key} failed to start {limit} times in {window:.0f} s. {error.message}"
                    )
                raise
        else:
            self._starts.pop(key, None)

    def _own_starts(self, key: ExecutorKey) -> anyio.CapacityLimiter:
        """Return what an account's starts share: one whose executors do not come up holds up nobody else's."""
        uid = key.account.uid
        if uid == self._server_uid:
            return self._starts_of.setdefault(uid, anyio.CapacityLimiter(_STARTS_AT_ONCE))
        return self._starts_of.setdefault(uid, anyio.CapacityLimiter(max(1, _STARTS_AT_ONCE // 4)))

    async def _start_in_turn(self, key: ExecutorKey, settings: ExecutorSettings) -> None:
        """Wait for room, then for one's turn, in that order: who waits for room must not keep others from starting."""
        while True:
            await self._make_room(key)
            async with self._starting:
                if self._stopping:
                    raise HutchError(Reason.SHUTTING_DOWN)
                if self._has_room(key):
                    await self._launch(key, settings)
                    return

    async def _launch(self, key: ExecutorKey, settings: ExecutorSettings) -> None:
        assert self._tasks is not None, "the pool runs"
        environment = self._environments.choose(key.environment, key.account)
        limits, grouped = self._limits(), environment.isolation_offered().cgroup
        executor = Executor(new_id("executor"), key, environment, self._clock())
        token = self._issue()
        log_path = self._output_dir / f"{executor.id}.log"
        row = ExecutorRow(
            id=executor.id,
            account=key.account.name,
            uid=key.account.uid,
            agent=key.agent,
            environment=key.environment,
            created_at=now_ms(),
            token_hash=token.hash,
            boot_id=self._boot_id,
            token_until=token.until,
            token_max_uses=token.maximum,
            epoch=self._store.epoch,
            log_path=str(log_path),
        )
        self._executors[executor.id] = executor
        executor.launched = _remains(row)  # until more is known, its mark finds what there is of it
        boot = m.Boot(
            executor=executor.id,
            token=token.secret.reveal(),
            socket=self._socket,
            server_uid=self._server_uid,
            agent=key.agent,
            daemon_epoch=self._store.epoch,
            memory_limit=settings.memory if grouped else limits.memory or settings.memory,
            heartbeat=min(_HEARTBEAT, settings.heartbeat_timeout / 4),
        )
        spec = LaunchSpec(
            executor.id,
            key.account,
            key.agent,
            boot,
            key.account.home,
            log_path,
            {},
            memory_limit=limits.memory or settings.memory,
            pids=limits.pids,
            cpu_weight=limits.cpu_weight,
            open_files=limits.open_files,
        )
        try:
            await self._store.write(lambda tx: executors.insert(tx, row))
            executor.launched = launched = await environment.start(spec)
            failpoint("pool.started")
            executor.started.set()
            await self._store.write(
                lambda tx: executors.update(
                    tx, executor.id, pid=launched.pid, start_time=launched.start_time, launched=dict(launched.state)
                )
            )
        except BaseException as error:
            executor.started.set()
            self.retire(executor, str(error) or "its start was given up")
            raise
        self._tasks.start_soon(self._watch, executor)
        with anyio.move_on_after(settings.hello_timeout):
            await executor.connected.wait()
        if not executor.connected.is_set():
            self.retire(executor, f"it did not say hello within {settings.hello_timeout:.0f} s")
        if executor.over:
            raise HutchError(
                Reason.AGENT_UNAVAILABLE, f"The executor did not come up: {executor.detail}. Its output: {log_path}"
            )

    async def _make_room(self, key: ExecutorKey) -> None:
        """Wait until one more may be started; ends a spare or the longest idle executor for it."""
        while not self._has_room(key):
            freed = self._freed
            full = not self._has_room()
            among = [one for one in self._executors.values() if full or one.key.account.uid == key.account.uid]
            spares = [one for one in among if one.state == "ready" and one.key != key]
            idle = [one for one in among if one.state == "leased" and one.idle_since is not None]
            ending = any(one.state == "draining" for one in among)
            if spares:
                self.retire(spares[0], "its slot was needed", grace=2.0)
            elif idle and not ending:
                self.retire(min(idle, key=lambda one: one.idle_since or 0.0), "its slot was needed", grace=5.0)
            await freed.wait()

    def _has_room(self, key: ExecutorKey | None = None) -> bool:
        """Tell whether one more may be started, of `key`: an account has a limit of its own."""
        settings, of_account = self._settings(), self._limits().executors
        if key is not None and of_account is not None:
            uid = key.account.uid
            if sum(one.key.account.uid == uid for one in self._executors.values()) >= of_account:
                return False
        if settings.memory is not None and sum(one.rss for one in self._executors.values()) >= settings.memory:
            return False
        return len(self._executors) < settings.maximum

    def _keep_spares(self, key: ExecutorKey) -> None:
        self._missing.set()
        if key in self._kept or key.agent not in self._settings().spare_agents or self._tasks is None:
            return
        self._kept.add(key)
        self._tasks.start_soon(self._keep, key)

    async def _keep(self, key: ExecutorKey) -> None:
        """Replace the spares of one kind as they are handed out."""
        while not self._stopping:
            settings = self._settings()
            here = [one for one in self._executors.values() if one.key == key and one.session is None and not one.over]
            if len(here) >= settings.spares or not self._has_room(key) or not self._is_wanted(key):
                self._missing = anyio.Event() if self._missing.is_set() else self._missing
                await self._missing.wait()
                await anyio.sleep(_SPARE_DELAY)
                continue
            try:
                await self._start(key)
            except HutchError as error:
                wait = self._starts.get(key, StartHistory()).not_before(settings.start_attempts, settings.start_window)
                _log.warning("no spare executor", executor_key=str(key), error=error.message)
                await anyio.sleep(max(1.0, wait - self._clock()))

    # ------------------------------------------------------------ watching and ending

    async def _watch(self, executor: Executor) -> None:
        assert executor.launched is not None
        exited: Exited | None = None
        while exited is None:
            try:
                exited = await executor.environment.wait(executor.launched)
            except OSError as error:  # no descriptor left: look again
                _log.error("an executor cannot be watched", executor=executor.id, error=str(error))
                await anyio.sleep(1.0)
        self.retire(executor, "its process ended" + (f" with {exited.code}" if exited.code is not None else ""))

    async def _end(self, executor: Executor, grace: float) -> None:
        await executor.started.wait()  # what is being started has to be there before it can be ended
        launched = executor.launched
        assert launched is not None
        await self._save(executor, state="draining", detail=executor.detail)
        if grace > 0 and executor.peer is not None:
            with anyio.move_on_after(grace):
                try:
                    await executor.call("shutdown", m.Shutdown(executor.detail), grace)
                    await executor.environment.wait(launched)
                except HutchError as error:
                    _log.info("executor did not take its shutdown", executor=executor.id, error=error.message)
        killed = await self._kill(executor, launched)
        if executor.peer is not None:
            with anyio.move_on_after(_LAST_WORDS):
                await executor.disconnected.wait()
        if executor.peer is not None:
            executor.peer.close()
        executor.killed = killed
        executor.move("gone" if killed.verified else "quarantined", self._clock())
        if not killed.verified:
            what = (
                f"these processes could not be ended: {killed.left}" if killed.left else "nobody can tell what is left"
            )
            executor.detail = f"{executor.detail}; {what}"
            self.on_notice("quarantined", f"{executor.id}: {executor.detail}")
        await self._settle(executor)
        executor.ended.set()
        executor.connected.set()
        self.on_change(executor)

    async def _kill(self, executor: Executor, launched: Launched) -> Killed:
        try:
            return await executor.environment.kill(launched)
        except OSError as error:
            _log.error("an executor cannot be ended", executor=executor.id, error=str(error))
            return Killed(verified=False, left=(launched.pid,))

    async def _settle(self, executor: Executor) -> None:
        gone = executor.state == "gone"
        await self._save(
            executor,
            state=executor.state,
            session=None,
            detail=executor.detail,
            **({"gone_at": now_ms()} if gone else {}),
        )
        if gone:
            self._executors.pop(executor.id, None)
            await self._sweep(executor)
            self._wake_waiting()
            self._missing.set()

    async def _sweep(self, executor: Executor) -> None:
        """Sweep up after the last executor of an account that is Hutch's alone."""
        account = executor.key.account
        if any(one.key.account.uid == account.uid for one in self._executors.values()):
            return
        if why := await executor.environment.sweep(account):
            self.on_notice(f"sweep:{account.name}", f"What {account.name} left could not be swept away: {why}")

    def _wake_waiting(self) -> None:
        """Have those who wait for room look again."""
        self._freed.set()
        self._freed = anyio.Event()

    async def _save(self, executor: Executor, **fields: Any) -> None:
        """Store what happened anyway. What cannot be stored now is found out again by the next adoption."""
        try:
            await self._store.write(lambda tx: executors.update(tx, executor.id, **fields))
        except HutchError as error:
            _log.error("an executor's state is not stored", executor=executor.id, error=error.message, **fields)

    async def _look_after(self) -> None:
        """Find the silent, the lost and the idle, a few times a minute."""
        while True:
            settings = self._settings()
            interval = max(0.05, min(5.0, settings.heartbeat_timeout / 4, settings.lost_timeout / 4))
            before = self._clock()
            await anyio.sleep(interval)
            passed = self._clock() - before
            late = passed - interval if self._store.available else passed  # what cannot be stored is not taken either
            for one in self.all():
                if late >= interval:  # it was hutchd that did not run, or the disk: nobody else is to blame
                    one.heard, one.since = one.heard + late, one.since + late
                self._judge(one, settings)
                if one.launched is not None:
                    one.environment.trim_output(one.launched)
                if one.state == "quarantined" and one.launched is not None and one.id not in self._retrying:
                    assert self._tasks is not None, "the pool runs"
                    self._retrying.add(one.id)
                    self._tasks.start_soon(self._try_again, one, one.launched)

    def _judge(self, one: Executor, settings: ExecutorSettings) -> None:
        now = self._clock()
        if one.state in ("ready", "leased") and now - one.heard > settings.heartbeat_timeout:
            self.retire(one, f"it was silent for {settings.heartbeat_timeout:.0f} s")
        elif one.state == "starting" and now - one.since > settings.hello_timeout + settings.lost_timeout:
            self.retire(one, "its start was given up")
        elif one.state == "detached" and now - one.since > settings.lost_timeout:
            self.retire(one, f"it had no connection for {settings.lost_timeout:.0f} s")
        elif one.state == "leased" and one.idle_since is not None and now - one.idle_since > settings.idle_timeout:
            self.retire(one, "its session was idle", grace=5.0)
        elif one.state == "ready" and now - one.since > settings.idle_timeout and self._is_surplus(one, settings):
            self.retire(one, "nobody needed it", grace=2.0)

    def _is_surplus(self, one: Executor, settings: ExecutorSettings) -> bool:
        """Tell whether a spare is one too many: several may be started for one session, when hutchd was restarted."""
        alike = [other for other in self._executors.values() if other.state == "ready" and other.key == one.key]
        wanted = one.key in self._kept and self._is_wanted(one.key)
        return len(alike) > (settings.spares if wanted else 0)

    def _is_wanted(self, key: ExecutorKey) -> bool:
        """Tell whether spares of a kind are kept: of other accounts than hutchd's only while they have sessions."""
        if key.account.uid == self._server_uid:
            return True
        return any(
            one.session is not None and not one.over and one.key.account.uid == key.account.uid
            for one in self._executors.values()
        )

    async def _try_again(self, one: Executor, launched: Launched) -> None:
        try:
            killed = await self._kill(one, launched)
            if killed.verified:
                one.killed = killed
                one.move("gone", self._clock())
                await self._settle(one)
                self.on_change(one)
        finally:
            self._retrying.discard(one.id)


def _remove_old(output: Path) -> None:
    """Remove the output of executors that have long been gone."""
    before = time.time() - _OUTPUT_KEPT
    for file in output.glob("x-*.log"):
        with contextlib.suppress(OSError):
            if file.stat().st_mtime < before:
                file.unlink()


def _lease(tx: Tx, executor: str, session: str) -> None:
    executors.lease(tx, executor, session, now_ms())
    executors.update(tx, executor, state="leased")


def _remains(row: ExecutorRow) -> Launched:
    """Return what is known of an executor's process from its row: enough to look for what it started."""
    state = row.launched or {}
    return Launched(row.id, row.pid or 0, row.start_time or 0, row.boot_id, row.uid, state)
