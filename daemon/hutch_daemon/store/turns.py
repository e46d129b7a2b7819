"""The table of turns: a session's queue, and the compare-and-set for changes of state."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any, Final

from hutch_daemon.store.records import Executes, RowMapping
from hutch_daemon.store.rows import TurnRow
from hutch_shared import messages as m
from hutch_shared.errors import HutchError, Reason
from hutch_shared.failpoints import failpoint

__all__ = [
    "TURNS",
    "active",
    "get",
    "has_begun",
    "insert",
    "list_",
    "live",
    "move",
    "next_queued",
    "page",
    "queued",
    "sessions_in_turn",
    "update",
]

TURNS: Final = RowMapping("turns", TurnRow)
_LIVE: Final = "state IN ('queued', 'dispatching', 'running', 'stopping')"
_ACTIVE: Final = "state IN ('dispatching', 'running', 'stopping')"


def insert(tx: Executes, row: TurnRow) -> tuple[TurnRow, bool]:
    """Queue `row` with the session's next number and return it with True.

    If a turn with the same idempotency key exists, return that turn with False. HutchError: NOT_FOUND if the session
    does not exist, SESSION_CLOSED, CONFLICT if the key was used for another prompt or kind of turn.
    """
    if row.idempotency_key is not None:
        made = TURNS.one(tx, "WHERE session = ? AND idempotency_key = ?", (row.session, row.idempotency_key))
        if made is not None:
            if (made.kind, made.prompt) != (row.kind, row.prompt):
                raise HutchError(Reason.CONFLICT, turn=made.id)
            return made, False
    found = tx.execute(
        "UPDATE sessions SET turns = turns + 1 WHERE id = ? RETURNING turns, state", (row.session,)
    ).fetchone()
    if found is None:
        raise HutchError(Reason.NOT_FOUND)
    number, state = found
    if state == "closed":
        raise HutchError(Reason.SESSION_CLOSED)
    failpoint("turns.insert")
    numbered = replace(row, number=number)
    TURNS.insert(tx, numbered)
    return numbered, True


def get(on: Executes, turn: str) -> TurnRow | None:
    """Return the turn with this id."""
    return TURNS.one(on, "WHERE id = ?", (turn,))


def list_(on: Executes, session: str, limit: int = 200) -> tuple[TurnRow, ...]:
    """Return the newest `limit` turns of a session, oldest first."""
    return TURNS.all(on, "WHERE session = ? ORDER BY number DESC LIMIT ?", (session, limit))[::-1]


def page(on: Executes, session: str, limit: int) -> tuple[tuple[TurnRow, ...], bool]:
    """Return the newest turns that fit into one reply, oldest first, and whether older ones exist."""
    found, more = TURNS.page(on, "WHERE session = ? ORDER BY number DESC", (session,), limit)
    return found[::-1], more


def next_queued(on: Executes, session: str) -> TurnRow | None:
    """Return the oldest queued turn of a session."""
    return TURNS.one(on, "WHERE session = ? AND state = 'queued' ORDER BY number LIMIT 1", (session,))


def queued(on: Executes, session: str) -> int:
    """Return the number of queued turns of a session."""
    count: int = on.execute("SELECT count(*) FROM turns WHERE session = ? AND state = 'queued'", (session,)).fetchone()[
        0
    ]
    return count


def active(on: Executes, session: str) -> TurnRow | None:
    """Return the session's turn that is dispatching, running or stopping; there is at most one."""
    return TURNS.one(on, f"WHERE session = ? AND {_ACTIVE}", (session,))


def sessions_in_turn(on: Executes) -> set[str]:
    """Return the sessions that have a turn that is dispatching, running or stopping."""
    return {row.session for row in TURNS.all(on, f"WHERE {_ACTIVE}")}


def has_begun(on: Executes, session: str) -> bool:
    """Return whether an executor has accepted a prompt of the session."""
    return TURNS.one(on, "WHERE session = ? AND started_at IS NOT NULL LIMIT 1", (session,)) is not None


def live(on: Executes) -> tuple[TurnRow, ...]:
    """Return all turns that have not ended, by session and number."""
    return TURNS.all(on, f"WHERE {_LIVE} ORDER BY session, number")


def move(tx: Executes, turn: str, from_states: Collection[m.TurnState], to_state: m.TurnState, **fields: Any) -> bool:
    """If the turn's state is in `from_states`, set `to_state` and `fields`; return whether it was.

    This is a compare-and-set. sqlite3.IntegrityError if another turn of the session is already active.
    """
    marks = ", ".join("?" for _ in from_states)
    return (
        TURNS.update(tx, {"state": to_state, **fields}, f"WHERE id = ? AND state IN ({marks})", (turn, *from_states))
        > 0
    )


def update(tx: Executes, turn: str, **fields: Any) -> bool:
    """Set columns other than the state; return whether the turn exists."""
    assert "state" not in fields
    return TURNS.update(tx, fields, "WHERE id = ?", (turn,)) > 0
