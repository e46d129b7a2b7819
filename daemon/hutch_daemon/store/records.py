"""Holds the transaction of a unit of work; converts rows to columns and back, and rows to messages, for all tables.

A `RowMapping` is made from a table's name and a row class (`rows`), and builds their SQL statements. So a new column
needs only a migration and a field in the row class. SQL text contains only names from the code; values are parameters.
"""

from __future__ import annotations

import sqlite3
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Final, Generic, Literal, Protocol, TypeVar

import msgspec

from hutch_daemon.store.rows import StoredEvent
from hutch_shared.times import to_wire

__all__ = ["Effect", "Executes", "RowMapping", "Tx", "to_message"]

R = TypeVar("R")
W = TypeVar("W", bound=msgspec.Struct)
_PAGE_BYTES: Final = 2 << 20
_PLAIN = frozenset((int, float, str, bytes, type(None)))


class Executes(Protocol):
    """An object that runs statements: the `Tx` of a unit of work, or the connection of a read."""

    def execute(self, sql: str, parameters: Sequence[Any] | Mapping[str, Any] = ..., /) -> sqlite3.Cursor: ...


Effect = Callable[[], object]
"""A callback that runs on the event loop after a commit, outside of any task. It must not block, and cannot use
`anyio.current_time` or open task groups.
"""


@dataclass(slots=True)
class Tx:
    """Runs statements on the open transaction, and collects events and effects. Valid while the unit runs."""

    conn: sqlite3.Connection
    policy_changed: Callable[[int], object]
    """The effect of a change by which the calls of a user are judged (`policy_versions`)."""
    events: list[StoredEvent] = field(default_factory=list)
    """The events to publish after the commit. `store.events` adds to it."""
    effects: list[Effect] = field(default_factory=list)
    """The callbacks to run after the commit. `after_commit` adds to it."""
    erases: bool = False
    """True if the unit removed secret bytes: the write-ahead log, which still has them, is emptied after the commit."""

    def execute(self, sql: str, parameters: Any = (), /) -> sqlite3.Cursor:
        """Run one statement."""
        return self.conn.execute(sql, parameters)

    def after_commit(self, effect: Effect) -> None:
        """Run `effect` once on the event loop when this unit is durable, even if the caller of `write` was cancelled.

        It does not run if the unit raises or the commit fails. (If reopening the database shows that a failed commit
        was stored, its effects run then.) Effects run in the order of their registration: after the commit's events
        were published, and before the commit's `write` calls return. An exception of an effect is logged; the other
        effects still run.
        """
        self.effects.append(effect)


