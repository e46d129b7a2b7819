"""Each of the broker's request records is stored exactly once, whatever the order of its reports."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from hutch_daemon.keys.request_records import store_records
from hutch_daemon.store import usage
from hutch_daemon.store.store import Store
from hutch_shared import broker_link as link


def reported(*numbers: int) -> link.Records:
    records = (link.Record(n=n, at=0, lease="l-1", session="s-1", path="/v1/messages", status=200) for n in numbers)
    return link.Records("run", tuple(records))


async def test_an_older_report_after_a_newer_one_repeats_nothing(tmp_path: Path) -> None:
    """A lost acknowledgement, two links and a full disk can bring the reports in any order."""
    async with Store.open(tmp_path / "hutch.db") as store:
        for report in (reported(1, 2, 3), reported(1), reported(2, 3), reported(3, 4)):
            await store.write(partial(store_records, reported=report, leases={}))
        rows = await store.read(lambda conn: usage.USAGE.all(conn))

    assert [row.request for row in rows] == [f"run-{n}" for n in (1, 2, 3, 4)]
