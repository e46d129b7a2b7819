"""The permission mode of a session. Each change is recorded as an event and as an audit line."""

from __future__ import annotations

from dataclasses import replace

from hutch_daemon.pool.executors import Roster
from hutch_daemon.services.access import Access, Caller
from hutch_daemon.services.policy_layers import PolicyLayers
from hutch_daemon.services.sessions import SessionService
from hutch_daemon.store import audit, events, sessions
from hutch_daemon.store.records import Tx
from hutch_daemon.store.rows import SessionRow
from hutch_daemon.store.store import Store
from hutch_shared import messages as m
from hutch_shared.errors import HutchError, Reason
from hutch_shared.events import Notice

__all__ = ["ModeService", "change_mode", "enter_plan", "leave_plan", "report_mode"]


class ModeService:
    """The method of the client socket that changes a session's permission mode."""

    def __init__(
        self,
        store: Store,
        access: Access,
        policy: PolicyLayers,
        roster: Roster,
        sessions: SessionService,
    ) -> None:
        """`policy` decides which modes a session may have."""
        self._store = store
        self._access = access
        self._policy = policy
        self._roster = roster
        self._sessions = sessions

    async def set_permission_mode(self, caller: Caller, params: m.SetPermissionMode) -> m.Session:
        """Change the mode. The next tool call is judged by it, also in the running turn."""
        row = await self._access.session(caller, params.session)
        if row.state == "closed":
            raise HutchError(Reason.SESSION_CLOSED)
        await self._policy.check_mode(replace(row, permission_mode=params.mode))

        def change(tx: Tx) -> SessionRow:
            now = sessions.get(tx, row.id)
            if now is None or now.state == "closed":
                raise HutchError(Reason.SESSION_CLOSED)
            return change_mode(tx, now, params.mode, str(caller))

        changed = await self._store.write(change)
        await report_mode(self._roster, changed)
        return await self._sessions.view(changed)


def change_mode(tx: Tx, row: SessionRow, mode: m.PermissionMode, by: str) -> SessionRow:
    """Change a session's mode; `by` names the user who changes it."""
    details = {"from": row.permission_mode, "to": mode}
    notice = Notice("permission_mode", f"The permission mode is {mode} now, set by {by}.", details)
    events.append(tx, row.id, None, "notice", notice)
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


def enter_plan(tx: Tx, session: str) -> None:
    """Enter the mode `plan`, because the agent may. Its own mode changes when its call runs."""
    row = sessions.get(tx, session)
    if row is not None and row.permission_mode != "plan":
        change_mode(tx, row, "plan", "the agent")


def leave_plan(tx: Tx, session: str, by: str) -> None:
    """Leave the mode `plan` after the plan was approved: restore the earlier mode, or `ask`."""
    row = sessions.get(tx, session)
    if row is not None and row.permission_mode == "plan":
        change_mode(tx, row, row.mode_before_plan or "ask", f"{by}, who approved the plan")


async def report_mode(roster: Roster, session: SessionRow) -> None:
    """Send the session's mode to its executor, if it has a prepared one."""
    executor = roster.serving.get(session.id)
    if executor is not None and executor.prepared:
        await executor.send_mode(session.id, session.permission_mode)
