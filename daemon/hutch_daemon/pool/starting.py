"""Starts executors: stores a row, starts a process, sends its boot line, waits for its hello. Records failures."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import anyio
import msgspec
import structlog

from hutch_daemon.environments.port import Environment, Launched, LaunchSpec
from hutch_daemon.environments.registry import Environments
from hutch_daemon.pool.ending import Ender, Spawn
from hutch_daemon.pool.executors import Executor, Roster
from hutch_daemon.pool.made_of import Composition, MadeOf
from hutch_daemon.pool.start_history import NO_FAILURES, StartHistory
from hutch_daemon.pool.tokens import IssuedToken
from hutch_daemon.pool.view import ExecutorKey
from hutch_daemon.settings import SettingsInForce
from hutch_daemon.store import executors
from hutch_daemon.store.rows import ExecutorRow
from hutch_daemon.store.store import Store
from hutch_shared import messages as m
from hutch_shared.backoff import Backoff
from hutch_shared.conditions import Conditions
from hutch_shared.errors import HutchError, Reason
from hutch_shared.failpoints import failpoint
from hutch_shared.ids import new_id
from hutch_shared.times import now_ms

__all__ = ["FIRST_PAUSE", "StartContext", "Starter", "launched_as_stored"]

FIRST_PAUSE: Final = 0.25
_MAX_PAUSE: Final = 30.0
_SPARE_PAUSE: Final = 1.0
"""The least number of seconds before a spare that did not start is tried again."""
_HEARTBEAT: Final = 5.0
"""The most seconds between two heartbeats of an executor; a quarter of the heartbeat timeout if that is less."""
_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class StartContext:
    """The parameters of all starts."""

    environments: Environments
    settings: SettingsInForce
    composition: Composition
    issue: Callable[[], IssuedToken]
    socket: str
    """The path of the socket for executors."""
    server_uid: int
    boot_id: str
    output_dir: Path
    """The directory of the executors' log files."""


class _OutdatedError(Exception):
    """The settings, the account or the files changed during a start: another start is due, and none has failed."""


