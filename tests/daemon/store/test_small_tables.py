"""The small tables: keys, rules, trust, audit, usage, meta."""

from __future__ import annotations

from contextlib import closing
from functools import partial
from pathlib import Path
from random import Random
from threading import Event
from typing import Any

import pytest

from hutch_daemon.store import audit, database, keys, meta, rules, usage
from hutch_daemon.store.account_names import AccountNames
from hutch_daemon.store.records import Tx
from hutch_daemon.store.rows import KeyRow, RuleRow, TrustRow, UsageRow, UsageTotal
from hutch_daemon.store.store import Store
from hutch_shared.events import UsageSeen
from hutch_shared.times import now_ms
from tests.accounts import account, renamed
from tests.daemon.store.examples import AT, with_session


def key_row(key: str, **fields: Any) -> KeyRow:
    plain = {"owner": 1, "provider": "anthropic", "name": "default", "created_at": AT, "master": "m1"}
    return KeyRow(**{**plain, "id": key, "sealed": b"s", "wrapped": b"w", **fields})


def usage_row(**fields: Any) -> UsageRow:
    plain = {"at": AT, "owner": 1, "account": "ada", "session": "s-1", "turn": "t-1", "model": "opus"}
    return UsageRow(**{**plain, **fields})


async def test_a_key_replaces_the_one_of_its_name(store: Store) -> None:
    """An owner has one credential per provider and name; uses are counted on it."""
    for row in (key_row("k-1"), key_row("k-2", sealed=b"new"), key_row("k-3", name="other"), key_row("k-4", owner=2)):
        await store.write(partial(keys.put, row=row))
    await store.write(partial(keys.touch, key="k-2", at=AT + 1))

    found = await store.read(partial(keys.get, owner=1, provider="anthropic", name="default"))
    mine = await store.read(partial(keys.list_, owner=1))
    removed = await store.write(partial(keys.delete, owner=1, provider="anthropic", name="other"))
    assert found is not None
    assert (found.id, found.sealed, found.uses, found.last_used_at) == ("k-2", b"new", 1, AT + 1)
    assert [row.id for row in mine] == ["k-2", "k-3"]
    assert removed
    assert [row.id for row in await store.read(keys.list_)] == ["k-2", "k-4"]


def test_a_removed_credential_leaves_no_copy_of_its_bytes(tmp_path: Path) -> None:
    """Rows that change and grow move between pages, and SQLite leaves copies of them there. These go, too."""
    random, path = Random(20), tmp_path / "hutch.db"
    database.prepare(path)
    live: dict[str, bytes] = {}
    removed: list[bytes] = []
    with closing(database.connect_writer(path)) as conn:
        conn.execute("BEGIN")
        for step in range(200):
            name = random.choice([*live, "none"])
            if step < 12 or name == "none" or random.random() < 0.2:
                live[f"k-{step}"] = random.randbytes(random.choice([150, 300, 900, 1500]))
                keys.KEYS.insert(conn, key_row(f"k-{step}", name=f"{step}", sealed=live[f"k-{step}"]))
            elif random.random() < 0.75:
                conn.execute("UPDATE keys SET hint = ? WHERE id = ?", ("h" * random.randint(0, 400), name))
            else:
                keys.erase(conn, name)
                removed.append(live.pop(name))
        conn.execute("COMMIT")
        emptied = database.truncate_wal(conn)

    left = path.read_bytes()

    assert emptied
    assert len(removed) > 3
    assert not [one for one in removed for at in range(0, len(one) - 16, 50) if one[at : at + 16] in left]


