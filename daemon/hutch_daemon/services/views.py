"""Rows and live state as the messages that clients get. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from hutch_daemon.pool.executor import Executor
from hutch_daemon.store.records import to_message
from hutch_daemon.store.rows import AuditRow, SessionRow, TurnRow, UsageTotal
from hutch_daemon.store.sessions import SessionActivity
from hutch_shared import messages as m
from hutch_shared.events import UsageSeen

__all__ = ["FORK_MARK", "audit_view", "session_view", "turn_view", "usage_view"]

FORK_MARK = "fork:"
"""Before the `agent_session` of a fork that has not spoken yet: the conversation that it goes on from."""


def session_view(
    row: SessionRow, near: SessionActivity, journal: str, executor: Executor | None, warning: str | None = None
) -> m.Session:
    """Return a session as clients see it."""
    speaking = row.agent_session is not None and not row.agent_session.startswith(FORK_MARK)
    active = near.active
    return to_message(
        m.Session,
        row,
        journal=journal,
        agent_session=row.agent_session if speaking else None,
        executor=executor.id if executor is not None else None,
        executor_state=executor.state if executor is not None else None,
        active_turn=active.id if active is not None else None,
        active_state=active.state if active is not None else None,
        pending=near.pending,
        queued=near.queued,
        usage=near.usage,
        warning=warning,
    )


def turn_view(row: TurnRow, pending: int = 0) -> m.Turn:
    """Return a turn as clients see it; `pending` questions make it wait."""
    return to_message(m.Turn, row, awaiting_permission=pending > 0)


def audit_view(row: AuditRow) -> m.AuditEntry:
    """Return a line of the audit as clients see it."""
    return to_message(m.AuditEntry, row, details=row.details or {})


def usage_view(reported: Sequence[UsageTotal], counted: Sequence[UsageTotal]) -> m.UsageTable:
    """Put what agents report and what the broker counted side by side; what only the broker knows comes last."""
    broker = {line.of: line for line in counted}
    rows = []
    for line in reported:
        beside = broker.pop(line.of, None)
        rows.append(
            m.UsageLine(line.of, line.turns, line.usage)
            if beside is None
            else m.UsageLine(line.of, line.turns, line.usage, beside.usage, beside.rows)
        )
    rows += [m.UsageLine(of, 0, UsageSeen(total=True), line.usage, line.rows) for of, line in broker.items()]
    return m.UsageTable(tuple(rows))
