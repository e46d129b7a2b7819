"""New databases, copied instead of created: running all migrations takes longer than most tests."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from hutch_daemon.store import database

__all__ = ["new_database"]


def new_database(path: Path) -> Path:
    """Put a new database at `path`, unless there is one. All databases of a process have the same journal's id."""
    if not path.exists():
        path.touch(0o600)
        path.write_bytes(_content())
    return path


@cache
def _content() -> bytes:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "hutch.db"
        database.prepare(path)
        return path.read_bytes()
