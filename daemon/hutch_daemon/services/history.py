"""The methods that read the past: events, usage, audit."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import msgspec

from hutch_daemon.events.fanout import event_json
from hutch_daemon.services.access import Access, Caller, parse_time
from hutch_daemon.store import audit, events, usage
from hutch_daemon.store.records import to_message
from hutch_daemon.store.rows import AuditRow, UsageTotal
from hutch_daemon.store.store import Store
from hutch_shared import messages as m
from hutch_shared.errors import HutchError, Reason
from hutch_shared.events import UsageSeen

__all__ = ["HistoryService"]


class HistoryService:
    """The methods of the client socket that read events, usage and audit."""

    def __init__(self, store: Store, access: Access) -> None:
        """Read from `store`."""
        self._store = store
        self._access = access

    async def read_events(self, caller: Caller, params: m.ReadEvents) -> m.EventsPage:
        """Return a page of history. It is empty only if no event follows it, so a client that polls makes progress."""
        session = await self._access.followed_session(caller, params)
        limit = max(1, min(params.limit, 10_000))
        read = partial(events.read, session=session, limit=limit, skip=params.skip, owner=caller.scope)
        page = await self._store.read(partial(read, after=params.after))
        while page.more and not page.events:
            page = await self._store.read(partial(read, after=page.cursor))
        kept = await self._store.read(partial(events.seq_range, session=session, owner=caller.scope))
        return m.EventsPage(
            tuple(msgspec.Raw(event_json(event)) for event in page.events), self._store.journal, kept.head, page.more
        )

    async def get_usage(self, caller: Caller, params: m.GetUsage) -> m.UsageTable:
        """Return sums of tokens and US dollars that the caller may see: agents' reports and the broker's counts."""
        session = (await self._access.session(caller, params.session)).id if params.session is not None else None
        since = parse_time(params.since)
        table = partial(usage.table, by=params.by, owner=caller.scope, session=session, since=since)
        reported, counted = await self._store.read(lambda conn: (table(conn), table(conn, source="broker")))
        return _usage_view(reported, counted)

    async def read_audit(self, caller: Caller, params: m.ReadAudit) -> m.AuditPage:
        """Return a page of the audit lines that the caller may see."""
        session = params.session
        if session is not None:
            try:
                session = (await self._access.session(caller, session)).id
            except HutchError as error:
                if error.reason is not Reason.NOT_FOUND:  # the audit of a deleted session remains, under its whole id
                    raise
        since = parse_time(params.since)
        rows, more = await self._store.read(
            lambda conn: audit.read(
                conn,
                owner=caller.scope,
                session=session,
                action=params.action,
                outcome=params.outcome,
                since=since,
                after=params.after,
                limit=max(1, min(params.limit, 10_000)),
            )
        )
        return m.AuditPage(tuple(_audit_view(row) for row in rows), more)


def _audit_view(row: AuditRow) -> m.AuditEntry:
    """Return a line of the audit as clients see it."""
    return to_message(m.AuditEntry, row, details=row.details or {})


def _usage_view(reported: Sequence[UsageTotal], counted: Sequence[UsageTotal]) -> m.UsageTable:
    """Return the usage that agents reported with the broker's counts beside it. Lines of the broker alone come last."""
    agents = {line.of: line for line in reported}
    broker = {line.of: line for line in counted}
    return m.UsageTable(tuple(_usage_line(agents.get(of), broker.get(of)) for of in {**agents, **broker}))


def _usage_line(reported: UsageTotal | None, counted: UsageTotal | None) -> m.UsageLine:
    agent = UsageTotal("", 0, 0, UsageSeen(total=True)) if reported is None else reported
    line = agent if counted is None else counted
    return m.UsageLine(
        line.of,
        agent.turns,
        agent.usage,
        None if counted is None else counted.usage,
        0 if counted is None else counted.rows,
        line.searches,
        line.unknown,
        line.why_unknown,
    )
