"""The spool: what it gives back after a crash anywhere, and what it refuses."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hutch_executor.outbox import Stretch
from hutch_executor.spool import Spool, SpoolFullError, read_spool
from hutch_shared.errors import HutchError, Reason

LIMIT = 1 << 20
EVENTS = (b'{"n":1}', b'{"n":2,"data":{}}', b'{"n":3}')


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    made = tmp_path / "spool"
    made.mkdir(mode=0o700)
    return made


def left_behind(directory: Path, events: tuple[bytes, ...] = EVENTS) -> Path:
    """Return the file that a dead executor left."""
    spool = Spool(directory, "x-1", "s-1", LIMIT)
    spool.append(Stretch(1, events))
    spool.close()
    return spool.path


def test_what_was_appended_is_read_back(directory: Path) -> None:
    """The next executor of the account finds whose events these are, and all of them in order."""
    owner, records = read_spool(left_behind(directory))

    assert (owner.executor, owner.session) == ("x-1", "s-1")
    assert list(records) == list(enumerate(EVENTS, 1))


def test_its_own_executor_reads_from_any_number_on(directory: Path) -> None:
    """After a reconnect reading starts at the first event that was not acknowledged."""
    spool = Spool(directory, "x-1", "s-1", LIMIT)
    spool.append(Stretch(7, EVENTS[:2]))
    spool.append(Stretch(9, EVENTS[2:]))

    assert spool.read(8) == Stretch(8, EVENTS[1:])
    spool.close()


def test_a_cleared_spool_takes_later_numbers(directory: Path) -> None:
    """Acknowledged records are gone, and the next outage starts a new stretch."""
    spool = Spool(directory, "x-1", "s-1", LIMIT)
    spool.append(Stretch(1, EVENTS))
    spool.clear()
    assert spool.size == 0

    spool.append(Stretch(50, EVENTS))

    assert spool.read(50) == Stretch(50, EVENTS)
    spool.close()


def test_an_empty_spool_leaves_no_file(directory: Path) -> None:
    """An executor that ends with everything acknowledged leaves nothing behind."""
    spool = Spool(directory, "x-1", "s-1", LIMIT)

    spool.close()

    assert list(directory.iterdir()) == []


def test_a_full_spool_takes_nothing_and_keeps_what_it_has(directory: Path) -> None:
    """The bound is never passed, not by half a batch either."""
    spool = Spool(directory, "x-1", "s-1", limit=100)
    spool.append(Stretch(1, EVENTS))

    with pytest.raises(SpoolFullError):
        spool.append(Stretch(4, (bytes(100),)))

    assert spool.read(1) == Stretch(1, EVENTS)
    spool.close()


def test_a_tail_torn_at_any_byte_costs_only_the_record_it_is_in(directory: Path) -> None:
    """A crash in the middle of a write loses no earlier record and invents none."""
    path = left_behind(directory)
    whole = path.read_bytes()
    start = whole.index(b"\n") + 1

    for length in range(start, len(whole)):
        path.write_bytes(whole[:length])
        _, records = read_spool(path)
        found = list(records)

        assert found == list(enumerate(EVENTS, 1))[: len(found)]
        assert len(found) < len(EVENTS)


@given(position=st.integers(0, 10_000), value=st.integers(1, 255))
def test_a_changed_byte_never_passes_for_an_event(position: int, value: int) -> None:
    """Records are checked: what comes back is a beginning of what was written, and nothing else."""
    with tempfile.TemporaryDirectory() as made:
        path = left_behind(Path(made))
        data = bytearray(path.read_bytes())
        start = data.index(b"\n") + 1
        data[start + position % (len(data) - start)] ^= value
        path.write_bytes(data)

        found = list(read_spool(path)[1])

    assert found == list(enumerate(EVENTS, 1))[: len(found)]
    assert len(found) < len(EVENTS)


def test_a_living_executor_keeps_its_spool(directory: Path) -> None:
    """Nobody brings in a spool while its executor may still send the events itself."""
    spool = Spool(directory, "x-1", "s-1", LIMIT)

    with pytest.raises(HutchError) as refused:
        read_spool(spool.path)

    assert refused.value.reason is Reason.WRONG_STATE
    spool.close()


@pytest.mark.parametrize(
    "content", [b"", b"{}\n", b'{"format":"other","executor":"x","session":"s"}\n', b"\xff" * 9000]
)
def test_a_file_that_is_no_spool_is_refused(directory: Path, content: bytes) -> None:
    """What lies in the directory is not trusted to be ours."""
    path = directory / "x-1.spool"
    path.write_bytes(content)

    with pytest.raises(HutchError) as refused:
        read_spool(path)

    assert refused.value.reason is Reason.NOT_FOUND


def test_a_directory_that_others_can_enter_is_refused(directory: Path) -> None:
    """Events of a session are not put where others read them."""
    directory.chmod(0o755)

    with pytest.raises(HutchError, match="0700"):
        Spool(directory, "x-1", "s-1", LIMIT)


def test_a_link_in_the_place_of_the_directory_is_refused(directory: Path) -> None:
    """The directory is the one that was made for it."""
    link = directory.with_name("link")
    link.symlink_to(directory)

    with pytest.raises(HutchError):
        Spool(link, "x-1", "s-1", LIMIT)


def test_the_file_is_its_owners_alone_whatever_the_umask(directory: Path) -> None:
    """Mode 0600 is asked for, not hoped for."""
    before = os.umask(0)
    try:
        spool = Spool(directory, "x-1", "s-1", LIMIT)
    finally:
        os.umask(before)

    assert spool.path.stat().st_mode & 0o777 == 0o600
    spool.close()