async def test_rules_apply_in_their_scope(store: Store) -> None:
    """A rule applies everywhere, in a project or in a session, for its owner only, and is stored once."""
    await with_session(store)

    def unit(tx: Tx) -> list[bool]:
        rows = [
            RuleRow(owner=1, effect="allow", rule="Bash(ls:*)", created_at=AT),
            RuleRow(owner=1, effect="allow", rule="Bash(ls:*)", created_at=AT + 1),
            RuleRow(owner=1, effect="deny", rule="Bash(rm:*)", created_at=AT, project="/p"),
            RuleRow(owner=1, effect="ask", rule="Edit", created_at=AT, session="s-aaaa", origin="p-1"),
            RuleRow(owner=2, effect="allow", rule="Bash", created_at=AT),
        ]
        return [rules.add(tx, row) for row in rows]

    added = await store.write(unit)
    everywhere = await store.read(partial(rules.list_, owner=1))
    there = await store.read(partial(rules.list_, owner=1, project="/p", session="s-aaaa"))
    removed = await store.write(partial(rules.remove, owner=1, effect="allow", rule="Bash(ls:*)"))
    again = await store.write(partial(rules.remove, owner=1, effect="deny", rule="Bash(rm:*)"))

    assert added == [True, False, True, True, True]
    assert [row.rule for row in everywhere] == ["Bash(ls:*)"]
    assert [(row.rule, row.origin) for row in there] == [("Bash(ls:*)", ""), ("Bash(rm:*)", ""), ("Edit", "p-1")]
    assert (removed, again) == (True, False)


async def test_trust_covers_one_digest(store: Store) -> None:
    """A changed policy file is not trusted; trusting it ends the trust in the earlier text."""
    await store.write(partial(rules.trust, row=TrustRow(owner=1, path="/p", digest="old", at=AT)))
    await store.write(partial(rules.trust, row=TrustRow(owner=1, path="/p", digest="new", at=AT)))

    told = [
        await store.read(partial(rules.is_trusted, owner=owner, path="/p", digest=digest))
        for owner, digest in ((1, "new"), (1, "old"), (2, "new"))
    ]
    listed = await store.read(partial(rules.list_trusted, owner=1))
    gone = await store.write(partial(rules.distrust, owner=1, path="/p"))
    assert told == [True, False, False]
    assert [row.digest for row in listed] == ["new"]
    assert gone


@pytest.mark.parametrize(
    ("filters", "numbers"),
    [
        ({}, [1, 2, 3]),
        ({"owner": 1}, [1, 2]),
        ({"session": "s-2"}, [2, 3]),
        ({"action": "grant"}, [3]),
        ({"since": AT + 1}, [2, 3]),
        ({"after": 1, "limit": 1}, [2]),
    ],
)
async def test_the_audit_is_read_in_order_and_filtered(
    store: Store, filters: dict[str, Any], numbers: list[int]
) -> None:
    """Each filter restricts; a cursor and a limit make pages."""
    for step, (owner, session, action) in enumerate([(1, "s-1", "decide"), (1, "s-2", "decide"), (2, "s-2", "grant")]):
        line: dict[str, Any] = {"owner": owner, "actor": "uid 1", "action": action, "outcome": "ok", "session": session}
        await store.write(partial(audit.record, **line, details={"n": step}, at=AT + step))

    rows, _ = await store.read(partial(audit.read, **filters))

    assert [row.number for row in rows] == numbers
    assert all(row.details == {"n": row.number - 1} for row in rows)


async def test_an_audit_line_is_stored_with_its_act_or_not_at_all(store: Store) -> None:
    """The line belongs to the act's transaction, and a later reader knows when it happened."""

    def act(tx: Tx, error: Exception | None) -> None:
        audit.record(tx, actor="uid 1", owner=1, action="act", outcome="done")
        if error is not None:
            raise error

    before = now_ms()
    with pytest.raises(LookupError):
        await store.write(partial(act, error=LookupError()))
    await store.write(partial(act, error=None))

    ((row,), _) = await store.read(audit.read)
    assert (row.actor, row.owner, row.action, row.outcome, row.details) == ("uid 1", 1, "act", "done", None)
    assert before <= row.at <= now_ms()


