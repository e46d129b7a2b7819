"""The files of a spool: their format, and how another executor reads those of a dead one.

The `.spool` file holds one line that names the executor and the session. The events are in `.part` files beside it,
each named by the number of its first event. A part is a sequence of records: a head (number, length, CRC-32 over number
and payload), then the payload, which is the event as it goes on the wire. The first record that is not whole ends the
spool: a crash that tears the tail costs only unsynced records.

An executor locks its `.spool` file while it lives, so a process that gets the lock knows that the executor is dead.
Earlier versions wrote the records into the `.spool` file itself, after the first line; those are read too.
"""

from __future__ import annotations

import fcntl
import os
import struct
import zlib
from collections.abc import Generator, Iterator
from itertools import chain, pairwise
from pathlib import Path
from typing import Final

import msgspec

from hutch_shared.errors import HutchError, Reason

__all__ = [
    "MAGIC",
    "SpoolOwner",
    "part_path",
    "read_records",
    "read_spool",
    "record",
    "remove_spool",
    "sync_directory",
    "write_at",
]

MAGIC: Final = "hutch-spool-1"
_HEAD: Final = struct.Struct(">QII")
_OWNER_LIMIT: Final = 4096


class SpoolOwner(msgspec.Struct, frozen=True):
    """The first line of a `.spool` file: the executor and session of its events."""

    format: str
    executor: str
    session: str


# ---------------------------------------------------------------- a dead executor's spool


def read_spool(path: Path, acked: int = 0) -> tuple[SpoolOwner, Generator[tuple[int, bytes], None, None]]:
    """Return the owner of a dead executor's spool, and its whole records. Removes the parts that `acked` covers.

    HutchError: `wrong_state` while its executor lives, `not_found` if the file is not a spool. The file stays open and
    locked until the iterator is exhausted or closed. Blocks.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise HutchError(Reason.NOT_FOUND, f"There is no spool {path.name} that can be read.") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        line, newline, _ = os.pread(fd, _OWNER_LIMIT, 0).partition(b"\n")
        owner = msgspec.json.decode(line, type=SpoolOwner)
        if not newline or owner.format != MAGIC:
            raise ValueError("not a spool of this version")
        for part, following in pairwise(_parts_of(path)):
            if _first_of(following) <= acked + 1:
                part.unlink()
        parts = _parts_of(path)
    except BlockingIOError as error:
        os.close(fd)
        raise HutchError(Reason.WRONG_STATE, f"The executor of the spool {path.name} lives.") from error
    except (OSError, ValueError, RecursionError) as error:
        os.close(fd)
        raise HutchError(Reason.NOT_FOUND, f"{path.name} is not a spool.") from error
    return owner, _drain(fd, len(line) + 1, parts)


def remove_spool(path: Path) -> None:
    """Remove a dead executor's spool: the parts first, the `.spool` file last. The directory stays."""
    for part in _parts_of(path):
        part.unlink()
    path.unlink()


def _drain(fd: int, start: int, parts: list[Path]) -> Generator[tuple[int, bytes], None, None]:
    expected: int | None = None
    try:
        for records in chain((read_records(fd, start, os.fstat(fd).st_size),), map(_records_of, parts)):
            for n, event in records:
                if expected not in (None, n):
                    return
                expected = n + 1
                yield n, event
    finally:
        os.close(fd)


def _records_of(part: Path) -> Iterator[tuple[int, bytes]]:
    fd = os.open(part, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        yield from read_records(fd, 0, os.fstat(fd).st_size)
    finally:
        os.close(fd)


# ---------------------------------------------------------------- the format


def part_path(spool: Path, first: int) -> Path:
    """Return the path of the part whose first event is number `first`."""
    return spool.with_name(f"{spool.stem}.{first:020}.part")


def _parts_of(spool: Path) -> list[Path]:
    """Return the parts of a spool, in the order of their numbers."""
    return sorted(spool.parent.glob(f"{spool.stem}.{'[0-9]' * 20}.part"))


def _first_of(part: Path) -> int:
    return int(part.suffixes[-2][1:])


def record(n: int, event: bytes) -> bytes:
    """Return the record of event number `n`."""
    return _HEAD.pack(n, len(event), _crc(n, event)) + event


def read_records(fd: int, start: int, end: int) -> Iterator[tuple[int, bytes]]:
    """Yield (number, event) of the whole records between the offsets `start` and `end`. Stops at the first torn one."""
    while end - start >= _HEAD.size:
        head = os.pread(fd, _HEAD.size, start)
        if len(head) < _HEAD.size:
            return
        n, length, crc = _HEAD.unpack(head)
        if length > end - start - _HEAD.size:
            return
        event = os.pread(fd, length, start + _HEAD.size)
        if len(event) < length or _crc(n, event) != crc:
            return
        yield n, event
        start += _HEAD.size + length


def _crc(n: int, event: bytes) -> int:
    return zlib.crc32(event, zlib.crc32(n.to_bytes(8, "big")))


def write_at(fd: int, data: bytes, offset: int) -> None:
    """Write all of `data` at `offset`."""
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, offset)
        offset += written
        view = view[written:]


def sync_directory(directory: Path) -> None:
    """Make new names in `directory` durable."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
