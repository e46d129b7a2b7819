"""The audit: lines are added and read, never changed."""

from __future__ import annotations

from typing import Final

from hutch_daemon.store.records import Executes, Table
from hutch_daemon.store.rows import AuditRow

__all__ = ["AUDIT", "read", "write"]

AUDIT: Final = Table("audit", AuditRow, assigned="number")


def write(tx: Executes, row: AuditRow) -> int:
    """Add a line; return its number."""
    return AUDIT.insert(tx, row)


def read(
    on: Executes,
    *,
    owner: int | None = None,
    session: str | None = None,
    action: str | None = None,
    outcome: str | None = None,
    since: int | None = None,
    after: int = 0,
    limit: int = 1000,
) -> tuple[tuple[AuditRow, ...], bool]:
    """Return lines in order, numbered higher than `after`, of the filters; None is no restriction. As many as fit into
    an answer, and whether there are more.
    """
    chosen = {
        "owner = ?": owner,
        "session = ?": session,
        "action = ?": action,
        "outcome = ?": outcome,
        "at >= ?": since,
    }
    terms = ["number > ?", *(term for term, value in chosen.items() if value is not None)]
    values = [after, *(value for value in chosen.values() if value is not None)]
    return AUDIT.page(on, f"WHERE {' AND '.join(terms)} ORDER BY number", values, limit)
