"""The transaction as a unit of work sees it."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hutch_daemon.store.rows import StoredEvent

__all__ = ["Effect", "Tx"]

Effect = Callable[[], object]
"""What follows a commit: a plain callback on the event loop, in no task. It must not block; `anyio.current_time` and
task groups of its own are not available to it.
"""


@dataclass(slots=True)
class Tx:
    """Statements on the open transaction, and what follows its commit. Valid while the unit runs."""

    conn: sqlite3.Connection
    events: list[StoredEvent] = field(default_factory=list)
    """Published after the commit; `store.events` adds to it."""
    effects: list[Effect] = field(default_factory=list)

    def execute(self, sql: str, parameters: Any = (), /) -> sqlite3.Cursor:
        """Run one statement."""
        return self.conn.execute(sql, parameters)

    def after_commit(self, effect: Effect) -> None:
        """Run `effect` once on the event loop when this unit is durable, even if its writer was cancelled meanwhile.

        It never runs if the unit raises or the commit fails. Effects run in the order of their registration, after the
        commit's events were published and before any writer of the commit continues: whoever an effect wakes finds the
        events published, and a writer finds its effects done. An effect that raises is logged; the others still run.
        Effects of a refused commit run after all if reopening the database shows that the commit's events were stored.
        """
        self.effects.append(effect)