@pytest.mark.parametrize(
    ("actor", "actor_account"),
    [("uid 0 (hutch 0.1, pid 7)", "root"), ("uid 4294967294 (a client, pid 7)", None), ("rule", None), ("uid", None)],
)
async def test_an_audit_line_names_its_users(store: Store, actor: str, actor_account: str | None) -> None:
    """By uid, and by the names that they have at that time. A rule has no account, nor has a uid without one."""
    await store.write(partial(audit.record, actor=actor, owner=0, action="act", outcome="done"))

    ((row,), _) = await store.read(audit.read)
    assert (row.actor, row.actor_account, row.owner, row.account) == (actor, actor_account, 0, "root")


async def test_an_audit_line_keeps_the_name_of_its_time(store: Store) -> None:
    """A uid that gets another name later has both in the audit, each in the lines of its time."""
    with account("audited") as who:
        line: dict[str, Any] = {"actor": f"uid {who.uid} (hutch, pid 7)", "owner": who.uid, "outcome": "done"}
        await store.write(partial(audit.record, **line, action="before"))
        with renamed(who, f"{who.name}-new"):
            await store.write(partial(audit.record, **line, action="after"))

    (rows, _) = await store.read(audit.read)
    assert [(row.account, row.actor_account) for row in rows] == [(who.name,) * 2, (f"{who.name}-new",) * 2]


def test_a_directory_server_that_does_not_answer_delays_no_line() -> None:
    """The last known name is used, and no second look-up is begun while the first one hangs."""
    begun, answer = [0], Event()

    def look_up(uid: int) -> str | None:
        begun[0] += 1
        if begun[0] > 1:
            answer.wait()
        return f"name {begun[0]}"

    names = AccountNames(look_up, wait=0.05)
    found = [names.name(7) for _ in range(100)]
    during = begun[0]
    answer.set()

    assert found == ["name 1"] * 100
    assert during == 2


async def test_usage_is_summed_once_per_record(store: Store) -> None:
    """A repeated record is not counted. Sums are per session, account, day or model, of one source."""
    rows = [
        usage_row(input_tokens=1, usd=0.5, request="r1"),
        usage_row(input_tokens=1, usd=0.5, request="r1"),
        usage_row(input_tokens=10, turn="t-2", model="haiku", why_unknown="Nobody knows."),
        usage_row(input_tokens=100, session="s-2", turn="t-3", at=AT + 86_400_000),
        usage_row(input_tokens=1000, source="broker", request="r1", usd=0.25, searches=3),
    ]
    counted = [await store.write(partial(usage.add, row=row)) for row in rows]

    by_session = await store.read(partial(usage.table, by="session"))
    by_model = await store.read(partial(usage.table, by="model", session="s-1"))
    by_day = await store.read(partial(usage.table, by="day", owner=1, since=AT + 1))
    total = await store.read(partial(usage.total, session="s-1"))
    assert counted == [True, False, True, True, True]
    assert by_session == (
        UsageTotal("s-1", 2, 2, UsageSeen(input_tokens=11, usd=0.5, total=True), 0, 1, "Nobody knows."),
        UsageTotal("s-2", 1, 1, UsageSeen(input_tokens=100, total=True), 0, 1),
    )
    assert [line.of for line in by_model] == ["opus", "haiku"]
    assert [(line.of, line.usage.input_tokens) for line in by_day] == [("2023-11-15", 100)]
    assert total == UsageSeen(input_tokens=11, total=True)
    (broker,) = await store.read(partial(usage.table, by="session", source="broker"))
    assert (broker.usage.usd, broker.searches, broker.unknown) == (0.25, 3, 0)
    assert [await store.read(partial(usage.spent, session=name)) for name in ("s-1", "s-none")] == [0.25, 0.0]
    await store.write(partial(usage.add, row=usage_row(source="broker", request="r2")))
    assert await store.read(partial(usage.spent, session="s-1")) is None
    assert await store.read(partial(usage.total, session="s-none")) is None


async def test_a_fact_is_replaced(store: Store) -> None:
    """Meta keeps one value for each key."""
    await store.write(partial(meta.put, key="colour", value="red"))
    await store.write(partial(meta.put, key="colour", value="blue"))

    assert await store.read(partial(meta.get, key="colour")) == "blue"
    assert await store.read(partial(meta.get, key="shape")) is None
