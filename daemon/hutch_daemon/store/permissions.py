"""The table of permission requests. The first decision about a request is final."""

from __future__ import annotations

from typing import Any, Final

from hutch_daemon.store.records import Executes, RowMapping
from hutch_daemon.store.rows import PermissionRow
from hutch_shared import messages as m
from hutch_shared.errors import HutchError, Reason
from hutch_shared.failpoints import failpoint

__all__ = ["PERMISSIONS", "by_ask", "get", "insert", "list_", "page", "pending", "settle"]

PERMISSIONS: Final = RowMapping("permissions", PermissionRow)
_OLDEST_FIRST: Final = "ORDER BY asked_at, id"
_NEWEST_FIRST: Final = "ORDER BY asked_at DESC, id DESC"


def insert(tx: Executes, row: PermissionRow) -> tuple[PermissionRow, bool]:
    """Insert `row` and return it with True. If the executor used the same ask id before, return that row and False."""
    made = by_ask(tx, row.executor, row.ask)
    if made is not None:
        return made, False
    failpoint("permissions.insert")
    PERMISSIONS.insert(tx, row)
    return row, True


def get(on: Executes, permission: str) -> PermissionRow | None:
    """Return the request with this id."""
    return PERMISSIONS.one(on, "WHERE id = ?", (permission,))


def by_ask(on: Executes, executor: str, ask: str) -> PermissionRow | None:
    """Return the request that an executor made with the id `ask`."""
    return PERMISSIONS.one(on, "WHERE executor = ? AND ask = ?", (executor, ask))


def list_(
    on: Executes,
    *,
    owner: int | None = None,
    session: str | None = None,
    turn: str | None = None,
    state: m.PermissionState | None = "pending",
    limit: int = 200,
) -> tuple[PermissionRow, ...]:
    """Return requests, oldest first, of an owner, session and turn, in a state. A filter of None does not restrict."""
    where, values = _where(owner, session, turn, state)
    return PERMISSIONS.all(on, f"{where} {_OLDEST_FIRST} LIMIT ?", (*values, limit))


def page(
    on: Executes,
    *,
    owner: int | None,
    session: str | None,
    state: m.PermissionState | None,
    after: str | None,
    limit: int,
    newest: bool = False,
) -> tuple[tuple[PermissionRow, ...], bool]:
    """Return the requests that follow the request `after` and fit into one reply, and whether more exist.

    They are the oldest or the `newest` of these, oldest first.

    HutchError(NOT_FOUND) if the request `after` does not exist or belongs to another owner.
    """
    last = None
    if after is not None:
        owned = "WHERE id = ? AND session IN (SELECT id FROM sessions WHERE owner = ifnull(?, owner))"
        last = PERMISSIONS.one(on, owned, (after, owner))
        if last is None:
            raise HutchError(Reason.NOT_FOUND, f"There is no permission request {after} to continue from.")
    where, values = _where(owner, session, None, state, last)
    rows, more = PERMISSIONS.page(on, f"{where} {_NEWEST_FIRST if newest else _OLDEST_FIRST}", values, limit)
    return rows[::-1] if newest else rows, more


def _where(
    owner: int | None,
    session: str | None,
    turn: str | None,
    state: m.PermissionState | None,
    last: PermissionRow | None = None,
) -> tuple[str, tuple[object, ...]]:
    terms: list[str] = []
    values: list[object] = []
    if state is not None:
        # SQLite uses the partial index only for a literal, not for a parameter.
        terms.append("state = 'pending'" if state == "pending" else "state = ?")
        values += [] if state == "pending" else [state]
    for column, value in (("session", session), ("turn", turn)):
        if value is not None:
            terms.append(f"{column} = ?")
            values.append(value)
    if owner is not None:
        terms.append("session IN (SELECT id FROM sessions WHERE owner = ?)")
        values.append(owner)
    if last is not None:
        terms.append("(asked_at, id) > (?, ?)")
        values += [last.asked_at, last.id]
    return f"WHERE {' AND '.join(terms)}" if terms else "", tuple(values)


def pending(on: Executes, session: str) -> int:
    """Return the number of pending requests of a session."""
    count: int = on.execute(
        "SELECT count(*) FROM permissions WHERE session = ? AND state = 'pending'", (session,)
    ).fetchone()[0]
    return count


def settle(tx: Executes, permission: str, state: m.PermissionState, **fields: Any) -> tuple[PermissionRow, bool]:
    """If the request is pending, set its `state` and `fields`. Return the request, and whether it was pending.

    HutchError(NOT_FOUND).
    """
    assert state != "pending"
    failpoint("permissions.settle")
    won = PERMISSIONS.update(tx, {"state": state, **fields}, "WHERE id = ? AND state = 'pending'", (permission,)) > 0
    row = get(tx, permission)
    if row is None:
        raise HutchError(Reason.NOT_FOUND)
    return row, won
