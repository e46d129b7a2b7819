"""A process is killed at a named place: acknowledged events are stored, once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from hutch_daemon.store import events, executors, meta
from hutch_daemon.store.store import Store
from hutch_shared.failpoints import failpoint

ROOT = Path(__file__).parents[3]
REPORTER = """
import sys
from pathlib import Path
import anyio
from hutch_daemon.store.store import Store
from tests.daemon.store.examples import report, with_session

async def main():
    async with Store.open(Path(sys.argv[1])) as store:
        store.on_committed(lambda batch: print("published", *(event.seq for event in batch), flush=True))
        await with_session(store)
        print("ready", flush=True)
        for first in range(1, 50, 5):
            await report(store, *range(first, first + 5))
            print("acked", first + 4, flush=True)

anyio.run(main)
"""


def run_until_killed(path: Path, **environment: str) -> list[str]:
    """Run the reporter and return its output lines; with a failpoint it must have been killed."""
    clean = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "daemon"), str(ROOT / "shared")]),
    }
    done = subprocess.run(
        [sys.executable, "-c", REPORTER, str(path)],
        env=clean | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    expected = -signal.SIGKILL if "HUTCH_FAILPOINT" in environment else 0
    assert done.returncode == expected, done.stderr
    return done.stdout.splitlines()


async def what_is_there(path: Path) -> tuple[list[int], int]:
    async with Store.open(path) as store:
        page = await store.read(partial(events.read, session="s-aaaa", after=0))
        executor = await store.read(partial(executors.get, executor="x-1"))
        assert executor is not None
        return [event.seq for event in page.events], executor.acked_n


@pytest.mark.system
@pytest.mark.parametrize(
    ("place", "acked", "stored"),
    [
        ("events.insert:3", 10, 10),
        ("store.before_commit:4", 10, 10),  # the first commit opens the session
        ("store.after_commit:4", 10, 15),
        ("store.before_publish:3", 10, 15),
    ],
)
async def test_acknowledged_events_survive_a_kill_once(tmp_path: Path, place: str, acked: int, stored: int) -> None:
    """The receipt on disk agrees with the events on disk and covers everything that was acknowledged."""
    lines = run_until_killed(tmp_path / "hutch.db", HUTCH_FAILPOINT=place)

    seqs, receipt = await what_is_there(tmp_path / "hutch.db")
    assert lines[-1] == f"acked {acked}"
    assert seqs == list(range(1, stored + 1))
    assert receipt == stored


@pytest.mark.system
@pytest.mark.parametrize("place", ["store.before_migration", "store.in_migration", "store.before_new_database"])
async def test_a_killed_first_start_leaves_no_database(tmp_path: Path, place: str) -> None:
    """The next start creates it from scratch."""
    lines = run_until_killed(tmp_path / "hutch.db", HUTCH_FAILPOINT=place)

    assert lines == []
    assert not (tmp_path / "hutch.db").exists()
    async with Store.open(tmp_path / "hutch.db") as store:
        assert await store.read(partial(meta.get, key="epoch")) == "1"


@pytest.mark.system
async def test_a_process_that_is_not_killed_stores_everything(tmp_path: Path) -> None:
    """Without a failpoint all events are stored, and the receipt matches."""
    run_until_killed(tmp_path / "hutch.db")

    seqs, receipt = await what_is_there(tmp_path / "hutch.db")
    assert receipt == 50
    assert seqs == list(range(1, 51))


def test_without_the_environment_nothing_happens() -> None:
    """No failpoint kills, whatever its name."""
    failpoint("")
    failpoint("store.before_commit")
