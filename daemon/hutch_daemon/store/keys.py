"""The table of credentials. Each is encrypted in an envelope."""

from __future__ import annotations

from typing import Final

from hutch_daemon.store.records import Executes, RowMapping
from hutch_daemon.store.rows import KeyRow

__all__ = ["KEYS", "delete", "get", "list_", "put", "touch"]

KEYS: Final = RowMapping("keys", KeyRow)


def put(tx: Executes, row: KeyRow) -> None:
    """Store `row`, replacing the owner's credential of the same provider and name."""
    delete(tx, row.owner, row.provider, row.name)
    KEYS.insert(tx, row)


def get(on: Executes, owner: int, provider: str, name: str) -> KeyRow | None:
    """Return the owner's credential of that provider and name."""
    return KEYS.one(on, "WHERE owner = ? AND provider = ? AND name = ?", (owner, provider, name))


def list_(on: Executes, owner: int | None = None, provider: str | None = None) -> tuple[KeyRow, ...]:
    """Return credentials, ordered by owner, provider and name. A filter of None does not restrict."""
    return KEYS.all(
        on,
        "WHERE owner = ifnull(?, owner) AND provider = ifnull(?, provider) ORDER BY owner, provider, name",
        (owner, provider),
    )


def delete(tx: Executes, owner: int, provider: str, name: str) -> bool:
    """Remove a credential; return whether it existed."""
    return KEYS.delete(tx, "WHERE owner = ? AND provider = ? AND name = ?", (owner, provider, name)) > 0


def touch(tx: Executes, key: str, at: int) -> None:
    """Count a use of the credential at `at` (ms)."""
    tx.execute("UPDATE keys SET uses = uses + 1, last_used_at = ? WHERE id = ?", (at, key))
