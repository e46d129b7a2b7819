"""The table of sessions."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from typing import Any, Final

from hutch_daemon.store import policy_versions
from hutch_daemon.store.records import Executes, RowMapping, Tx
from hutch_daemon.store.rows import FORK_MARK, SessionRow
from hutch_shared import messages as m
from hutch_shared.errors import HutchError, Reason
from hutch_shared.events import UsageSeen

__all__ = [
    "SESSIONS",
    "ActiveTurn",
    "SessionActivity",
    "activity",
    "ancestors",
    "count_open",
    "delete",
    "find",
    "get",
    "in_directory",
    "insert",
    "list_",
    "of_conversation",
    "open_folders",
    "page",
    "unprepared_forks",
    "update",
]

SESSIONS: Final = RowMapping("sessions", SessionRow)
_PREFIX: Final = 4
_ANCESTORS: Final = 16
_LISTED: Final = "WHERE owner = ifnull(?, owner) AND state = ifnull(?, state) ORDER BY created_at DESC, id"
_ACTIVE: Final = "FROM turns WHERE session = :session AND state IN ('dispatching', 'running', 'stopping')"
_ACTIVITY: Final = f"""
    SELECT
      (SELECT id {_ACTIVE}),
      (SELECT state {_ACTIVE}),
      (SELECT count(*) FROM turns WHERE session = :session AND state = 'queued'),
      (SELECT count(*) FROM permissions WHERE session = :session AND state = 'pending'),
      count(*), sum(input_tokens), sum(output_tokens), sum(cache_read_tokens), sum(cache_write_tokens), sum(usd)
    FROM usage WHERE session = :session AND source = 'agent'
"""  # noqa: S608 names of the code


@dataclass(frozen=True, slots=True)
class ActiveTurn:
    """The turn of a session that is dispatching, running or stopping."""

    id: str
    state: m.TurnState


@dataclass(frozen=True, slots=True)
class SessionActivity:
    """A session's active turn, its numbers of queued turns and pending requests, and its usage so far."""

    active: ActiveTurn | None
    queued: int
    pending: int
    usage: UsageSeen | None


def activity(on: Executes, session: str) -> SessionActivity:
    """Return a session's activity, read in one statement. For a missing session it is empty."""
    record = on.execute(_ACTIVITY, {"session": session}).fetchone()
    turn, state, queued, pending, reports, fresh, out, cache_read, cache_write, usd = record
    return SessionActivity(
        ActiveTurn(turn, state) if turn is not None else None,
        queued,
        pending,
        UsageSeen(fresh, out, cache_read, cache_write, usd, total=True) if reports else None,
    )


def insert(tx: Executes, row: SessionRow) -> tuple[SessionRow, bool]:
    """Insert `row` and return it with True. If a session with the same idempotency key exists, return it with False.

    HutchError(CONFLICT) if the owner has an open session of the same name, or used the key for another agent or cwd.
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
    """Return the number of open sessions of an account."""
    found = on.execute("SELECT count(*) FROM sessions WHERE account = ? AND state = 'open'", (account,)).fetchone()
    return int(found[0])


def get(on: Executes, session: str) -> SessionRow | None:
    """Return the session with this id."""
    return SESSIONS.one(on, "WHERE id = ?", (session,))


def find(on: Executes, owner: int | None, ref: str, *, first: int | None = None) -> SessionRow:
    """Return the session that `ref` names: an id, a prefix of an id (4 characters or more), or a name.

    Searches the sessions of `owner`, or all sessions if `owner` is None. In all sessions, those of the user `first`
    take precedence, so that no other user can hide an administrator's session by taking its name. If several sessions
    have the name, the open one is returned, otherwise the newest. HutchError: NOT_FOUND; INVALID_PARAMS if `ref` is
    ambiguous.
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
        # a range instead of LIKE, because it uses the index and has no wildcards
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
    """Return sessions, newest first: of `owner` (None: of all users), in `state` (None: in any)."""
    return SESSIONS.all(on, f"{_LISTED} LIMIT ?", (owner, state, limit))


def page(
    on: Executes, owner: int | None, state: m.SessionState | None, limit: int
) -> tuple[tuple[SessionRow, ...], bool]:
    """Return the newest of these sessions that fit into one reply, newest first, and whether more exist."""
    return SESSIONS.page(on, _LISTED, (owner, state), limit)


def in_directory(on: Executes, cwd: str) -> tuple[SessionRow, ...]:
    """Return the open sessions whose directory is `cwd`, oldest first."""
    return SESSIONS.all(on, "WHERE cwd = ? AND state = 'open' ORDER BY created_at", (cwd,))


def open_folders(on: Executes, account: str) -> tuple[str, ...]:
    """Return the directories of an account's open sessions, each once."""
    rows = SESSIONS.all(on, "WHERE account = ? AND state = 'open' ORDER BY created_at", (account,))
    return tuple(dict.fromkeys(row.cwd for row in rows))


def ancestors(on: Executes, session: SessionRow) -> tuple[SessionRow, ...]:
    """Return the session that `session` was forked from, the one that this was forked from, and so on, of one account.

    At most 16.
    """
    found: list[SessionRow] = []
    while len(found) < _ANCESTORS and session.forked_from is not None:
        parent = get(on, session.forked_from)
        if parent is None or parent.account != session.account:
            break
        found.append(parent)
        session = parent
    return tuple(found)


def of_conversation(on: Executes, session: SessionRow, conversation: str) -> tuple[SessionRow, ...]:
    """Return the other sessions of the same owner, account and agent that have had this conversation, newest first."""
    return SESSIONS.all(
        on,
        "WHERE agent_session = ? AND owner = ? AND account = ? AND agent = ? AND id != ? ORDER BY created_at DESC"
        " LIMIT 16",
        (conversation, session.owner, session.account, session.agent, session.id),
    )


def unprepared_forks(on: Executes, session: str) -> tuple[SessionRow, ...]:
    """Return the open forks of a session that have not copied its conversation yet: no executor has prepared them."""
    return SESSIONS.all(
        on,
        "WHERE forked_from = ? AND state = 'open' AND instructions IS NULL AND agent_session GLOB ? ORDER BY id",
        (session, f"{FORK_MARK}*"),
    )


def update(tx: Tx, session: str, **fields: Any) -> SessionRow:
    """Set columns and return the changed row. HutchError(NOT_FOUND)."""
    SESSIONS.update(tx, fields, "WHERE id = ?", (session,))
    row = get(tx, session)
    if row is None:
        raise HutchError(Reason.NOT_FOUND)
    if "permission_mode" in fields:
        policy_versions.note_change(tx, row.owner)
    return row


def delete(tx: Executes, session: str) -> bool:
    """Remove a session with its turns, permission requests, rules and events; keep its audit and usage.

    Return False if it did not exist.
    """
    tx.execute("DELETE FROM events WHERE session = ?", (session,))
    return SESSIONS.delete(tx, "WHERE id = ?", (session,)) > 0


def _ambiguous(ref: str, rows: tuple[SessionRow, ...]) -> HutchError:
    ids = [row.id for row in rows]
    return HutchError(Reason.INVALID_PARAMS, f"{ref} may mean {', '.join(ids)}; write more of the id.", sessions=ids)
