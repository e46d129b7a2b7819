"""The audit: who did or decided what. Lines are added and read, never changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from hutch_daemon.store.records import Executes, RowMapping
from hutch_daemon.store.rows import AuditRow
from hutch_daemon.store.tx import Tx
from hutch_shared.times import now_ms

__all__ = ["AUDIT", "read", "record", "write"]

AUDIT: Final = RowMapping("audit", AuditRow, assigned="number")


def record(
    tx: Tx,
    *,
    actor: str,
    owner: int,
    action: str,
    outcome: str,
    session: str | None = None,
    subject: str | None = None,
    rule: str | None = None,
    digest: str | None = None,
    details: Mapping[str, Any] | None = None,
    at: int | None = None,
) -> None:
    """Add a line in the transaction of the act it records: either both are stored or neither.

    `actor` did it; `owner` is the uid of the user whom it concerns; `subject` is the id of what it was done to;
    `at` is the time of the act in ms since 1970, now unless given.
    """
    AUDIT.insert(
        tx,
        AuditRow(
            at=now_ms() if at is None else at,
            owner=owner,
            actor=actor,
            action=action,
            outcome=outcome,
            session=session,
            subject=subject,
            rule=rule,
            digest=digest,
            details=None if details is None else dict(details),
        ),
    )


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
    """Return lines numbered above `after`, in order, and whether more exist; None does not restrict.

    As many lines as fit into an answer, and at most `limit`.
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
