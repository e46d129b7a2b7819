"""Unusable keys: the owner gets a notice in each session that waits."""

from __future__ import annotations

from dataclasses import replace

from hutch_daemon.store import keys, usage
from hutch_daemon.store.rows import KeyRow, UsageRow
from hutch_shared import messages as m
from tests.fakes.stage import Stage
from tests.system.log import data


async def stored(stage: Stage) -> KeyRow:
    """Store a key and return its row."""
    kept = await stage.services.keys.put_api_key(stage.me, m.PutApiKey("anthropic", "sk-0123456789"))
    (row,) = await stage.store.read(lambda conn: keys.KEYS.all(conn, "WHERE id = ?", (kept.id,)))
    return row


async def words(stage: Stage, session: m.Session) -> list[str]:
    """Return the words of the notices of a session."""
    told = [data(event) for event in await stage.events(session) if event.kind == "notice"]
    return [notice.word for notice in told]


async def test_the_owner_gets_one_notice_in_each_session(stage: Stage) -> None:
    """The status shows the problem too. When another key is stored, each session gets a second notice."""
    async with stage.hutchd():
        session = await stage.open()
        row = await stored(stage)
        tell = stage.key_troubles.report
        for _ in range(3):
            await tell(row, (session.id,), "The log-in could not be refreshed.")
        asked = await words(stage, session)
        status = await stage.services.host.get_status(stage.me, m.Nothing())
        await stored(stage)
        settled = await words(stage, session)
        after = await stage.services.host.get_status(stage.me, m.Nothing())

        assert asked == ["key_needed"]
        assert "The log-in could not be refreshed." in status.notices
        assert settled == ["key_needed", "key_settled"]
        assert "The log-in could not be refreshed." not in after.notices


async def test_only_the_owner_and_administrators_see_a_notice_about_a_key(stage: Stage) -> None:
    """Other users see none."""
    async with stage.hutchd():
        row = await stored(stage)
        await stage.key_troubles.report(row, ("s-0000000000000000",), "The log-in could not be refreshed.")
        other = replace(stage.me, uid=stage.me.uid + 1)
        seen = [
            "The log-in could not be refreshed." in (await stage.services.host.get_status(who, m.Nothing())).notices
            for who in (stage.me, other, replace(other, admin=True))
        ]

        assert seen == [True, False, True]


async def test_usage_of_the_broker_stands_beside_what_agents_report(stage: Stage) -> None:
    """Before its first turn has ended, a session shows the broker's count alone."""
    async with stage.hutchd():
        row = UsageRow(
            at=0,
            owner=stage.me.uid,
            account="a",
            session="s-1",
            turn=None,
            model="opus",
            source="broker",
            input_tokens=5,
        )
        await stage.store.write(lambda tx: usage.add(tx, row))
        table = await stage.services.history.get_usage(stage.me, m.GetUsage())

        assert [(line.of, line.turns, line.requests) for line in table.rows] == [("s-1", 0, 1)]
        assert table.rows[0].broker is not None
        assert table.rows[0].broker.input_tokens == 5
