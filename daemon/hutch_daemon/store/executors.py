"""The table of executors: launch records, token hashes, leases, receipts."""

from __future__ import annotations

from typing import Any, Final

from hutch_daemon.store.records import Executes, RowMapping
from hutch_daemon.store.rows import ExecutorRow
from hutch_shared.errors import HutchError, Reason
from hutch_shared.failpoints import failpoint

__all__ = [
    "EXECUTORS",
    "by_token_hash",
    "forget",
    "get",
    "insert",
    "lease",
    "leased_to",
    "live",
    "release",
    "update",
    "with_spool",
]

EXECUTORS: Final = RowMapping("executors", ExecutorRow)


def insert(tx: Executes, row: ExecutorRow) -> None:
    """Store a launch record. It must be committed before the process starts."""
    failpoint("executors.insert")
    EXECUTORS.insert(tx, row)


def get(on: Executes, executor: str) -> ExecutorRow | None:
    """Return the executor with this id."""
    return EXECUTORS.one(on, "WHERE id = ?", (executor,))


def by_token_hash(on: Executes, token_hash: bytes) -> ExecutorRow | None:
    """Return the executor whose token has this hash, even if it is gone."""
    return EXECUTORS.one(on, "WHERE token_hash = ?", (token_hash,))


def live(on: Executes) -> tuple[ExecutorRow, ...]:
    """Return the executors that are not gone, oldest first."""
    return EXECUTORS.all(on, "WHERE state <> 'gone' ORDER BY created_at, id")


def with_spool(on: Executes) -> tuple[ExecutorRow, ...]:
    """Return the executors that are gone but whose spooled events are not stored yet, oldest first."""
    return EXECUTORS.all(on, "WHERE state = 'gone' AND spool IS NOT NULL ORDER BY created_at, id")


def leased_to(on: Executes, session: str) -> ExecutorRow | None:
    """Return the executor that has the lease of a session."""
    return EXECUTORS.one(on, "WHERE session = ?", (session,))


def update(tx: Executes, executor: str, **fields: Any) -> ExecutorRow:
    """Set columns and return the changed row. HutchError(NOT_FOUND)."""
    EXECUTORS.update(tx, fields, "WHERE id = ?", (executor,))
    row = get(tx, executor)
    if row is None:
        raise HutchError(Reason.NOT_FOUND)
    return row


def lease(tx: Executes, executor: str, session: str, at: int) -> str | None:
    """Lease the session to the executor; return the id of the executor that had the lease before, or None.

    HutchError: NOT_FOUND if the executor does not exist; WRONG_STATE if it has the lease of another session.
    """
    row = get(tx, executor)
    if row is None:
        raise HutchError(Reason.NOT_FOUND)
    if row.session == session:
        return None
    if row.session is not None:
        raise HutchError(Reason.WRONG_STATE, "The executor serves another session.")
    failpoint("executors.lease")
    former = leased_to(tx, session)
    if former is not None:
        release(tx, former.id)
    EXECUTORS.update(tx, {"session": session, "served": session, "leased_at": at}, "WHERE id = ?", (executor,))
    return None if former is None else former.id


def release(tx: Executes, executor: str) -> bool:
    """End the executor's lease; return whether it had one."""
    changes = {"session": None, "leased_at": None}
    return EXECUTORS.update(tx, changes, "WHERE id = ? AND session IS NOT NULL", (executor,)) > 0


def forget(tx: Executes, before: int) -> int:
    """Remove the executors without spooled events that were gone before `before` (ms); return how many."""
    return EXECUTORS.delete(tx, "WHERE state = 'gone' AND gone_at < ? AND spool IS NULL", (before,))
