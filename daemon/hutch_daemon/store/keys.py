"""The table of credentials. Each is encrypted in an envelope.

Removing or replacing a credential removes its sealed bytes from the file. The database overwrites what it deletes, but
a row that SQLite moved within or between pages leaves a copy behind. So the table is emptied, which overwrites all of
its pages, and its other rows are inserted again. The write-ahead log still has the bytes: the writer empties it after
the commit (`Tx.erases`).
"""

from __future__ import annotations

from typing import Final

from hutch_daemon.store.records import Executes, RowMapping, Tx
from hutch_daemon.store.rows import KeyRow

__all__ = ["KEYS", "delete", "erase", "get", "list_", "put", "touch"]

KEYS: Final = RowMapping("keys", KeyRow)


def put(tx: Tx, row: KeyRow) -> None:
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


def delete(tx: Tx, owner: int, provider: str, name: str) -> bool:
    """Remove a credential with its sealed bytes; return whether it existed."""
    row = get(tx, owner, provider, name)
    if row is None:
        return False
    erase(tx, row.id)
    tx.erases = True
    return True


def erase(on: Executes, key: str) -> None:
    """Remove the credential with this id, and every copy of its sealed bytes in the database file.

    `on` writes to a database of any schema, and overwrites deleted content.
    """
    others = on.execute("SELECT * FROM keys WHERE id <> ?", (key,)).fetchall()
    on.execute("DELETE FROM keys")
    for row in others:
        on.execute(f"INSERT INTO keys VALUES ({', '.join('?' for _ in row)})", row)  # noqa: S608 marks only


def touch(tx: Executes, key: str, at: int) -> None:
    """Count a use of the credential at `at` (ms)."""
    tx.execute("UPDATE keys SET uses = uses + 1, last_used_at = ? WHERE id = ?", (at, key))
