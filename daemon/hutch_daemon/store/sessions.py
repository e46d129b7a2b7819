"""The table of sessions."""

from __future__ import annotations

import sqlite3
from typing import Any, Final

from hutch_daemon.store.records import Executes, RowMapping
from hutch_daemon.store.rows import SessionRow
from hutch_shared import messages as m
from hutch_shared.errors import HutchError, Reason

__all__ = ["SESSIONS", "count_open", "delete", "find", "get", "in_directory", "insert", "list_", "page", "update"]

SESSIONS: Final = RowMapping("sessions", SessionRow)
_PREFIX: Final = 4
_LISTED: Final = "WHERE owner = ifnull(?, owner) AND state = ifnull(?, state) ORDER BY created_at DESC, id"


def insert(tx: Executes, row: SessionRow) -> tuple[SessionRow, bool]:
    """Insert `row`; return it and True, or the one that its owner's idempotency key made before, and False.

    HutchError(CONFLICT) when the owner has an open session of that name, or used the key with another agent or cwd.
    """
    if row.idempotency_key is not None:
        made = SESSIONS.one(tx, "WHERE owner = ? AND idempotency_key = ?", (row.owner, row.idempotency_key))
        if made is not None:
            if (made.agent, made.cwd) != (row.agent, row.cwd):
                raise HutchError(Reason.CONFLICT, session=made.id)
            return made, False
    try:
        SESSIONS.insert(tx, row)
    except sqlite3.IntegrityError as error:
        if error.sqlite_errorcode != sqlite3.SQLITE_CONSTRAINT_UNIQUE:
            raise
        raise HutchError(Reason.CONFLICT, f"You have an open session named {row.name}.", name=row.name) from error
    return row, True


def count_open(on: Executes, account: str) -> int:
    """Return how many open sessions an account has."""
    found = on.execute("SELECT count(*) FROM sessions WHERE account = ? AND state = 'open'", (account,)).fetchone()
    return int(found[0])


def get(on: Executes, session: str) -> SessionRow | None:
    """Return the session of exactly this id."""
    return SESSIONS.one(on, "WHERE id = ?", (session,))


def find(on: Executes, owner: int | None, ref: str, *, first: int | None = None) -> SessionRow:
    """Return the session that `ref` means: an id, a prefix of one (4 characters or more), or a name.

    Only those of `owner`; None sees all. Who sees all means their own, those of `first`, before anybody else's, so that
    nobody can take a name that an administrator uses. Among several of one name the open one is meant, else the newest.
    HutchError: NOT_FOUND; INVALID_PARAMS when it could be several.
    """
    if owner is None and first is not None:
        try:
            return find(on, first, ref)
        except HutchError as error:
            if error.reason is not Reason.NOT_FOUND:
                raise
    mine, values = ("", ()) if owner is None else ("AND owner = ?", (owner,))
    exact = SESSIONS.one(on, f"WHERE id = ? {mine}", (ref, *values))
    if exact is not None:
        return exact
    named = SESSIONS.all(on, f"WHERE name = ? {mine} ORDER BY state = 'open' DESC, created_at DESC", (ref, *values))
    if named:
        if len({row.owner for row in named if row.state == named[0].state}) > 1:
            raise _ambiguous(ref, named)
        return named[0]
    if len(ref) >= _PREFIX:
        # a range, not LIKE: it uses the index and knows no wildcards
        begun = SESSIONS.all(
            on, f"WHERE id >= ? AND id < ? {mine} ORDER BY id LIMIT 5", (ref, f"{ref}\U0010ffff", *values)
        )
        if len(begun) == 1:
            return begun[0]
        if begun:
            raise _ambiguous(ref, begun)
    raise HutchError(Reason.NOT_FOUND, f"There is no session {ref}, or it is not yours.")


def list_(
    on: Executes, owner: int | None = None, state: m.SessionState | None = None, limit: int = 200
) -> tuple[SessionRow, ...]:
    """Return sessions, newest first: of `owner` (None: of all), in `state` (None: in any)."""
    return SESSIONS.all(on, f"{_LISTED} LIMIT ?", (owner, state, limit))


def page(
    on: Executes, owner: int | None, state: m.SessionState | None, limit: int
) -> tuple[tuple[SessionRow, ...], bool]:
    """Return as many of these sessions as fit into an answer, newest first, and whether there are more."""
    return SESSIONS.page(on, _LISTED, (owner, state), limit)


def in_directory(on: Executes, cwd: str) -> tuple[SessionRow, ...]:
    """Return the open sessions that work in `cwd`, oldest first."""
    return SESSIONS.all(on, "WHERE cwd = ? AND state = 'open' ORDER BY created_at", (cwd,))


def update(tx: Executes, session: str, **fields: Any) -> SessionRow:
    """Set columns; return the row as it is then. HutchError(NOT_FOUND)."""
    SESSIONS.update(tx, fields, "WHERE id = ?", (session,))
    row = get(tx, session)
    if row is None:
        raise HutchError(Reason.NOT_FOUND)
    return row


def delete(tx: Executes, session: str) -> bool:
    """Remove a session with its turns, questions, rules and events; audit and usage stay. False if there was none."""
    tx.execute("DELETE FROM events WHERE session = ?", (session,))
    return SESSIONS.delete(tx, "WHERE id = ?", (session,)) > 0


def _ambiguous(ref: str, rows: tuple[SessionRow, ...]) -> HutchError:
    ids = [row.id for row in rows]
    return HutchError(Reason.INVALID_PARAMS, f"{ref} may mean {', '.join(ids)}; write more of the id.", sessions=ids)
