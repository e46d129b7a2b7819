"""The table of events. Each event has a number in its session (`seq`) and a number over all sessions (`position`).

The writer thread assigns both in the transaction that stores the event: positions rise in the order of commits and are
never reused. `after` and cursors are seqs, or positions when following all sessions (`"*"`). The seqs of a session have
no gaps; removing a session leaves gaps in the positions.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
from msgspec import UNSET

from hutch_daemon.store import meta
from hutch_daemon.store.records import Executes, Tx
from hutch_daemon.store.rows import StoredEvent
from hutch_shared.errors import HutchError, Reason
from hutch_shared.events import DATA_OF_KIND, EventKind, ReportedEvent
from hutch_shared.failpoints import failpoint
from hutch_shared.times import from_wire, now_ms

__all__ = [
    "EVERY",
    "Page",
    "SeqRange",
    "append",
    "append_reported",
    "body_of",
    "compacted",
    "found_after",
    "prune",
    "read",
    "seq_range",
]

EVERY: Final = "*"
"""The session argument that means all sessions."""
_PAGE_BYTES: Final = 1 << 20
_ENCODER: Final = msgspec.json.Encoder()
_COLUMNS: Final = "position, session, seq, owner, turn, at, kind"
_PRUNE_BATCH: Final = 500
_INSERTS: Final = {
    many: f"INSERT INTO events ({_COLUMNS}, body) VALUES {', '.join(many * ['(?, ?, ?, ?, ?, ?, ?, ?)'])}"  # noqa: S608
    for many in (64, 8, 1)
}
"""INSERT statements by their number of rows. In a large statement a row takes less than half the time."""


@dataclass(frozen=True, slots=True)
class SeqRange:
    """The numbers of the events that are kept."""

    head: int
    """The number of the newest event."""
    oldest: int
    """The number of the oldest event; `head` + 1 if there is none."""


@dataclass(frozen=True, slots=True)
class Page:
    """A part of the history."""

    events: tuple[StoredEvent, ...]
    """All events up to `cursor`, in order, without the skipped kinds."""
    cursor: int
    more: bool
    """False if no event follows `cursor` at the moment."""


def body_of(event: ReportedEvent) -> bytes:
    """Return the event's payload, as it is stored and sent: the bytes as they arrived."""
    if event.native is UNSET:
        return b'"data":%b' % bytes(event.data)
    return b'"data":%b,"native":%b' % (bytes(event.data), bytes(event.native))


def append(
    tx: Tx, session: str, turn: str | None, kind: EventKind, data: msgspec.Struct, *, at: int | None = None
) -> StoredEvent:
    """Append one of hutchd's own events, in the transaction that changes what the event reports.

    The type of `data` must fit `kind`. `at` is in ms since 1970, by default now. HutchError(NOT_FOUND) if the session
    does not exist.
    """
    assert type(data) is DATA_OF_KIND[kind], f"{type(data).__name__} is not the data of {kind}"
    body = b'"data":' + _ENCODER.encode(data)
    (event,) = _append(tx, session, [(turn, now_ms() if at is None else at, kind, body)])
    return event


def append_reported(
    tx: Tx, executor: str, session: str, events: Sequence[ReportedEvent]
) -> tuple[list[StoredEvent], int]:
    """Append the events that an executor reports; return the newly stored events, and the executor's new receipt.

    The receipt is the highest number of the executor that is stored; events with numbers up to it are dropped as
    repeated. It changes in the same transaction. HutchError: NOT_FOUND if executor or session do not exist;
    INVALID_REQUEST for a gap in the numbers; INVALID_PARAMS for a time that cannot be read.
    """
    record = tx.execute("SELECT acked_n FROM executors WHERE id = ?", (executor,)).fetchone()
    if record is None:
        raise HutchError(Reason.NOT_FOUND)
    acked: int = record[0]
    fresh = [event for event in events if event.n > acked]
    for expected, event in enumerate(fresh, acked + 1):
        if event.n != expected:
            raise HutchError(
                Reason.INVALID_REQUEST, f"Event {expected} is missing before {event.n}.", expected=expected, got=event.n
            )
    if not fresh:
        return [], acked
    receipt = fresh[-1].n
    try:
        parts = [(event.turn, from_wire(event.at), event.kind, body_of(event)) for event in fresh]
    except ValueError as error:
        raise HutchError(Reason.INVALID_PARAMS, f"An event's time cannot be read: {error}.") from error
    stored = _append(tx, session, parts)
    tx.execute("UPDATE executors SET acked_n = ? WHERE id = ?", (receipt, executor))
    return stored, receipt


def seq_range(on: Executes, session: str, owner: int | None = None) -> SeqRange:
    """Return the seqs kept of a session or, for `"*"`, the positions kept.

    HutchError(NOT_FOUND) if the session does not exist or, with `owner`, belongs to another user.
    """
    if session == EVERY:
        return SeqRange(_position(on), int(meta.get(on, "floor") or 0) + 1)
    record = on.execute(
        "SELECT head_seq, floor_seq FROM sessions WHERE id = ? AND owner = ifnull(?, owner)", (session, owner)
    ).fetchone()
    if record is None:
        raise HutchError(Reason.NOT_FOUND)
    return SeqRange(record[0], record[1] + 1)


