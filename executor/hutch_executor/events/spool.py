"""The spool: files that hold unacknowledged events while hutchd is away.

Theory. The `.spool` file names the executor and session; the events are in `.part` files beside it, each named by the
number of its first. A part is records: a head (number, length, CRC-32 over number and payload) and the payload, which
is the event as it goes on the wire. A record counts when it is whole; the first that is not ends the spool, so a tail
that was torn by a crash costs only what was not synced. What `append` returned for is on the disk. A part goes when all
of it is acknowledged: so a spool that shares a full disk with hutchd's record gives its room up as the record takes it.
For the same reason some of the disk is left free, unless the executor ends and would lose what does not get in.

While its executor lives the `.spool` file is locked: who gets the lock knows that the executor is dead. Versions before
had the records in the `.spool` file itself, behind its first line; they are read from there.

Always true: records are numbered without gaps in a part; after a failed write a part is cut back to its last synced
record. All calls block: use them from a worker thread, one at a time.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import struct
import zlib
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, pairwise
from pathlib import Path
from typing import Final

import msgspec

from hutch_executor.events.outbox import BATCH_BYTES, BATCH_COUNT, Stretch
from hutch_shared.errors import HutchError, Reason
from hutch_shared.failpoints import failpoint, witness

__all__ = ["Disk", "Spool", "SpoolFullError", "SpoolOwner", "read_spool", "remove_spool"]

_MAGIC: Final = "hutch-spool-1"
_HEAD: Final = struct.Struct(">QII")
_OWNER_LIMIT: Final = 4096
_PART: Final = (1 << 20, 64)
"""Bytes at which a part is followed by another; on a small disk, one in so many of its bytes."""
_LEFT_FREE: Final = (16 << 20, 4)
"""The same for the bytes of the disk that are left free."""


class SpoolFullError(Exception):
    """The spool has no room for these events; nothing was written."""


@dataclass(frozen=True, slots=True)
class Disk:
    """Bytes of a file system, and of them those that are free."""

    size: int
    free: int

    @classmethod
    def under(cls, directory: Path) -> Disk:
        """Return the one that `directory` lies on."""
        found = os.statvfs(directory)
        return cls(found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize)

    def portion(self, of: tuple[int, int]) -> int:
        """Return so many bytes, or one in so many of the disk's where that is less."""
        at_most, share = of
        return min(at_most, self.size // share)


class SpoolOwner(msgspec.Struct, frozen=True):
    """The first line: whose events these are."""

    format: str
    executor: str
    session: str


@dataclass(slots=True)
class _Part:
    """One file of records from number `first` on; `ends` says where each ends."""

    path: Path
    first: int
    ends: list[int] = field(default_factory=list)
    is_named: bool = False
    """Its name is on the disk."""

    @property
    def last(self) -> int:
        return self.first + len(self.ends) - 1

    @property
    def size(self) -> int:
        return self.ends[-1] if self.ends else 0


class Spool:
    """One executor's spool. It grows to `limit` bytes, then `append` raises SpoolFullError until something is gone."""

    def __init__(
        self,
        directory: Path,
        executor: str,
        session: str,
        limit: int,
        *,
        disk: Callable[[Path], Disk] = Disk.under,
    ) -> None:
        """Make the file in `directory`, which must be the account's own and closed to others; HutchError if not.

        A directory that is not there is made, where only the account or root can change what it lies in.
        """
        self._is_ours = _make(directory)
        self.path = directory / f"{executor}.spool"
        self.executor = executor
        self._limit = limit
        self._parts: list[_Part] = []
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _write_at(self._fd, msgspec.json.encode(SpoolOwner(_MAGIC, executor, session)) + b"\n", 0)
        self._is_synced = False
        self._disk = disk
        self._part_size = disk(directory).portion(_PART)

    @property
    def size(self) -> int:
        """Bytes of records in it."""
        return sum(part.size for part in self._parts)

    def append(self, stretch: Stretch, *, is_last_chance: bool = False) -> None:
        """Write and sync `stretch`. SpoolFullError, or OSError (nothing of it counts; it may be tried again).

        What the disk has left is for hutchd's record, and ENOSPC here, except where it is the last chance.
        """
        records = [_record(stretch.first + i, event) for i, event in enumerate(stretch.events)]
        data = b"".join(records)
        if self.size + len(data) > self._limit:
            raise SpoolFullError
        disk = self._disk(self.path.parent)
        if not is_last_chance and disk.free - len(data) < disk.portion(_LEFT_FREE):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if not self._is_synced:
            os.fsync(self._fd)
            if self._is_ours:
                _sync_directory(self.path.parent.parent)
            self._is_synced = True
        part = self._part_for(stretch.first)
        fd = os.open(part.path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            failpoint("spool.before_write")
            _write_at(fd, data, part.size)
            failpoint("spool.before_sync")
            os.fsync(fd)
            if not part.is_named:
                _sync_directory(self.path.parent)
                part.is_named = True
            witness("spooled", self.executor, stretch.last)
            failpoint("spool.after_sync")
        except OSError:
            with suppress(OSError):
                os.ftruncate(fd, part.size)
            raise
        finally:
            os.close(fd)
        for record in records:
            part.ends.append(part.size + len(record))

    def _part_for(self, first: int) -> _Part:
        """Return the part that takes record `first` next."""
        if self._parts:
            part = self._parts[-1]
            if not part.ends:
                self._remove(part)
            elif part.size < self._part_size and part.last + 1 == first:
                return part
        part = _Part(_part_path(self.path, first), first)
        self._parts.append(part)
        return part

    def read(self, first: int) -> Stretch:
        """Return records from number `first` on, a batch at most. OSError when the files no longer hold them."""
        events: list[bytes] = []
        size = 0
        part = next((part for part in self._parts if part.first <= first <= part.last), None)
        if part is not None:
            fd = os.open(part.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                start = part.ends[first - part.first - 1] if first > part.first else 0
                for n, event in _records(fd, start, part.size):
                    is_much = events and (size + len(event) > BATCH_BYTES or len(events) == BATCH_COUNT)
                    if n != first + len(events) or is_much:
                        break
                    events.append(event)
                    size += len(event)
            finally:
                os.close(fd)
        if not events:
            raise OSError(f"the spool {self.path.name} does not hold event {first} any more")
        return Stretch(first, tuple(events))

    def can_forget(self, acked: int) -> bool:
        """Tell whether some of it only holds records up to number `acked`."""
        return bool(self._parts) and self._parts[0].last <= acked

    def forget(self, acked: int) -> None:
        """Give up what only holds records up to number `acked`."""
        while self.can_forget(acked):
            self._remove(self._parts[0])

    def _remove(self, part: _Part) -> None:
        part.path.unlink(missing_ok=True)
        self._parts.remove(part)

    def close(self) -> None:
        """Close it; an empty one is removed, one with records stays for the account's next executor."""
        with suppress(OSError):
            if not self.size:
                for part in self._parts:
                    part.path.unlink(missing_ok=True)
                self.path.unlink()
                if self._is_ours:
                    self.path.parent.rmdir()
        os.close(self._fd)


def read_spool(path: Path, acked: int = 0) -> tuple[SpoolOwner, Generator[tuple[int, bytes], None, None]]:
    """Return whose spool it is and its whole records, for a dead executor's spool; parts up to `acked` are removed.

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
        for part, following in pairwise(_parts_of(path)):
            if _first_of(following) <= acked + 1:
                part.unlink()
        parts = _parts_of(path)
    except BlockingIOError as error:
        os.close(fd)
        raise HutchError(Reason.WRONG_STATE, f"The executor of the spool {path.name} lives.") from error
    except (OSError, ValueError) as error:
        os.close(fd)
        raise HutchError(Reason.NOT_FOUND, f"{path.name} is no spool.") from error
    return owner, _drain(fd, len(line) + 1, parts)


def remove_spool(path: Path) -> None:
    """Remove a dead executor's spool, its first line last; its directory stays."""
    for part in _parts_of(path):
        part.unlink()
    path.unlink()


def _drain(fd: int, start: int, parts: list[Path]) -> Generator[tuple[int, bytes], None, None]:
    expected: int | None = None
    try:
        for records in chain((_records(fd, start, os.fstat(fd).st_size),), map(_records_of, parts)):
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
        yield from _records(fd, 0, os.fstat(fd).st_size)
    finally:
        os.close(fd)


def _part_path(spool: Path, first: int) -> Path:
    return spool.with_name(f"{spool.stem}.{first:020}.part")


def _parts_of(spool: Path) -> list[Path]:
    """Return its parts in the order of their numbers."""
    return sorted(spool.parent.glob(f"{spool.stem}.{'[0-9]' * 20}.part"))


def _first_of(part: Path) -> int:
    return int(part.suffixes[-2][1:])


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


def _make(directory: Path) -> bool:
    """Make the directory, or find that it is there and fit; return whether it was made. HutchError."""
    try:
        around = os.lstat(directory.parent)
        if not os.path.lexists(directory):
            if not stat.S_ISDIR(around.st_mode) or around.st_uid not in (0, os.geteuid()) or around.st_mode & 0o022:
                raise HutchError(
                    Reason.AGENT_UNAVAILABLE, f"The spool directory {directory} would lie in a place of others."
                )
            os.mkdir(directory, 0o700)
            return True
        found = os.lstat(directory)
    except OSError as error:
        why = f"The spool directory {directory} cannot be made or looked at: {error.strerror}."
        raise HutchError(Reason.AGENT_UNAVAILABLE, why) from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise HutchError(
            Reason.AGENT_UNAVAILABLE,
            f"The spool directory {directory} must belong to the account and be closed to others (mode 0700).",
        )
    return False
