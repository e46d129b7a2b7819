"""The transaction that a unit of work gets."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hutch_daemon.store.rows import StoredEvent

__all__ = ["Effect", "Tx"]

Effect = Callable[[], object]
"""A callback that runs on the event loop after a commit, outside of any task. It must not block, and cannot use
`anyio.current_time` or open task groups.
"""


@dataclass(slots=True)
class Tx:
    """Runs statements on the open transaction, and collects events and effects. Valid while the unit runs."""

    conn: sqlite3.Connection
    events: list[StoredEvent] = field(default_factory=list)
    """The events to publish after the commit. `store.events` adds to it."""
    effects: list[Effect] = field(default_factory=list)
    """The callbacks to run after the commit. `after_commit` adds to it."""

    def execute(self, sql: str, parameters: Any = (), /) -> sqlite3.Cursor:
        """Run one statement."""
        return self.conn.execute(sql, parameters)

    def after_commit(self, effect: Effect) -> None:
        """Run `effect` once on the event loop when this unit is durable, even if the caller of `write` was cancelled.

        It does not run if the unit raises or the commit fails. (If reopening the database shows that a failed commit
        was stored, its effects run then.) Effects run in the order of their registration: after the commit's events
        were published, and before the commit's `write` calls return. An exception of an effect is logged; the other
        effects still run.
        """
        self.effects.append(effect)