def compacted(oldest: int) -> HutchError:
    """Return the error for a cursor before the oldest event that is kept."""
    return HutchError(Reason.COMPACTED, f"Events before {oldest} are no longer kept; go on from there.", oldest=oldest)


def read(
    on: Executes,
    session: str,
    after: int,
    *,
    limit: int = 1000,
    skip: Collection[str] = (),
    owner: int | None = None,
    max_bytes: int = _PAGE_BYTES,
) -> Page:
    """Return the events after `after` in a session, or for `"*"` in all sessions of `owner` (None: of all users).

    Reads at most `limit` events, counting those of kinds in `skip`; the page ends with the event that brings it above
    `max_bytes`. HutchError: NOT_FOUND if the session does not exist, COMPACTED (`oldest`) if some events after `after`
    are no longer kept.
    """
    oldest = seq_range(on, session, owner).oldest
    if after < oldest - 1:
        raise compacted(oldest)
    values: tuple[object, ...]
    if session != EVERY:
        where, values, number = "session = ? AND seq > ? ORDER BY seq", (session, after), 2
    elif owner is None:
        where, values, number = "position > ? ORDER BY position", (after,), 0
    else:
        where, values, number = "owner = ? AND position > ? ORDER BY position", (owner, after), 0
    marks = ", ".join("?" for _ in skip)
    found = on.execute(
        f"SELECT {_COLUMNS}, CASE WHEN kind IN ({marks}) THEN NULL ELSE body END FROM events WHERE {where} LIMIT ?",  # noqa: S608 names of the code
        (*skip, *values, limit),
    )
    events: list[StoredEvent] = []
    looked = size = 0
    for record in found:
        looked += 1
        after = record[number]
        if record[7] is not None:
            events.append(StoredEvent(*record))
            size += len(record[7])
            if size >= max_bytes:
                return Page(tuple(events), after, more=True)
    return Page(tuple(events), after, more=looked == limit)


def found_after(on: Executes, position: int) -> list[StoredEvent]:
    """Return all events after a position."""
    where = "WHERE position > ? ORDER BY position"
    return [StoredEvent(*record) for record in on.execute(f"SELECT {_COLUMNS}, body FROM events {where}", (position,))]  # noqa: S608 as above


def prune(tx: Executes, *, before: int | None = None, max_bytes: int | None = None) -> int:
    """Remove a batch of the oldest events: those older than `before` (ms), or any if the database exceeds `max_bytes`.

    Return the number of removed events. Call it again, in a new transaction, until it returns 0.
    """
    excess = 0 if max_bytes is None else _bytes_used(tx) - max_bytes
    oldest = tx.execute(
        "SELECT position, session, seq, at, length(body) FROM events ORDER BY position LIMIT ?", (_PRUNE_BATCH,)
    )
    last = count = 0
    floors: dict[str, int] = {}
    for position, session, seq, at, size in oldest:
        if excess <= 0 and (before is None or at >= before):
            break
        excess -= size
        last, floors[session], count = position, seq, count + 1
    if count:
        tx.execute("DELETE FROM events WHERE position <= ?", (last,))
        for session, seq in floors.items():
            tx.execute("UPDATE sessions SET floor_seq = ? WHERE id = ?", (seq, session))
        meta.put(tx, "floor", str(last))
    return count


def _append(tx: Tx, session: str, parts: Sequence[tuple[str | None, int, EventKind, bytes]]) -> list[StoredEvent]:
    record = tx.execute(
        "UPDATE sessions SET head_seq = head_seq + ? WHERE id = ? RETURNING head_seq, owner", (len(parts), session)
    ).fetchone()
    if record is None:
        raise HutchError(Reason.NOT_FOUND)
    head, owner = record
    failpoint("events.insert")
    position = _position(tx)
    first = head - len(parts)
    stored = [
        StoredEvent(position + step, session, first + step, owner, turn, at, kind, body)
        for step, (turn, at, kind, body) in enumerate(parts, 1)
    ]
    _insert(tx, stored)
    tx.events += stored
    return stored


def _position(on: Executes) -> int:
    """Return the highest position that was ever assigned."""
    record = on.execute("SELECT seq FROM sqlite_sequence WHERE name = 'events'").fetchone()
    return 0 if record is None else int(record[0])


def _insert(on: Executes, events: Sequence[StoredEvent]) -> None:
    at = 0
    for many, statement in _INSERTS.items():
        while len(events) - at >= many:
            values: list[object] = []
            for event in events[at : at + many]:
                values += (
                    event.position, event.session, event.seq, event.owner, event.turn, event.at, event.kind, event.body,
                )  # fmt: skip
            on.execute(statement, values)
            at += many


def _bytes_used(on: Executes) -> int:
    """Return the size of the database without its free pages."""
    pages, free, size = (
        on.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "freelist_count", "page_size")
    )
    return int((pages - free) * size)
