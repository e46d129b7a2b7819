"""The table of directories that removed sessions left."""

from __future__ import annotations

from typing import Final

from hutch_daemon.store.records import Executes, RowMapping
from hutch_daemon.store.rows import LeftDirRow

__all__ = ["LEFT_DIRS", "add", "list_", "remove"]

LEFT_DIRS: Final = RowMapping("left_dirs", LeftDirRow)


def add(tx: Executes, row: LeftDirRow) -> None:
    """Record a directory. A path that is recorded already stays."""
    remove(tx, row.path)
    LEFT_DIRS.insert(tx, row)


def list_(on: Executes) -> tuple[LeftDirRow, ...]:
    """Return all directories, by path."""
    return LEFT_DIRS.all(on, "ORDER BY path")


def remove(tx: Executes, path: str) -> None:
    """Forget a directory that is removed."""
    LEFT_DIRS.delete(tx, "WHERE path = ?", (path,))
