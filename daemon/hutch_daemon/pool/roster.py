"""The executors that the pool has now. It reports their changes to the callbacks of the pool's owner."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import structlog

from hutch_daemon.pool.executor import Executor, ExecutorKey
from hutch_daemon.pool.view import ExecutorView
from hutch_daemon.settings import SettingsInForce
from hutch_daemon.store import executors
from hutch_daemon.store.store import Store
from hutch_shared import messages as m
from hutch_shared.errors import HutchError
from hutch_shared.latch import Latch

__all__ = ["Roster"]

_log = structlog.get_logger(__name__)


class Roster:
    """The executors by id, from their start or adoption until they are gone."""

    def __init__(
        self,
        store: Store,
        on_change: Callable[[Executor], None],
        on_notice: Callable[[str, str], None],
        settings: SettingsInForce,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`on_change` and `on_notice` are those of `Pool`."""
        self._store = store
        self._on_change = on_change
        self._settings = settings
        self.notice = on_notice
        """Reports a notice: its name and a sentence. A later notice of the same name replaces it."""
        self.clock = clock
        self.changed = Latch()
        """Set when the pool should plan again."""
        self._by_id: dict[str, Executor] = {}
        self._serving: dict[str, Executor] = {}
        self.by_id: Mapping[str, Executor] = self._by_id
        """The executors that are not gone, by id, oldest first."""
        self.serving: Mapping[str, Executor] = self._serving
        """The executor that serves a session now, by session."""
        self.spare_at: dict[ExecutorKey, float] = {}
        """The earliest time when the next spare of a key may be started."""
        self.look_at = math.inf
        """The time of the next plan if nothing changes; infinite while a lease waits, which may need an idle slot."""

    def __repr__(self) -> str:
        return f"<Roster of {len(self._by_id)}>"

    def all(self) -> list[Executor]:
        """Return the executors that are not gone, oldest first, in a list that does not change."""
        return list(self._by_id.values())

    def of_account(self, uid: int) -> list[Executor]:
        """Return the executors of an account."""
        return [one for one in self._by_id.values() if one.key.account.uid == uid]

    def add(self, executor: Executor) -> None:
        """Add an executor, which then occupies a slot."""
        self._by_id[executor.id] = executor

    def remove(self, executor: Executor) -> None:
        """Remove an executor that is gone, which frees its slot."""
        self._by_id.pop(executor.id, None)

    def assign(self, executor: Executor, session: str) -> None:
        """Let an executor serve a session from now on."""
        executor.session = session
        self._serving[session] = executor

    def move(self, executor: Executor, state: m.ExecutorState) -> None:
        """Change an executor's state. IllegalMoveError for a move that the table does not allow."""
        executor.move(state, self.clock())
        if executor.over and executor.session is not None and self._serving.get(executor.session) is executor:
            del self._serving[executor.session]

    def report(self, executor: Executor) -> None:
        """Report a change of an executor's state or connection."""
        self._on_change(executor)
        self.changed.notify()

    def idle(self, executor: Executor) -> None:
        """Record that the executor's session has no work. From now on it may be ended to make room for another."""
        if executor.idle_since is None:
            executor.idle_since = self.clock()
            if executor.idle_since + self._settings.current.executors.idle_timeout < self.look_at:
                self.changed.notify()

    def record_heartbeat(self, executor: Executor, heartbeat: m.Heartbeat) -> None:
        """Record a heartbeat."""
        executor.last_seen = self.clock()
        executor.rss = heartbeat.rss_bytes

    def delay_spare(self, key: ExecutorKey, seconds: float) -> None:
        """Start no spare of a key for `seconds`."""
        self.spare_at[key] = max(self.spare_at.get(key, 0.0), self.clock() + seconds)

    def excuse(self, seconds: float) -> None:
        """Extend all executors' deadlines by `seconds` in which hutchd could not receive their messages."""
        for one in self._by_id.values():
            one.last_seen, one.since = one.last_seen + seconds, one.since + seconds

    def view(self) -> tuple[ExecutorView, ...]:
        """Return the executors for the plan, oldest first."""
        return tuple(map(_view, self._by_id.values()))

    async def save(self, executor: Executor, **fields: Any) -> None:
        """Store columns of an executor's row. Failures are only logged: the next hutchd's adoption corrects the row."""
        try:
            await self._store.write(lambda tx: executors.update(tx, executor.id, **fields))
        except HutchError as error:
            _log.error("an executor's state is not stored", executor=executor.id, error=error.message, **fields)


def _view(one: Executor) -> ExecutorView:
    return ExecutorView(
        id=one.id,
        key=one.key,
        state=one.state,
        session=one.session,
        launching=one.launching,
        last_seen=one.last_seen,
        since=one.since,
        idle_since=one.idle_since,
        rss=one.rss,
        checking=one.checking,
        checked=one.checked,
    )
