"""The methods about hutchd itself: status, stop, backup."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final, Literal, Protocol

import anyio
import structlog

from hutch_daemon.environments.registry import Environments
from hutch_daemon.pool.executors import Executor
from hutch_daemon.pool.pool import Pool
from hutch_daemon.services.access import Access, Caller, require_absolute
from hutch_daemon.services.accounts import Accounts
from hutch_daemon.services.isolation import IsolationPlan, IsolationPlanner
from hutch_daemon.services.notices import Notices
from hutch_daemon.services.session_tasks import SessionTasks
from hutch_daemon.settings import SettingsInForce
from hutch_daemon.store import permissions, sessions, turns
from hutch_daemon.store.records import Executes
from hutch_daemon.store.store import Store
from hutch_shared import __version__
from hutch_shared import messages as m
from hutch_shared.errors import HutchError
from hutch_shared.latch import Latch
from hutch_shared.times import to_wire

__all__ = ["DaemonInfo", "HostService", "KeyStatus", "StopRequest"]

_log = structlog.get_logger(__name__)

_NO_LIMIT: Final = 1_000_000
"""A row limit that is never reached."""
_ALONE: Final = 10.0
"""Seconds after the end of its turn for which an executor waits for the next hutchd when one has stopped."""
_ANNOUNCEMENT: Final = 1.0
"""Seconds within which an executor must take the announcement that hutchd stops."""


@dataclass(frozen=True, slots=True)
class DaemonInfo:
    """Facts that do not change while this hutchd runs."""

    mode: Literal["user", "system"] = "user"
    started_at: int = 0
    """The time when hutchd started, in ms since 1970."""
    paths: Mapping[str, str] = field(default_factory=dict)


class KeyStatus(Protocol):
    """The part of the status that is about keys."""

    def master_source(self) -> str: ...

    async def broker(self) -> m.BrokerState: ...

    async def host_notices(self) -> tuple[str, ...]: ...

    def notices(self, owner: int | None) -> tuple[str, ...]: ...


class StopRequest:
    """A client's request to stop hutchd. `wiring` waits for it and carries it out. A later one replaces it."""

    def __init__(self) -> None:
        """Start without a request."""
        self._made = Latch()
        self._params: m.StopDaemon | None = None

    def make(self, params: m.StopDaemon) -> None:
        """Make the request."""
        self._params = params
        self._made.notify()

    async def wait(self) -> m.StopDaemon:
        """Wait until a request is made, and return it; the next call waits for the next request."""
        await self._made.wait()
        assert self._params is not None
        return self._params


