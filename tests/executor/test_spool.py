"""The spool: what it gives back after a crash anywhere, and what it refuses."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hutch_executor.events.outbox import EventBatch
from hutch_executor.events.spool import DiskSpace, Spool, SpoolFullError
from hutch_executor.events.spool_files import read_spool
from hutch_shared.errors import HutchError, Reason

LIMIT = 1 << 20
PART = 10_000
PADDING = bytes(PART // 20)
EVENTS = (b'{"n":1}', b'{"n":2,"data":{}}', b'{"n":3}')


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    made = tmp_path / "spool"
    made.mkdir(mode=0o700)
    return made


def left_behind(directory: Path, events: tuple[bytes, ...] = EVENTS) -> Path:
    """Return the file that a dead executor left."""
    spool = Spool(directory, "x-1", "s-1", LIMIT)
    spool.append(EventBatch(1, events))
    spool.close()
    return spool.path


def part_of(path: Path) -> Path:
    """Return the one file that holds a spool's records."""
    (part,) = path.parent.glob("*.part")
    return part


def test_what_was_appended_is_read_back(directory: Path) -> None:
    """The next executor of the account finds whose events these are, and all of them in order."""
    owner, records = read_spool(left_behind(directory))

    assert (owner.executor, owner.session) == ("x-1", "s-1")
    assert list(records) == list(enumerate(EVENTS, 1))


def test_its_own_executor_reads_from_any_number_on(directory: Path) -> None:
    """After a reconnect reading starts at the first event that was not acknowledged."""
    spool = Spool(directory, "x-1", "s-1", LIMIT)
    spool.append(EventBatch(7, EVENTS[:2]))
    spool.append(EventBatch(9, EVENTS[2:]))

    assert spool.read(8) == EventBatch(8, EVENTS[1:])
    spool.close()


def test_a_spool_that_was_given_up_takes_later_numbers(directory: Path) -> None:
    """Acknowledged records are gone, and the next outage starts a new stretch."""
    spool = Spool(directory, "x-1", "s-1", LIMIT)
    spool.append(EventBatch(1, EVENTS))
    spool.forget(49)
    assert spool.size == 0

    spool.append(EventBatch(50, EVENTS))

    assert spool.read(50) == EventBatch(50, EVENTS)
    spool.close()


def test_an_empty_spool_leaves_no_file(directory: Path) -> None:
    """An executor that ends with everything acknowledged leaves nothing behind."""
    spool = Spool(directory, "x-1", "s-1", LIMIT)

    spool.close()

    assert list(directory.iterdir()) == []


def test_a_full_spool_takes_nothing_and_keeps_what_it_has(directory: Path) -> None:
    """The bound is never passed, not by half a batch either."""
    spool = Spool(directory, "x-1", "s-1", limit=100)
    spool.append(EventBatch(1, EVENTS))

    with pytest.raises(SpoolFullError):
        spool.append(EventBatch(4, (bytes(100),)))

    assert spool.read(1) == EventBatch(1, EVENTS)
    spool.close()


def test_a_tail_torn_at_any_byte_costs_only_the_record_it_is_in(directory: Path) -> None:
    """A crash in the middle of a write loses no earlier record and invents none."""
    path = left_behind(directory)
    part = part_of(path)
    whole = part.read_bytes()

    for length in range(len(whole)):
        part.write_bytes(whole[:length])
        _, records = read_spool(path)
        found = list(records)

        assert found == list(enumerate(EVENTS, 1))[: len(found)]
        assert len(found) < len(EVENTS)


@given(position=st.integers(0, 10_000), value=st.integers(1, 255))
def test_a_changed_byte_never_passes_for_an_event(position: int, value: int) -> None:
    """Records are checked: what comes back is a beginning of what was written, and nothing else."""
    with tempfile.TemporaryDirectory() as made:
        path = left_behind(Path(made))
        part = part_of(path)
        data = bytearray(part.read_bytes())
        data[position % len(data)] ^= value
        part.write_bytes(data)

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
    "content",
    [
        b"",
        b"{}\n",
        b'{"format":"other","executor":"x","session":"s"}\n',
        b"\xff" * 9000,
        b'{"x":' + b"[" * 4000 + b"\n",
    ],
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


