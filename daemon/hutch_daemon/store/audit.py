"""The audit table: a line for each security-relevant act, with its actor. Lines are added and read, never changed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from hutch_daemon.store.account_names import AccountNames
from hutch_daemon.store.records import Executes, RowMapping, Tx
from hutch_daemon.store.rows import AuditRow
from hutch_shared.times import now_ms

__all__ = ["AUDIT", "read", "record", "write"]

AUDIT: Final = RowMapping("audit", AuditRow, assigned="number")
_USER: Final = re.compile(r"uid (\d+)\b")
_names: Final = AccountNames()


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
    """Add a line in the transaction of the act that it records: either both are stored or neither.

    `actor` did it: a rule, a part of Hutch, or a user, who begins with `uid N`. `owner` is the uid of the user
    concerned; `subject` is the id of the affected object; `at` is the time of the act in ms since 1970, by default now.
    The line keeps the names that both users have now, since a uid may have another name later, or another user. If the
    system does not say a name soon (`account_names`), it is the last known one, or missing.
    """
    acted = _USER.match(actor)
    account = _names.name(owner)
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
            account=account,
            actor_account=None if acted is None else account if int(acted[1]) == owner else _names.name(int(acted[1])),
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
    """Return lines with numbers above `after`, in order, and whether more exist. A filter of None does not restrict.

    The lines fit into one reply, and are at most `limit`.
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
