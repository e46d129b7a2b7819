"""A power cut during a commit, at each sector of the commit."""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import closing
from pathlib import Path

import pytest

from hutch_daemon.store import database, events, executors
from hutch_daemon.store.store import Store
from tests.daemon.store.examples import report, with_session

SECTOR = 512


@pytest.mark.parametrize("rest", ["missing", "zeros", "noise"])
async def test_a_commit_torn_at_any_sector_is_complete_or_absent(tmp_path: Path, rest: str) -> None:
    """Earlier commits are complete whatever part of the commit is in the log; numbers and receipt agree."""
    live, copy = tmp_path / "live", tmp_path / "copy"
    live.mkdir()
    async with Store.open(live / "hutch.db") as store:
        await with_session(store)
        await report(store, 1, 2, 3)
        begin = store.status().wal_bytes
        await report(store, 4, 5, 6, size=3000)
        end = store.status().wal_bytes
        # in another process, because closing a descriptor of the database here would drop this process's locks
        subprocess.run(["cp", "-r", str(live), str(copy)], check=True)
    log = database.wal_of(copy / "hutch.db").read_bytes()[:end]
    boundaries = [*range(begin - begin % SECTOR + SECTOR, end, SECTOR), end]

    found = []
    for number, boundary in enumerate(boundaries):
        path = tmp_path / str(number) / "hutch.db"
        path.parent.mkdir()
        shutil.copy(copy / "hutch.db", path)
        lost = {"missing": b"", "zeros": bytes(end - boundary), "noise": os.urandom(end - boundary)}[rest]
        database.wal_of(path).write_bytes(log[:boundary] + lost)
        database.prepare(path)
        with closing(database.connect_reader(path)) as conn:
            seqs = [event.seq for event in events.read(conn, "s-aaaa", 0).events]
            executor = executors.get(conn, "x-1")
            assert executor is not None
            found.append((seqs, executor.acked_n, events.seq_range(conn, "s-aaaa").head))

    before, after = ([1, 2, 3], 3, 3), ([1, 2, 3, 4, 5, 6], 6, 6)
    assert len(boundaries) > 20
    assert found == [before] * (len(boundaries) - 1) + [after]
