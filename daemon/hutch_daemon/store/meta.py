"""A table of single values: `journal` (the journal's id), `epoch` (how often it was opened), and a few others."""

from __future__ import annotations

from hutch_daemon.store.records import Executes

__all__ = ["get", "put"]


def get(on: Executes, key: str) -> str | None:
    """Return the value stored under `key`."""
    record = on.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
    return None if record is None else str(record[0])


def put(tx: Executes, key: str, value: str) -> None:
    """Store `value` under `key`, replacing an earlier value."""
    tx.execute("INSERT INTO meta VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value", (key, value))
