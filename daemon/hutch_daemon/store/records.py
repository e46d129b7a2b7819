"""Rows to columns and back, once for all tables: a `RowMapping` is made from a row class and knows its statements.

SQL text here is joined from names in the code alone; values always go as parameters.
"""

from __future__ import annotations

import sqlite3
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, Final, Generic, Literal, Protocol, TypeVar

import msgspec

__all__ = ["Executes", "RowMapping"]

R = TypeVar("R")
_PAGE_BYTES: Final = 2 << 20
_PLAIN = frozenset((int, float, str, bytes, type(None)))


class Executes(Protocol):
    """What runs a statement: the unit of work (`Tx`), or the connection that a read gets."""

    def execute(self, sql: str, parameters: Sequence[Any] | Mapping[str, Any] = ..., /) -> sqlite3.Cursor: ...


class RowMapping(Generic[R]):
    """One table and its row class. `assigned` is a column that SQLite gives when it is 0 in the row to insert."""

    def __init__(self, name: str, row: type[R], *, assigned: str | None = None) -> None:
        hints = typing.get_type_hints(row)
        self.name = name
        self.columns = tuple(field.name for field in fields(row))  # type: ignore[arg-type]
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
        """Insert `row`; return its rowid. sqlite3.IntegrityError where a constraint forbids it."""
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

        They are `limit` at most and end with the one that takes them over 2 MiB, so that an answer made of them fits
        into a frame.
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
        """Set columns on the rows that `tail` (`WHERE …`) selects; return how many they were.

        KeyError when a change names no column.
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
        """Delete the rows that `tail` (`WHERE …`) selects; return how many they were."""
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


def _is_plain(hint: Any) -> bool:
    """Tell whether SQLite keeps values of this type by itself: unions and literals of plain types too."""
    origin = typing.get_origin(hint)
    if origin is Literal:
        return all(type(word) in _PLAIN for word in typing.get_args(hint))
    if origin is None:
        return hint in _PLAIN
    return origin not in (dict, tuple, list) and all(_is_plain(part) for part in typing.get_args(hint))


def _json_decoder(hint: Any) -> Callable[[Any], Any]:
    return msgspec.json.Decoder(hint).decode
