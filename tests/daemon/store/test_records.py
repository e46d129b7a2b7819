"""A row class and its table agree, and values survive storage."""

from __future__ import annotations

from typing import Any

import pytest

from hutch_daemon.store.audit import AUDIT
from hutch_daemon.store.executors import EXECUTORS
from hutch_daemon.store.keys import KEYS
from hutch_daemon.store.permissions import PERMISSIONS
from hutch_daemon.store.records import RowMapping
from hutch_daemon.store.rules import RULES, TRUST
from hutch_daemon.store.sessions import SESSIONS
from hutch_daemon.store.store import Store
from hutch_daemon.store.turns import TURNS
from hutch_daemon.store.usage import USAGE
from hutch_shared import messages as m
from tests.daemon.store.examples import permission_row, session_row

TABLES = [AUDIT, EXECUTORS, KEYS, PERMISSIONS, RULES, SESSIONS, TRUST, TURNS, USAGE]


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
async def test_a_table_has_the_columns_of_its_row_in_order(store: Store, table: RowMapping[Any]) -> None:
    """A row class and its table name the same columns."""
    found = await store.read(lambda conn: conn.execute(f"PRAGMA table_info({table.name})").fetchall())

    assert tuple(record[1] for record in found) == table.columns


async def test_structured_fields_come_back_as_their_types(store: Store) -> None:
    """JSON columns are decoded to the types of the row class."""
    session = session_row(
        options=m.AgentOptions(model="opus", allowed_tools=("Read",)),
        rules=m.Rules(deny=("Bash(rm:*)",)),
        limits=m.Limits(turn_timeout=2.5),
        sealed=b"\x00\xff",
    )
    await store.write(lambda tx: SESSIONS.insert(tx, session))

    assert await store.read(lambda conn: SESSIONS.one(conn, "WHERE id = ?", (session.id,))) == session


async def test_absent_and_true_values_come_back(store: Store) -> None:
    """None stays None in a JSON column; a flag is a bool again."""
    permission = permission_row(
        interrupt=True, questions=(m.Question("Which?", choices=(m.Choice("a"),)),), answers={"Which?": "a"}
    )

    def unit(tx: Any) -> Any:
        tx.execute("PRAGMA defer_foreign_keys = ON")
        tx.execute("SAVEPOINT trial")
        PERMISSIONS.insert(tx, permission)
        found = PERMISSIONS.one(tx, "WHERE id = ?", (permission.id,))
        tx.execute("ROLLBACK TO trial")
        tx.execute("RELEASE trial")
        return found

    found = await store.write(unit)

    assert found == permission
    assert found.interrupt is True
    assert found.updated_input is None


async def test_a_change_of_no_column_is_refused(store: Store) -> None:
    """A misspelt field raises instead of changing nothing."""
    with pytest.raises(KeyError, match="nmae"):
        await store.write(lambda tx: SESSIONS.update(tx, {"nmae": "x"}, "WHERE id = ?", ("s",)))
