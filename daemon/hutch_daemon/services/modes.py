"""The permission mode of a session. A change is recorded as an event and as a line of the audit."""

from __future__ import annotations

from hutch_daemon.events.journal import Journal
from hutch_daemon.pool.pool import Pool
from hutch_daemon.store import audit, sessions
from hutch_daemon.store.rows import SessionRow
from hutch_daemon.store.tx import Tx
from hutch_shared import messages as m
from hutch_shared.events import Notice

__all__ = ["change_mode", "leave_plan", "report_mode"]


def change_mode(tx: Tx, journal: Journal, row: SessionRow, mode: m.PermissionMode, by: str) -> SessionRow:
    """Change a session's mode; `by` names who changes it."""
    details = {"from": row.permission_mode, "to": mode}
    notice = Notice("permission_mode", f"The permission mode is {mode} now, set by {by}.", details)
    journal.append(tx, row.id, None, "notice", notice)
    audit.record(
        tx,
        actor=by,
        owner=row.owner,
        action="set_permission_mode",
        outcome=mode,
        session=row.id,
        details=details,
    )
    before = row.permission_mode if mode == "plan" and row.permission_mode != "plan" else row.mode_before_plan
    return sessions.update(tx, row.id, permission_mode=mode, mode_before_plan=before)


def leave_plan(tx: Tx, journal: Journal, session: str, by: str) -> None:
    """End the planning of a session whose plan was approved: restore the mode from before, or `ask`."""
    row = sessions.get(tx, session)
    if row is not None and row.permission_mode == "plan":
        change_mode(tx, journal, row, row.mode_before_plan or "ask", f"{by}, who approved the plan")


async def report_mode(pool: Pool, session: SessionRow) -> None:
    """Report the session's mode to its executor, if it has one that is prepared."""
    executor = pool.of_session(session.id)
    if executor is not None and executor.prepared:
        await executor.send_mode(session.id, session.permission_mode)