class RowMapping(Generic[R]):
    """A table and its row class. If a row is inserted with 0 in the column `assigned`, SQLite assigns its value."""

    def __init__(self, name: str, row: type[R], *, assigned: str | None = None) -> None:
        hints = typing.get_type_hints(row)
        self.name = name
        self.columns = tuple(one.name for one in fields(row))  # type: ignore[arg-type]
        self._row = row
        self._assigned = assigned
        self._decode: list[tuple[int, Callable[[Any], Any]]] = []
        self._json: set[str] = set()
        for index, column in enumerate(self.columns):
            hint = hints[column]
            if hint is bool:
                self._decode.append((index, bool))
            elif not _is_plain(hint):
                self._decode.append((index, _json_decoder(hint)))
                self._json.add(column)
        self.listed = ", ".join(self.columns)
        marks = ", ".join("?" for _ in self.columns)
        self._insert = f"INSERT INTO {name} ({self.listed}) VALUES ({marks})"  # noqa: S608 names of the code

    def insert(self, tx: Executes, row: R) -> int:
        """Insert `row`; return its rowid. sqlite3.IntegrityError if a constraint forbids it."""
        values = [self._encode(column, getattr(row, column)) for column in self.columns]
        if self._assigned is not None:
            index = self.columns.index(self._assigned)
            values[index] = values[index] or None
        return tx.execute(self._insert, values).lastrowid or 0

    def iterate(self, on: Executes, tail: str = "", values: Sequence[Any] = ()) -> Iterator[R]:
        """Yield the rows that `tail` (`WHERE … ORDER BY … LIMIT …`) selects."""
        for record in on.execute(f"SELECT {self.listed} FROM {self.name} {tail}", values):  # noqa: S608 as above
            yield self._made(record)

    def all(self, on: Executes, tail: str = "", values: Sequence[Any] = ()) -> tuple[R, ...]:
        """Return the rows that `tail` selects."""
        return tuple(self.iterate(on, tail, values))

    def page(self, on: Executes, tail: str, values: Sequence[Any], limit: int) -> tuple[tuple[R, ...], bool]:
        """Return the first rows that `tail` (without LIMIT) selects, and whether there are more.

        The page has at most `limit` rows and ends with the row that brings it above 2 MiB, so that a reply with the
        page fits into a frame.
        """
        rows: list[R] = []
        size = 0
        for record in on.execute(f"SELECT {self.listed} FROM {self.name} {tail} LIMIT ?", (*values, limit + 1)):  # noqa: S608 as above
            if len(rows) == limit or size > _PAGE_BYTES:
                return tuple(rows), True
            rows.append(self._made(record))
            size += sum(len(value) for value in record if isinstance(value, str | bytes))
        return tuple(rows), False

    def one(self, on: Executes, tail: str, values: Sequence[Any]) -> R | None:
        """Return the first row that `tail` selects."""
        return next(self.iterate(on, tail, values), None)

    def update(self, tx: Executes, changes: Mapping[str, Any], tail: str, values: Sequence[Any]) -> int:
        """Set columns of the rows that `tail` (`WHERE …`) selects; return the number of rows.

        KeyError for an unknown column, ValueError if `changes` is empty.
        """
        unknown = changes.keys() - set(self.columns)
        if unknown:
            raise KeyError(f"no such column in {self.name}: {', '.join(sorted(unknown))}")
        if not changes:
            raise ValueError("nothing to change")
        sets = ", ".join(f"{column} = ?" for column in changes)
        new = [self._encode(column, value) for column, value in changes.items()]
        return tx.execute(f"UPDATE {self.name} SET {sets} {tail}", [*new, *values]).rowcount  # noqa: S608 as above

    def delete(self, tx: Executes, tail: str, values: Sequence[Any]) -> int:
        """Delete the rows that `tail` (`WHERE …`) selects; return the number of rows."""
        return tx.execute(f"DELETE FROM {self.name} {tail}", values).rowcount  # noqa: S608 as above

    def _made(self, record: Sequence[Any]) -> R:
        values = list(record)
        for index, decode in self._decode:
            if values[index] is not None:
                values[index] = decode(values[index])
        return self._row(**dict(zip(self.columns, values, strict=True)))

    def _encode(self, column: str, value: Any) -> Any:
        if value is None or column not in self._json:
            return value
        return msgspec.json.encode(value).decode()


def to_message(message: type[W], row: Any, **given: Any) -> W:
    """Return a message with the row's fields of the same names. Times are converted to the wire's format.

    `given` has the fields that the row lacks or that clients see differently. AttributeError if a field is in neither.
    """
    for name in message.__struct_fields__:
        if name not in given:
            given[name] = _on_wire(name, getattr(row, name))
    return message(**given)


def _on_wire(name: str, value: Any) -> Any:
    is_time = isinstance(value, int) and (name == "at" or name.endswith("_at"))
    return to_wire(value) if is_time else value


def _is_plain(hint: Any) -> bool:
    """Return whether SQLite stores values of this type unchanged. Unions and literals of plain types are plain too."""
    origin = typing.get_origin(hint)
    if origin is Literal:
        return all(type(word) in _PLAIN for word in typing.get_args(hint))
    if origin is None:
        return hint in _PLAIN
    return origin not in (dict, tuple, list) and all(_is_plain(part) for part in typing.get_args(hint))


def _json_decoder(hint: Any) -> Callable[[Any], Any]:
    return msgspec.json.Decoder(hint).decode
