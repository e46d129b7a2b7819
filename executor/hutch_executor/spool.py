"""The spool: a file that holds unacknowledged events while hutchd is away.

Theory. One line names the executor and session; then records follow, each a head (number, length, CRC-32 over number
and payload) and the payload: the event as it goes on the wire. A record counts when it is whole; the first that is not
ends the file, so a tail that was torn by a crash costs only what was not synced. What `append` returned for is on the
disk. While its executor lives the file is locked: who gets the lock knows that the executor is dead.

Always true: records are numbered without gaps; after a failed write the file is cut back to its last synced record.
All calls block: use them from a worker thread, one at a time.
"""

from __future__ import annotations

import fcntl
import os
import stat
import struct
import zlib
from collections.abc import Generator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from hutch_executor.outbox import BATCH_BYTES, BATCH_COUNT, Stretch
from hutch_shared.errors import HutchError, Reason
from hutch_shared.failpoints import failpoint, witness

__all__ = ["Spool", "SpoolFullError", "SpoolOwner", "read_spool"]

_MAGIC: Final = "hutch-spool-1"
_HEAD: Final = struct.Struct(">QII")
_OWNER_LIMIT: Final = 4096


class SpoolFullError(Exception):
    """The spool has no room for these events; nothing was written."""


class SpoolOwner(msgspec.Struct, frozen=True):
    """The first line: whose events these are."""

    format: str
    executor: str
    session: str


class Spool:
    """One executor's spool. It grows to `limit` bytes, then `append` raises SpoolFullError until it is cleared."""

    def __init__(self, directory: Path, executor: str, session: str, limit: int) -> None:
        """Make the file in `directory`, which must be the account's own and closed to others; HutchError if not."""
        _check(directory)
        self.path = directory / f"{executor}.spool"
        self._executor = executor
        self._limit = limit
        self._start = 0
        self._ends: dict[int, int] = {}
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        owner = msgspec.json.encode(SpoolOwner(_MAGIC, executor, session)) + b"\n"
        _write_at(self._fd, owner, 0)
        self._start = self._end = len(owner)
        self._is_synced = False

    @property
    def size(self) -> int:
        """Bytes of records in it."""
        return self._end - self._start

    def append(self, stretch: Stretch) -> None:
        """Write and sync `stretch`. SpoolFullError, or OSError (nothing of it counts; it may be tried again)."""
        records = [_record(stretch.first + i, event) for i, event in enumerate(stretch.events)]
        data = b"".join(records)
        if self.size + len(data) > self._limit:
            raise SpoolFullError
        try:
            failpoint("spool.before_write")
            _write_at(self._fd, data, self._end)
            failpoint("spool.before_sync")
            os.fsync(self._fd)
            witness("spooled", self._executor, stretch.last)
            failpoint("spool.after_sync")
            if not self._is_synced:
                _sync_directory(self.path.parent)
                self._is_synced = True
        except OSError:
            with suppress(OSError):
                os.ftruncate(self._fd, self._end)
            raise
        for n, record in enumerate(records, stretch.first):
            self._end += len(record)
            self._ends[n] = self._end

    def read(self, first: int) -> Stretch:
        """Return records from number `first` on, a batch at most. OSError when the file no longer holds them."""
        start = self._ends.get(first - 1, self._start)
        events: list[bytes] = []
        size = 0
        for n, event in _records(self._fd, start, self._end):
            if n != first + len(events) or (events and size + len(event) > BATCH_BYTES) or len(events) == BATCH_COUNT:
                break
            events.append(event)
            size += len(event)
        if not events:
            raise OSError(f"the spool {self.path.name} does not hold event {first} any more")
        return Stretch(first, tuple(events))

    def clear(self) -> None:
        """Forget all records: they are acknowledged."""
        os.ftruncate(self._fd, self._start)
        self._end = self._start
        self._ends.clear()

    def close(self) -> None:
        """Close it; an empty one is removed, one with records stays for the account's next executor."""
        if not self.size:
            with suppress(OSError):
                self.path.unlink()
        os.close(self._fd)


def read_spool(path: Path) -> tuple[SpoolOwner, Generator[tuple[int, bytes], None, None]]:
    """Return whose spool it is and its whole records, for a dead executor's spool.

    HutchError `wrong_state` while its executor lives, `not_found` when it is no spool. The file stays open and locked
    until the iterator is exhausted or closed.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise HutchError(Reason.NOT_FOUND, f"There is no spool {path.name} that can be read.") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        line, newline, _ = os.pread(fd, _OWNER_LIMIT, 0).partition(b"\n")
        owner = msgspec.json.decode(line, type=SpoolOwner)
        if not newline or owner.format != _MAGIC:
            raise ValueError("not a spool of this version")
    except BlockingIOError as error:
        os.close(fd)
        raise HutchError(Reason.WRONG_STATE, f"The executor of the spool {path.name} lives.") from error
    except (OSError, ValueError) as error:
        os.close(fd)
        raise HutchError(Reason.NOT_FOUND, f"{path.name} is no spool.") from error
    return owner, _drain(fd, len(line) + 1)


def _drain(fd: int, start: int) -> Generator[tuple[int, bytes], None, None]:
    try:
        expected: int | None = None
        for n, event in _records(fd, start, os.fstat(fd).st_size):
            if expected not in (None, n):
                return
            expected = n + 1
            yield n, event
    finally:
        os.close(fd)


def _records(fd: int, start: int, end: int) -> Iterator[tuple[int, bytes]]:
    """Yield whole records of the file from `start` on; the first that is not whole ends it."""
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


def _record(n: int, event: bytes) -> bytes:
    return _HEAD.pack(n, len(event), _crc(n, event)) + event


def _crc(n: int, event: bytes) -> int:
    return zlib.crc32(event, zlib.crc32(n.to_bytes(8, "big")))


def _write_at(fd: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, offset)
        offset += written
        view = view[written:]


def _sync_directory(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _check(directory: Path) -> None:
    try:
        found = os.lstat(directory)
    except OSError as error:
        raise HutchError(Reason.AGENT_UNAVAILABLE, f"The spool directory {directory} is not there.") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise HutchError(
            Reason.AGENT_UNAVAILABLE,
            f"The spool directory {directory} must belong to the account and be closed to others (mode 0700).",
        )
