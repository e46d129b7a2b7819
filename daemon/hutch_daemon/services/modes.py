"""The permission mode of a session: what changes it is on record, as an event and as a line of the audit."""

from __future__ import annotations

from hutch_daemon.events.journal import Journal
from hutch_daemon.store import audit, sessions
from hutch_daemon.store.rows import AuditRow, SessionRow
from hutch_daemon.store.tx import Tx
from hutch_shared import messages as m
from hutch_shared.events import Notice
from hutch_shared.times import now_ms

__all__ = ["change_mode", "leave_plan"]


def change_mode(tx: Tx, journal: Journal, row: SessionRow, mode: m.PermissionMode, by: str) -> SessionRow:
    """Give a session a mode, by somebody's word."""
    details = {"from": row.permission_mode, "to": mode}
    notice = Notice("permission_mode", f"The permission mode is {mode} now, set by {by}.", details)
    journal.append(tx, row.id, None, "notice", notice)
    line = AuditRow(
        at=now_ms(),
        owner=row.owner,
        actor=by,
        action="set_permission_mode",
        outcome=mode,
        session=row.id,
        details=dict(details),
    )
    audit.write(tx, line)
    before = row.permission_mode if mode == "plan" and row.permission_mode != "plan" else row.mode_before_plan
    return sessions.update(tx, row.id, permission_mode=mode, mode_before_plan=before)


def leave_plan(tx: Tx, journal: Journal, session: str, by: str) -> None:
    """End the planning of a session whose plan was approved: the mode is again what it was before, else `ask`."""
    row = sessions.get(tx, session)
    if row is not None and row.permission_mode == "plan":
        change_mode(tx, journal, row, row.mode_before_plan or "ask", f"{by}, who approved the plan")
