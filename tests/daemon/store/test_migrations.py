"""Databases of earlier schemas are migrated when they are opened, and lose nothing."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from hutch_daemon.store import audit, database, executors, permissions, sessions, turns, usage
from hutch_daemon.store.store import Store

SCHEMAS = [path for path in sorted(Path(__file__).parents[2].joinpath("schemas").iterdir()) if path.is_dir()]


def counts(path: Path) -> dict[str, int]:
    """Return the number of rows of each table."""
    with closing(sqlite3.connect(path)) as conn:
        tables = [name for (name,) in conn.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        return {name: conn.execute(f"SELECT count(*) FROM {name}").fetchone()[0] for name in tables}


def test_each_schema_before_the_latest_has_a_fixture() -> None:
    """Every schema that a user may have is tested."""
    assert [int(path.name) for path in SCHEMAS] == list(range(1, database.LATEST))


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda path: f"schema {path.name}")
async def test_an_earlier_schema_is_migrated_without_loss(schema: Path, tmp_path: Path) -> None:
    """Every row is kept and can be read; new columns have the value that means what was true before."""
    path = tmp_path / "hutch.db"
    with closing(sqlite3.connect(path)) as conn:
        conn.executescript((schema / "hutch.sql").read_text())
    before = counts(path)

    async with Store.open(path) as store:
        kept = await store.read(lambda conn: sessions.SESSIONS.all(conn))
        asked = await store.read(lambda conn: permissions.PERMISSIONS.all(conn))
        played = await store.read(lambda conn: turns.TURNS.all(conn))
        ran = await store.read(lambda conn: executors.EXECUTORS.all(conn))
        used = await store.read(lambda conn: usage.USAGE.all(conn))
        noted = await store.read(lambda conn: audit.AUDIT.all(conn))

    assert {name: counts(path)[name] for name in before} == before
    assert [one.name for one in kept] == ["history", "planning", "asking", "closed"]
    if schema.name == "1":
        assert {one.instructions for one in kept} == {None}
    assert {(one.kind, one.offered_to) for one in played} == {("prompt", None)}
    assert {one.recap_due for one in kept} == {False}
    assert {one.made_of for one in ran} == {None}
    assert {(one.cache_write_1h_tokens, one.searches, one.why_unknown) for one in used} == {(0, 0, None)}
    assert {(one.account, one.actor_account) for one in noted} == {(None, None)}
    assert [(one.kind, one.state, one.settled_rule) for one in asked] == [
        ("tool", "pending", None),
        ("plan", "pending", None),
    ]
