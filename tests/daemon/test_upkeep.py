"""Periodic work of hutchd."""

from __future__ import annotations

from pathlib import Path

from hutch_daemon.store import events
from hutch_daemon.store.store import Store
from hutch_daemon.wiring.upkeep import prune
from tests.daemon.store.examples import report, with_session


async def test_pruning_goes_on_until_it_is_done(tmp_path: Path) -> None:
    """All events that are too old are removed, in short transactions."""
    async with Store.open(tmp_path / "hutch.db") as store:
        await with_session(store)
        await report(store, *range(1, 1201))

        pruned = await prune(store, before=1_700_000_001_100)

        assert pruned == 1099
        assert (await store.read(lambda conn: events.seq_range(conn, "s-aaaa"))).oldest == 1100
