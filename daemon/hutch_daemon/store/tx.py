"""What a unit of work gets."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass, field
from typing import Any

from hutch_daemon.store.rows import StoredEvent

__all__ = ["Tx"]


@dataclass(slots=True)
class Tx:
    """Statements on the open transaction, and the events to publish after its commit. Good for the unit alone."""

    conn: sqlite3.Connection
    events: list[StoredEvent] = field(default_factory=list)

    def execute(self, sql: str, parameters: Any = (), /) -> sqlite3.Cursor:
        """Run one statement."""
        return self.conn.execute(sql, parameters)
