"""Limits of files on disk, and events that are no longer kept."""

from __future__ import annotations

import signal
import sqlite3
from contextlib import closing
from pathlib import Path

import anyio
import pytest

from hutch_shared import messages as m
from hutch_shared.errors import HutchError, Reason
from tests.crash.disks.disk import healed
from tests.system.host import host
from tests.system.log import DEADLINE, log_of, wait_for, without_gaps

pytestmark = pytest.mark.system

WAL = 256 * 1024
HELD = 8 * WAL
GROUP = 2 << 20
"""A commit may exceed the bound by one group of units of work."""


async def test_the_log_is_bounded_under_a_reader_that_never_ends() -> None:
    """The log grows to its bound. Then hutchd accepts nothing until the foreign reader has ended."""
    async with host(f"[executors]\nspares = 0\n[store]\nwal_bytes = {WAL}\n") as made, made.client() as hutch:
        session = await made.script(
            hutch, [{"wait_file": "go"}, {"repeat": {"times": 600, "line": {"text": "u" * 10_000}}}]
        )
        async with log_of(hutch, session) as log:
            turn = await hutch.submit_prompt(session.id, "go")
            await log.until(lambda log: log.events)
            with closing(sqlite3.connect(f"file:{made.state}/hutch.db?mode=ro", uri=True)) as reader:
                reader.execute("BEGIN")
                reader.execute("SELECT count(*) FROM events").fetchone()
                Path(session.cwd, "go").touch()
                with anyio.fail_after(DEADLINE):
                    while (held := (await hutch.get_status()).store).ok:
                        await anyio.sleep(0.02)
                sizes = [(await hutch.get_status()).store.wal_bytes for _ in range(10)]
            status = await healed(hutch)
            end = await log.ended(turn)
            free = await healed(hutch)

        assert "reader" in held.detail
        assert max(*sizes, held.wal_bytes) < HELD + GROUP
        assert end.state == "completed"
        assert len(log.of("text")) == 600
        assert without_gaps(log.events)
        assert max(status.store.wal_bytes, free.store.wal_bytes) < HELD + GROUP


async def test_a_cursor_below_the_kept_events_is_refused_with_the_oldest_kept_number() -> None:
    """New settings remove old events. The command reports that and continues from the oldest kept event."""
    async with host("[executors]\nspares = 0\n") as made, made.client() as hutch:
        session = await made.script(hutch, [{"repeat": {"times": 1500, "line": {"text": "t" * 2000}}}], name="long")
        async with log_of(hutch, session) as log:
            await log.play(session, "go")
        made.settings += "[store]\nkeep_bytes = 1500000\n"
        made.write_settings()
        made.signal(signal.SIGHUP)
        await wait_for(lambda: "old events removed" in made.log_text())
        with pytest.raises(HutchError) as read:
            await hutch.call("read_events", m.ReadEvents(session.id, 1))
        with pytest.raises(HutchError) as followed:
            async with hutch.follow(m.FollowEvents(session.id, after=1)):
                pass
        logs = await made.hutch("logs", "long", "-o", "jsonl")
        head = log.events[-1].seq

        oldest = read.value.details["oldest"]
        assert (read.value.reason, followed.value.reason) == (Reason.COMPACTED, Reason.COMPACTED)
        assert 500 < oldest == followed.value.details["oldest"] < head
        assert f"Events before {oldest} are no longer kept" in logs.err
        assert len(logs.out.splitlines()) == head + 1 - oldest
