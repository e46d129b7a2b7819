"""The executors that the pool has now, and who is told of their changes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import structlog

from hutch_daemon.pool.executor import Executor, ExecutorKey
from hutch_daemon.pool.view import ExecutorView
from hutch_daemon.store import executors
from hutch_daemon.store.store import Store
from hutch_shared.errors import HutchError
from hutch_shared.latch import Latch

__all__ = ["Roster"]

_log = structlog.get_logger(__name__)


class Roster:
    """Executors from their start, or adoption, until they are gone."""

    def __init__(
        self,
        store: Store,
        on_change: Callable[[Executor], None],
        on_notice: Callable[[str, str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`on_change` gets an executor whose state or connection changed; `on_notice` gets the word of a notice and a
        sentence. Neither may block.
        """
        self._store = store
        self._on_change = on_change
        self.notice = on_notice
        """Called with a word that names the notice and a sentence; a later one of the same word replaces it."""
        self.clock = clock
        self.changed = Latch()
        """Notified whenever the pool should plan again."""
        self._executors: dict[str, Executor] = {}
        self.spare_at: dict[ExecutorKey, float] = {}
        """When the next spare of a key may be started."""

    def __repr__(self) -> str:
        return f"<Roster of {len(self._executors)}>"

    def all(self) -> list[Executor]:
        """Return the executors that are not gone, oldest first."""
        return list(self._executors.values())

    def get(self, executor: str) -> Executor | None:
        """Return an executor that is not gone."""
        return self._executors.get(executor)

    def of_account(self, uid: int) -> list[Executor]:
        """Return the executors of an account."""
        return [one for one in self._executors.values() if one.key.account.uid == uid]

    def add(self, executor: Executor) -> None:
        """Take an executor in: from now on it has a slot."""
        self._executors[executor.id] = executor

    def remove(self, executor: Executor) -> None:
        """Free the slot of an executor that is gone."""
        self._executors.pop(executor.id, None)

    def report(self, executor: Executor) -> None:
        """Report a change of an executor's state or connection."""
        self._on_change(executor)
        self.changed.notify()

    def delay_spare(self, key: ExecutorKey, seconds: float) -> None:
        """Start no spare of a key for so long."""
        self.spare_at[key] = max(self.spare_at.get(key, 0.0), self.clock() + seconds)

    def excuse(self, seconds: float) -> None:
        """Charge no executor for a time in which hutchd could not hear it."""
        for one in self._executors.values():
            one.heard, one.since = one.heard + seconds, one.since + seconds

    def view(self) -> tuple[ExecutorView, ...]:
        """Return the executors as the plan sees them, oldest first."""
        return tuple(map(_view, self._executors.values()))

    async def save(self, executor: Executor, **fields: Any) -> None:
        """Store what happened in any case. What cannot be stored now, the next adoption finds out again."""
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
        heard=one.heard,
        since=one.since,
        idle_since=one.idle_since,
        rss=one.rss,
        checking=one.checking,
        checked=one.checked,
    )