class HostService:
    """The methods of the client socket that are about hutchd itself."""

    def __init__(
        self,
        store: Store,
        access: Access,
        accounts: Accounts,
        environments: Environments,
        isolation: IsolationPlanner,
        keys: KeyStatus,
        tasks: SessionTasks,
        pool: Pool,
        notices: Notices,
        stop_request: StopRequest,
        info: DaemonInfo,
        settings: SettingsInForce,
        *,
        clients: Callable[[], int],
        settings_notices: Callable[[], tuple[str, ...]],
    ) -> None:
        """`clients` counts connections; `settings_notices` returns the problems with the settings."""
        self._store = store
        self._access = access
        self._accounts = accounts
        self._environments = environments
        self._isolation = isolation
        self._keys = keys
        self._tasks = tasks
        self._pool = pool
        self._notices = notices
        self._stop_request = stop_request
        self._info = info
        self._settings = settings
        self._clients = clients
        self._settings_notices = settings_notices

    async def get_status(self, caller: Caller, params: m.Nothing) -> m.Status:
        """Return hutchd's status. Counts and executors are limited to those that the caller may see."""

        def count(conn: Executes) -> tuple[int, int, int, int, int]:
            mine = {row.id for row in sessions.list_(conn, caller.scope, "open", _NO_LIMIT)}
            live = [turn for turn in turns.live(conn) if turn.session in mine]
            waiting = sum(turn.state == "queued" for turn in live)
            asked = permissions.list_(conn, owner=caller.scope, limit=_NO_LIMIT)
            return len(mine), len(live) - waiting, waiting, len(asked), len({request.turn for request in asked})

        def served(conn: Executes) -> set[str]:
            named = [sessions.get(conn, one.session) for one in self._pool.roster.all() if one.session is not None]
            return {row.id for row in named if row is not None and caller.may_see(row.owner)}

        opened, running, queued, asked, awaiting = await self._store.read(count)
        shown = await self._store.read(served)
        plan = await self._usual_plan(caller)
        operator = caller.admin or caller.uid == os.geteuid()
        return m.Status(
            version=__version__,
            protocol=m.PROTOCOL,
            pid=os.getpid(),
            started_at=to_wire(self._info.started_at),
            mode=self._info.mode,
            draining=self._access.draining,
            store=self._store.status(),
            isolation=plan.isolation,
            keys=plan.keys,
            master_key=self._keys.master_source(),
            executors=tuple(
                one.status()
                for one in self._pool.roster.all()
                if caller.admin or (one.session in shown if one.session else one.key.account.uid == caller.uid)
            ),
            sessions_open=opened,
            turns_running=running,
            turns_awaiting_permission=awaiting,
            turns_queued=queued,
            permissions_pending=asked,
            clients=self._clients(),
            notices=(*(await self._operator_notices() if operator else ()), *self._keys.notices(caller.scope)),
            paths=dict(self._info.paths),
            broker=await self._keys.broker(),
        )

    async def stop_daemon(self, caller: Caller, params: m.StopDaemon) -> m.Nothing:
        """Request that hutchd stops, and accept no new work from now on."""
        _log.warning("asked to stop", by=str(caller), how=params.how)
        self._access.start_draining()
        self._stop_request.make(params)
        return m.Nothing()

    async def backup_store(self, caller: Caller, params: m.BackupStore) -> m.BackupDone:
        """Write a consistent copy of the database."""
        require_absolute(params.path, "file of the copy")
        return await self._store.backup(Path(params.path))

    async def stop(self, how: m.StopHow, timeout: float) -> None:
        """Stop accepting work and end the executors. This is not a method of the wire.

        `drain` waits up to `timeout` seconds for running turns to end; `stop` stops them first. Then executors are
        ended, except those whose turn has not ended; the next hutchd adopts these, or they end soon after their turn.
        `leave` ends no executor that has a session.
        """
        self._access.start_draining()
        self._pool.stop_starting()
        if how == "stop":
            for turn in await self._store.read(turns.live):
                if turn.state != "queued":
                    self._tasks.request_stop(turn.session, turn.id, "hutchd stops")
        if how == "leave":
            return
        with anyio.move_on_after(timeout):
            while await self._busy():  # noqa: ASYNC110 the store has no event for this, and it is rare
                await anyio.sleep(0.1)
        busy = await self._busy()
        with anyio.move_on_after(self._settings.current.executors.drain_timeout):
            async with anyio.create_task_group() as ends:
                for executor in self._pool.roster.all():
                    if executor.session not in busy and executor.state != "quarantined":
                        ends.start_soon(partial(self._pool.end, executor, "hutchd stops", grace=2.0))
                    else:
                        ends.start_soon(self._announce_absence, executor)

    async def _announce_absence(self, executor: Executor) -> None:
        """Let an executor end soon after its turn, unless hutchd is back by then."""
        if executor.peer is not None and not executor.over:
            with suppress(HutchError):  # then it ends some minutes after its turn
                await executor.call("shutdown", m.Shutdown("hutchd stops", True, _ALONE), _ANNOUNCEMENT)

    async def _busy(self) -> set[str]:
        """Return the sessions with an active turn."""
        return {turn.session for turn in await self._store.read(turns.live) if turn.state != "queued"}

    async def _usual_plan(self, caller: Caller) -> IsolationPlan:
        """Return the isolation that a new session of this caller would get.

        If the caller cannot open a session, use the result of the last probe of the sandbox.
        """
        await self._environments.probe()
        environment = self._environments.default
        try:
            account = self._accounts.for_new_session(caller, None)
            probe = await environment.probe_sandbox(account, self._settings.current.sandbox)
        except HutchError:
            probe = environment.last_probe()
        return self._isolation.usual(environment, probe)

    async def _operator_notices(self) -> tuple[str, ...]:
        """Return the notices for operators. They may name all users' sessions, keys and accounts."""
        return (*self._settings_notices(), *await self._keys.host_notices(), *self._notices.all())
