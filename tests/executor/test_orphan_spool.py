"""The spool of a dead executor is returned until hutchd has stored it, and is then removed."""

from __future__ import annotations

from pathlib import Path

import pytest

from hutch_executor.events.orphan_spool import take_spool
from hutch_executor.events.outbox import BATCH_COUNT, EventBatch
from hutch_executor.events.spool import Spool
from hutch_shared.errors import HutchError, Reason


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    made = tmp_path / "x-1"
    made.mkdir(mode=0o700)
    return made


def event(n: int) -> bytes:
    return b'{"n":%d,"at":"2026-01-31T12:00:00.000Z","turn":"t-1","kind":"text","data":{"text":"%d"}}' % (n, n)


def leave(directory: Path, first: int, last: int) -> None:
    """Write a spool as an executor does, and die."""
    spool = Spool(directory, "x-1", "s-1", 1 << 20)
    if last >= first:
        spool.append(EventBatch(first, tuple(event(n) for n in range(first, last + 1))))
    spool_file = spool.path.read_bytes()
    spool.close()
    spool.path.write_bytes(spool_file)  # the file that a killed executor leaves, empty or not


def test_unstored_events_come_in_batches(directory: Path) -> None:
    """Each call returns the events after the acknowledged ones; a repeated call returns the same events."""
    leave(directory, 3, BATCH_COUNT + 10)

    first = take_spool(directory, 4)
    again = take_spool(directory, 4)
    rest = take_spool(directory, first.events[-1].n)

    assert again == first
    assert len(first.events) == BATCH_COUNT
    assert first.session == "s-1"
    assert [one.n for one in (*first.events, *rest.events)] == list(range(5, BATCH_COUNT + 11))
    assert bytes(first.events[0].data) == b'{"text":"5"}'


@pytest.mark.parametrize("last", [0, 5])
def test_a_spool_whose_events_are_stored_is_removed(directory: Path, last: int) -> None:
    """A spool that never held an event is removed too. Afterwards no spool is found."""
    leave(directory, 1, last)

    found = take_spool(directory, 5)

    assert found.events == ()
    assert not directory.exists()
    assert take_spool(directory, 5).events == ()


def test_an_empty_directory_is_removed(directory: Path) -> None:
    """Its executor died before it had a spool. A directory with other files stays."""
    assert take_spool(directory, 0).events == ()
    assert not directory.exists()

    directory.mkdir(mode=0o700)
    (directory / "other").touch()
    assert take_spool(directory, 0).events == ()
    assert directory.exists()


def test_the_spool_of_a_living_executor_is_left_alone(directory: Path) -> None:
    """The executor may still send the events itself."""
    spool = Spool(directory, "x-1", "s-1", 1 << 20)

    with pytest.raises(HutchError) as refused:
        take_spool(directory, 0)

    assert refused.value.reason is Reason.WRONG_STATE
    assert spool.path.exists()
    spool.close()
