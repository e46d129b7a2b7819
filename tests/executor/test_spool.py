"""The spool: the events that it returns after a crash, and the files that it refuses."""

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


def test_appended_events_are_read_back(directory: Path) -> None:
    """The account's next executor finds the session and all events, in order."""
    owner, records = read_spool(left_behind(directory))

    assert (owner.executor, owner.session) == ("x-1", "s-1")
    assert list(records) == list(enumerate(EVENTS, 1))


def test_its_own_executor_reads_from_any_number_on(directory: Path) -> None:
    """After a reconnect, reading starts at the first event that was not acknowledged."""
    spool = Spool(directory, "x-1", "s-1", LIMIT)
    spool.append(EventBatch(7, EVENTS[:2]))
    spool.append(EventBatch(9, EVENTS[2:]))

    assert spool.read(8) == EventBatch(8, EVENTS[1:])
    spool.close()


def test_an_emptied_spool_takes_later_numbers(directory: Path) -> None:
    """Acknowledged records are gone; the next outage begins with later numbers."""
    spool = Spool(directory, "x-1", "s-1", LIMIT)
    spool.append(EventBatch(1, EVENTS))
    spool.forget(49)
    assert spool.size == 0

    spool.append(EventBatch(50, EVENTS))

    assert spool.read(50) == EventBatch(50, EVENTS)
    spool.close()


def test_an_empty_spool_leaves_no_file(directory: Path) -> None:
    """An executor that ends with every event acknowledged leaves no file."""
    spool = Spool(directory, "x-1", "s-1", LIMIT)

    spool.close()

    assert list(directory.iterdir()) == []


def test_a_full_spool_takes_nothing_and_keeps_what_it_has(directory: Path) -> None:
    """The spool never exceeds its limit, not even by half a batch."""
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
    """Records have a checksum, so the spool returns only a beginning of the written records."""
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
    """A spool is not read while its executor may still send the events itself."""
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
def test_a_file_that_is_not_a_spool_is_refused(directory: Path, content: bytes) -> None:
    """The directory may contain files that are not Hutch's."""
    path = directory / "x-1.spool"
    path.write_bytes(content)

    with pytest.raises(HutchError) as refused:
        read_spool(path)

    assert refused.value.reason is Reason.NOT_FOUND


def test_a_directory_that_others_can_enter_is_refused(directory: Path) -> None:
    """Events of a session are not written where others can read them."""
    directory.chmod(0o755)

    with pytest.raises(HutchError, match="0700"):
        Spool(directory, "x-1", "s-1", LIMIT)


def test_a_missing_directory_is_made_and_removed(directory: Path) -> None:
    """The directory is closed to others, whatever the umask. With events in it, it stays."""
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


def test_an_existing_directory_stays(directory: Path) -> None:
    """The spool removes only a directory that it made."""
    Spool(directory, "x-1", "s-1", LIMIT).close()

    assert list(directory.iterdir()) == []


@pytest.mark.parametrize("mode", [0o770, 0o777, 0o1777])
def test_no_directory_is_made_where_others_could_replace_it(directory: Path, mode: int) -> None:
    """A missing parent directory is an error too."""
    directory.chmod(mode)

    with pytest.raises(HutchError, match="other accounts can write to"):
        Spool(directory / "x-2", "x-2", "s-1", LIMIT)
    with pytest.raises(HutchError, match="cannot be created"):
        Spool(directory / "none" / "x-2", "x-2", "s-1", LIMIT)
    assert list(directory.iterdir()) == []


def test_a_link_that_leads_nowhere_is_not_followed(directory: Path) -> None:
    """No file is created at its target."""
    (directory / "x-2").symlink_to(directory / "there")

    with pytest.raises(HutchError):
        Spool(directory / "x-2", "x-2", "s-1", LIMIT)
    assert not (directory / "there").exists()


def test_a_link_instead_of_the_directory_is_refused(directory: Path) -> None:
    """The directory must not be a link."""
    link = directory.with_name("link")
    link.symlink_to(directory)

    with pytest.raises(HutchError):
        Spool(link, "x-1", "s-1", LIMIT)


def test_the_file_is_its_owners_alone_whatever_the_umask(directory: Path) -> None:
    """The mode is 0600 under any umask."""
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


def test_a_spool_frees_disk_space_part_by_part(directory: Path) -> None:
    """Acknowledged parts are removed; all other events can still be read."""
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
def test_a_dead_executors_parts_are_read_in_order(directory: Path, acked: int) -> None:
    """All unstored events are read in order; parts with stored events only are removed."""
    spool = grown(directory, DiskSpace(PART * 64, PART * 32))
    spool.close()

    _, records = read_spool(spool.path, acked)
    found = [n for n, _ in records if n > acked]

    assert found == list(range(acked + 1, 81))
    assert room_of(directory) <= (80 - acked) * 1.1 * len(PADDING) + 1.2 * PART


def test_a_spool_of_the_version_before_is_read(directory: Path) -> None:
    """Its records are in the `.spool` file, after the first line."""
    path = left_behind(directory)
    part = part_of(path)
    path.write_bytes(path.read_bytes() + part.read_bytes())
    part.unlink()

    _, records = read_spool(path, 1)

    assert list(records) == list(enumerate(EVENTS, 1))


def test_a_spool_leaves_room_on_the_disk(directory: Path) -> None:
    """hutchd needs that space to store the events. Only an ending executor may use it, to lose none."""
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
