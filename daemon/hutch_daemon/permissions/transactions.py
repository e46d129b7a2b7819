"""The transactions of permission requests: record the policy's verdict, record a request, settle a request."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

import msgspec

from hutch_daemon.permissions.judging import Judged
from hutch_daemon.permissions.pending import PendingAsks
from hutch_daemon.permissions.requests import Settlement, audit_details, permission_view, settled_event
from hutch_daemon.store import audit, events, permissions, policy_versions, rules, sessions, turns
from hutch_daemon.store.records import Executes, Tx
from hutch_daemon.store.rows import PermissionRow
from hutch_shared import messages as m
from hutch_shared.events import PermissionAsked, ToolCallSeen
from hutch_shared.failpoints import failpoint
from hutch_shared.times import now_ms
from hutch_shared.vocabulary import enters_plan

__all__ = ["NotRecorded", "RequestTransactions", "turn_runs"]

NotRecorded = Literal["ended", "changed"]
"""The reason why nothing was recorded: the turn has ended, or the policy has changed since the verdict."""


class RequestTransactions:
    """Each method is a unit of work or a part of one. It registers the callbacks that run after the commit."""

    def __init__(
        self,
        pending: PendingAsks,
        stop_turn: Callable[[str, str, str], None],
        plan_approved: Callable[[Tx, str, str], None],
        plan_entered: Callable[[Tx, str], None],
    ) -> None:
        """`pending` holds the waiting calls. The other parameters are those of `Approvals`."""
        self._pending = pending
        self._stop_turn = stop_turn
        self._plan_approved = plan_approved
        self._plan_entered = plan_entered

    def record_verdict(
        self, tx: Tx, executor: str, params: m.RequestPermission, judged: Judged, digest: str
    ) -> NotRecorded | None:
        """Record a decision of the policy. Return None, or why nothing was recorded."""
        if (reason := _why_not(tx, executor, params, judged)) is not None:
            return reason
        session, verdict = judged.session, judged.verdict
        audit.record(
            tx,
            actor="rule" if verdict.rule is not None else f"mode {session.permission_mode}",
            owner=session.owner,
            action="permission",
            outcome="allowed" if verdict.decision == "allow" else "denied",
            session=session.id,
            subject=params.call.call_id,
            rule=verdict.rule,
            digest=digest,
            details={"tool": params.call.agent_tool, "why": verdict.why, "layer": verdict.layer or ""},
        )
        if enters_plan(params.call) and verdict.decision == "allow":
            self._plan_entered(tx, session.id)
        return None

    def record_request(
        self,
        tx: Tx,
        row: PermissionRow,
        params: m.RequestPermission,
        judged: Judged,
        after: Callable[[PermissionRow], None],
    ) -> PermissionRow | NotRecorded:
        """Record a request with its event, and return it. `after(row)` runs after the commit.

        If the executor asked with the same id before, return the earlier record. If nothing may be recorded, return
        why.
        """
        if (reason := _why_not(tx, row.executor, params, judged)) is not None:
            return reason
        kept, fresh = permissions.insert(tx, row)
        if fresh:
            asked = PermissionAsked(msgspec.to_builtins(permission_view(kept)))
            events.append(tx, kept.session, kept.turn, "permission_asked", asked)
            tx.after_commit(partial(after, kept))
        return kept

    def settle(
        self,
        tx: Tx,
        permission: str,
        settlement: Settlement,
        version: int | None = None,
        overtaken: Callable[[], bool] = lambda: False,
    ) -> tuple[PermissionRow, bool]:
        """Settle a request, with event, audit line and the rule that it adds. Wake the waiting call after the commit.

        Return the current record, and whether this settlement was the first. A denial that could not be stored yet came
        first: it is stored instead. A settlement that a verdict made has the `version` of the verdict: if the policy
        has changed since, or the verdict is `overtaken`, nothing is settled and the record is still pending.
        """
        denial = self._pending.denial(permission)
        if denial is not None and settlement is not denial.settlement:
            return self.settle(tx, permission, denial.settlement)[0], False
        if overtaken() and (row := permissions.get(tx, permission)) is not None:
            return row, False
        if version is not None and (found := _if_changed(tx, permission, version)) is not None:
            return found, False
        row, won = permissions.settle(tx, permission, settlement.state, settled_at=now_ms(), **settlement.columns())
        tx.after_commit(partial(self._pending.settle, row))
        if not won:
            return row, False
        events.append(tx, row.session, row.turn, "permission_settled", settled_event(row))
        if settlement.edited_call is not None:
            call = msgspec.to_builtins(settlement.edited_call)
            seen = ToolCallSeen(call, edited_by=settlement.settled_by)
            events.append(tx, row.session, row.turn, "tool_call", seen)
        rule = settlement.rule
        if rule is not None:
            rules.add(tx, rule)
        if row.kind == "plan" and row.state == "allowed":
            self._plan_approved(tx, row.session, settlement.settled_by)
        if enters_plan(row.call) and row.state == "allowed":
            self._plan_entered(tx, row.session)
        session = sessions.get(tx, row.session)
        assert session is not None, "a request cannot outlive its session"
        audit.record(
            tx,
            actor=settlement.settled_by,
            owner=session.owner,
            action="permission",
            outcome=row.state,
            session=row.session,
            subject=row.id,
            rule=row.settled_rule or row.rule,
            digest=row.decided_digest or row.digest,
            details=audit_details(row),
        )
        if settlement.stop_reason is not None:
            tx.after_commit(partial(self._stop_turn, row.session, row.turn, settlement.stop_reason))
        failpoint("desk.settle")
        return row, True


def _if_changed(tx: Tx, permission: str, version: int) -> PermissionRow | None:
    """Return a pending request if its policy has changed since `version`."""
    row = permissions.get(tx, permission)
    session = None if row is None or row.state != "pending" else sessions.get(tx, row.session)
    return None if session is None or policy_versions.current(tx, session.owner) == version else row


def turn_runs(on: Executes, executor: str, params: m.RequestPermission) -> bool:
    """Return whether the request's turn was given to this executor and is not being stopped."""
    turn = turns.get(on, params.turn)
    return (
        turn is not None
        and (turn.session, turn.executor) == (params.session, executor)
        and turn.state in ("dispatching", "running")
    )


def _why_not(tx: Tx, executor: str, params: m.RequestPermission, judged: Judged) -> NotRecorded | None:
    """Return why a verdict or its request must not be recorded; None if it may."""
    if not turn_runs(tx, executor, params):
        return "ended"
    if policy_versions.current(tx, judged.session.owner) != judged.version:
        return "changed"
    return None