class Starter:
    """Starts executors, each in its own task, and keeps the history of failed starts by key."""

    def __init__(
        self,
        roster: Roster,
        ender: Ender,
        store: Store,
        context: StartContext,
        spawn: Spawn,
        refuse: Callable[[ExecutorKey, Exception], bool],
    ) -> None:
        """`refuse(key, error)` refuses a waiting lease of a key whose start failed; it returns False if none waits."""
        self._roster = roster
        self._ender = ender
        self._store = store
        self._context = context
        self._spawn = spawn
        self._refuse = refuse
        self._scopes: dict[str, anyio.CancelScope] = {}
        self._backoffs: dict[ExecutorKey, Backoff] = {}
        self._conditions = Conditions(logging.getLogger(__name__))
        self.histories: dict[ExecutorKey, StartHistory] = {}
        self._stopped = False

    def __repr__(self) -> str:
        return f"<Starter {len(self._scopes)} starting, {len(self.histories)} keys with failures>"

    def start(self, key: ExecutorKey) -> None:
        """Start an executor in the background. It occupies a slot at once, and is `ready` after its hello."""
        composition = self._context.composition
        composition.refresh()
        account, made_of = composition.account(key), composition.of(key)
        try:
            environment = self._context.environments.choose(key.environment, account or key.account)
            if account is None or made_of is None:
                raise HutchError(
                    Reason.ISOLATION_UNAVAILABLE, f"The account {key.account.name} does not exist any more."
                )
        except HutchError as error:
            self._failed(key, error)
            return
        executor = Executor(new_id("executor"), replace(key, account=account), environment, self._roster.clock())
        executor.made_of = made_of
        executor.launching = True
        self._roster.add(executor)
        self._spawn(self._run, executor)

    def stop(self) -> None:
        """Record no more failures, because hutchd is ending the running starts."""
        self._stopped = True

    def forget(self, but: set[ExecutorKey]) -> None:
        """Forget the failed starts of all other keys, once they count no more."""
        settings, now = self._context.settings.current.executors, self._roster.clock()
        for key, history in [*self.histories.items()]:
            if key not in but and history.failures[-1] + settings.start_window <= now:
                del self.histories[key]
                self._backoffs.pop(key, None)
                self._roster.end_notice(f"start_loop:{key}")

    def abandon(self, executor: Executor) -> None:
        """Cancel a running start. Its process, if there is one, is ended."""
        if (scope := self._scopes.get(executor.id)) is not None:
            scope.cancel()

    def blocked_error(self, key: ExecutorKey) -> HutchError:
        """Return the error for a lease while no start of its key is tried."""
        history, settings = self.histories.get(key, NO_FAILURES), self._context.settings.current.executors
        pause = history.not_before(settings.start_attempts, settings.start_window) - self._roster.clock()
        times = len(history.failures)
        return HutchError(
            Reason.AGENT_UNAVAILABLE,
            f"{key} could not be started{f' {times} times' if times > 1 else ''}; it is tried again in {pause:.0f} s."
            f" {history.error}",
            retry_after=round(pause, 1),
        )

    async def _run(self, executor: Executor) -> None:
        with anyio.CancelScope() as scope:
            self._scopes[executor.id] = scope
            try:
                await self._start(executor)
            except _OutdatedError:
                _log.info("what an executor is made of changed during its start", executor=executor.id)
            except HutchError as error:
                self._failed(executor.key, error)
            except Exception as error:  # a bug: the session that waits gets the exception and reports it
                if not self._refuse(executor.key, error):
                    raise
            else:
                self.histories.pop(executor.key, None)
                self._backoffs.pop(executor.key, None)
                self._conditions.end(_not_started(executor.key), f"an executor of {executor.key} started")
                self._roster.end_notice(f"start_loop:{executor.key}")
            finally:
                del self._scopes[executor.id]
                executor.launching = False
                self._roster.changed.notify()

    def _failed(self, key: ExecutorKey, error: HutchError) -> None:
        """Record a failed start. `agent_unavailable` is retried after a pause; any other error refuses a lease."""
        if self._stopped:
            return
        self._roster.delay_spare(key, _SPARE_PAUSE)
        if error.reason is not Reason.AGENT_UNAVAILABLE:
            if not self._refuse(key, error):
                self._conditions.failed(_not_started(key), error)
            self._roster.changed.notify()
            return
        settings = self._context.settings.current.executors
        limit, window = settings.start_attempts, settings.start_window
        backoff = self._backoffs.get(key)
        if backoff is None:
            backoff = Backoff(FIRST_PAUSE, _MAX_PAUSE, jitter=0.0, clock=self._roster.clock)
            self._backoffs[key] = backoff
        history = self.histories.get(key, NO_FAILURES)
        history = history.failed(self._roster.clock(), error.message, window, backoff.next())
        self.histories[key] = history
        failures = len(history.failures)
        self._conditions.failed(_not_started(key), error)
        if failures == limit:
            self._roster.notice(
                f"start_loop:{key}", f"{key} failed to start {limit} times in {window:.0f} s. {error.message}"
            )

    async def _start(self, executor: Executor) -> None:
        """Start a process and wait for its hello. HutchError on failure. If cancelled, end the process."""
        timeout = self._context.settings.current.executors.hello_timeout
        made_of = executor.made_of
        assert made_of is not None, "`start` sets this"
        token = self._context.issue()
        row, spec = self._row(executor, token), self._spec(executor, token, made_of)
        executor.launched = launched_as_stored(row)
        try:
            await self._store.write(lambda tx: executors.insert(tx, row))
            executor.launched = launched = await executor.environment.start(spec)
            failpoint("pool.started")
            executor.started.set()
            await self._store.write(
                lambda tx: executors.update(
                    tx, executor.id, pid=launched.pid, start_time=launched.start_time, launched=dict(launched.state)
                )
            )
        except BaseException as error:
            executor.started.set()
            self._ender.retire(executor, str(error) or "its start was given up")
            raise
        self._spawn(self._ender.watch, executor)
        try:
            with anyio.move_on_after(timeout):
                await executor.connected.wait()
        except BaseException:
            self._ender.retire(executor, "its start was given up")
            raise
        if not executor.connected.is_set():
            self._ender.retire(executor, f"it did not say hello within {timeout:.0f} s")
        if executor.connected.is_set() and not made_of.matches(executor.made_of):
            self._ender.retire(executor, "the kernel reports other groups of it than its account has")
        if executor.over:
            self._context.composition.refresh()
            if not made_of.matches(self._context.composition.of(executor.key)):
                raise _OutdatedError
            raise HutchError(
                Reason.AGENT_UNAVAILABLE,
                f"The executor did not come up: {executor.detail}. Its output: {spec.log_path}",
            )

    def _row(self, executor: Executor, token: IssuedToken) -> ExecutorRow:
        key = executor.key
        return ExecutorRow(
            id=executor.id,
            account=key.account.name,
            uid=key.account.uid,
            agent=key.agent,
            environment=key.environment,
            created_at=now_ms(),
            token_hash=token.hash,
            boot_id=self._context.boot_id,
            token_until=token.until,
            token_max_uses=token.maximum,
            epoch=self._store.epoch,
            log_path=str(self._log_path(executor)),
            made_of=msgspec.to_builtins(executor.made_of),
        )

    def _spec(self, executor: Executor, token: IssuedToken, made_of: MadeOf) -> LaunchSpec:
        key, settings, limits = executor.key, self._context.settings.current.executors, made_of.limits
        boot = m.Boot(
            executor=executor.id,
            token=token.secret.reveal(),
            socket=self._context.socket,
            server_uid=self._context.server_uid,
            agent=key.agent,
            daemon_epoch=self._store.epoch,
            memory_limit=settings.memory if _has_cgroup(executor.environment) else limits.memory,
            open_files=limits.open_files,
            heartbeat=min(_HEARTBEAT, settings.heartbeat_timeout / 4),
        )
        return LaunchSpec(
            executor.id,
            key.account,
            key.agent,
            boot,
            key.account.home,
            self._log_path(executor),
            {},
            memory_limit=limits.memory,
            pids=limits.pids,
            cpu_weight=limits.cpu_weight,
            open_files=limits.open_files,
        )

    def _log_path(self, executor: Executor) -> Path:
        return self._context.output_dir / f"{executor.id}.log"


def _has_cgroup(environment: Environment) -> bool:
    return environment.isolation_offered().cgroup


def launched_as_stored(row: ExecutorRow) -> Launched:
    """Return the process that a row describes, which may be gone. It is enough to search for its descendants."""
    state = row.launched or {}
    return Launched(row.id, row.pid or 0, row.start_time or 0, row.boot_id, row.uid, state)


def _not_started(key: ExecutorKey) -> str:
    return f"no executor of {key} starts"