def test_a_directory_that_is_not_there_is_made_and_goes_again(directory: Path) -> None:
    """Closed to others whatever the umask; with events in it it stays."""
    own = directory / "x-2"
    before = os.umask(0)
    try:
        spool = Spool(own, "x-2", "s-1", LIMIT)
    finally:
        os.umask(before)
    mode = own.stat().st_mode & 0o7777
    spool.close()
    is_gone = not own.exists()
    spool = Spool(own, "x-2", "s-1", LIMIT)
    spool.append(EventBatch(1, EVENTS))
    spool.close()

    assert mode == 0o700
    assert is_gone
    assert list(read_spool(own / "x-2.spool")[1]) == list(enumerate(EVENTS, 1))


def test_a_directory_that_was_there_stays(directory: Path) -> None:
    """Whoever made it removes it."""
    Spool(directory, "x-1", "s-1", LIMIT).close()

    assert list(directory.iterdir()) == []


@pytest.mark.parametrize("mode", [0o770, 0o777, 0o1777])
def test_no_directory_is_made_where_others_could_replace_it(directory: Path, mode: int) -> None:
    """Nor in a place that is not there."""
    directory.chmod(mode)

    with pytest.raises(HutchError, match="other accounts can write to"):
        Spool(directory / "x-2", "x-2", "s-1", LIMIT)
    with pytest.raises(HutchError, match="cannot be made"):
        Spool(directory / "none" / "x-2", "x-2", "s-1", LIMIT)
    assert list(directory.iterdir()) == []


def test_a_link_that_leads_nowhere_is_not_followed(directory: Path) -> None:
    """Nothing is made where it leads."""
    (directory / "x-2").symlink_to(directory / "there")

    with pytest.raises(HutchError):
        Spool(directory / "x-2", "x-2", "s-1", LIMIT)
    assert not (directory / "there").exists()


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
        left_behind(directory)
    finally:
        os.umask(before)

    assert {file.stat().st_mode & 0o777 for file in directory.iterdir()} == {0o600}


def grown(directory: Path, disk: DiskSpace) -> Spool:
    """Return a spool of 40 batches of a tenth of a part, on this disk."""
    spool = Spool(directory, "x-1", "s-1", LIMIT, disk=lambda _: disk)
    for n in range(1, 81, 2):
        spool.append(EventBatch(n, (b"[%d]" % n + PADDING, b"[%d]" % (n + 1) + PADDING)))
    return spool


def test_a_spool_gives_its_room_back_piece_by_piece(directory: Path) -> None:
    """What is acknowledged soon takes no room any more, and all that is not can still be read."""
    spool = grown(directory, DiskSpace(PART * 64, PART * 32))
    whole = room_of(directory)
    sizes = []

    for acked in range(80):
        spool.forget(acked)
        sizes.append(room_of(directory))
        assert spool.read(acked + 1).events[0].startswith(b"[%d]" % (acked + 1))
    spool.forget(80)
    spool.close()

    assert all(size <= whole * (80 - acked) / 80 + 1.2 * PART for acked, size in enumerate(sizes))
    assert list(directory.iterdir()) == []


@pytest.mark.parametrize("acked", [0, 1, 30, 79])
def test_what_a_dead_executor_left_in_pieces_is_whole(directory: Path, acked: int) -> None:
    """All that is not stored yet is found in order; what is stored is given up as far as it lies apart."""
    spool = grown(directory, DiskSpace(PART * 64, PART * 32))
    spool.close()

    _, records = read_spool(spool.path, acked)
    found = [n for n, _ in records if n > acked]

    assert found == list(range(acked + 1, 81))
    assert room_of(directory) <= (80 - acked) * 1.1 * len(PADDING) + 1.2 * PART


def test_a_spool_of_the_version_before_is_read(directory: Path) -> None:
    """Its records are in the first file, behind the line that says whose they are."""
    path = left_behind(directory)
    part = part_of(path)
    path.write_bytes(path.read_bytes() + part.read_bytes())
    part.unlink()

    _, records = read_spool(path, 1)

    assert list(records) == list(enumerate(EVENTS, 1))


def test_a_spool_leaves_room_on_the_disk(directory: Path) -> None:
    """hutchd needs some to store what is in it; only an executor that ends takes it rather than lose events."""
    spool = Spool(directory, "x-1", "s-1", LIMIT, disk=lambda _: DiskSpace(4000, 1100))
    spool.append(EventBatch(1, (bytes(80),)))

    with pytest.raises(OSError, match="No space"):
        spool.append(EventBatch(2, (bytes(90),)))
    assert spool.read(1).last == 1
    spool.append(EventBatch(2, (bytes(90),)), is_last_chance=True)

    assert spool.read(2).last == 2
    spool.close()


def room_of(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.iterdir())
