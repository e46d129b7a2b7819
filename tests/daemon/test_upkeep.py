"""Periodic work of hutchd."""

from __future__ import annotations

from pathlib import Path

import anyio

from hutch_daemon.service import Service
from hutch_daemon.settings import Settings
from hutch_daemon.store import events
from hutch_daemon.store.store import Store
from hutch_daemon.wiring.settings_file import SettingsFile
from hutch_daemon.wiring.upkeep import prune, refresh_prices
from hutch_shared.paths import Paths
from tests.daemon.store.examples import report, with_session


async def test_pruning_goes_on_until_it_is_done(tmp_path: Path) -> None:
    """All events that are too old are removed, in short transactions."""
    async with Store.open(tmp_path / "hutch.db") as store:
        await with_session(store)
        await report(store, *range(1, 1201))

        pruned = await prune(store, before=1_700_000_001_100)

        assert pruned == 1099
        assert (await store.read(lambda conn: events.seq_range(conn, "s-aaaa"))).oldest == 1100


async def test_settings_that_change_while_prices_are_sent_are_sent_too(tmp_path: Path) -> None:
    """Otherwise the broker would count by the former prices until the next change."""
    paths = Paths(tmp_path / "hutch.toml", tmp_path, tmp_path, tmp_path, False)
    file, sent, may_end = SettingsFile(paths, Settings(), Service()), [0], anyio.Event()

    async def refresh() -> None:
        sent[0] += 1
        await may_end.wait()

    def change() -> None:
        file.changed.set()
        file.changed = anyio.Event()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(refresh_prices, file, refresh)
        for _ in range(2):
            await anyio.wait_all_tasks_blocked()
            change()
        may_end.set()
        await anyio.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()

    assert sent == [2]
