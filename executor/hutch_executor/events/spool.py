"""The spool: files that hold unacknowledged events while hutchd is away. `spool_files` has their format.

Theory. When `append` returns, its events are on the disk. The spool consists of parts, and a part is removed when all
of it is acknowledged: a spool that shares a full disk with hutchd's record gives up room as the record needs it. For
the same reason some of the disk is left free, except at the executor's end, when unspooled events would be lost.

Always true: the records of a part are numbered without gaps; after a failed write the part is cut back to its last
synced record. All calls block: make them from a worker thread, one at a time.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

from hutch_executor.events.outbox import BATCH_BYTES, BATCH_COUNT, EventBatch
from hutch_executor.events.spool_files import (
    MAGIC,
    SpoolOwner,
    part_path,
    read_records,
    record,
    sync_directory,
    write_at,
)
from hutch_shared.errors import HutchError, Reason
from hutch_shared.failpoints import failpoint, witness

__all__ = ["DiskSpace", "Spool", "SpoolFullError"]

_PART: Final = (1 << 20, 64)
"""The size at which the next part begins: 1 MiB, or on a small disk 1/64 of the disk."""
_LEFT_FREE: Final = (16 << 20, 4)
"""The space of the disk that stays free: 16 MiB, or on a small disk a quarter of it."""


class SpoolFullError(Exception):
    """The spool has no room for these events; nothing was written."""


@dataclass(frozen=True, slots=True)
class DiskSpace:
    """The size of a file system and its free space, in bytes."""

    size: int
    free: int

    @classmethod
    def under(cls, directory: Path) -> DiskSpace:
        """Return the space of the file system that `directory` lies on."""
        found = os.statvfs(directory)
        return cls(found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize)

    def portion(self, of: tuple[int, int]) -> int:
        """Return `of[0]` bytes, or the disk's size divided by `of[1]` if that is less."""
        at_most, share = of
        return min(at_most, self.size // share)


@dataclass(slots=True)
class _Part:
    """One file of records from number `first` on; `ends` holds the offset at which each record ends."""

    path: Path
    first: int
    ends: list[int] = field(default_factory=list)
    is_named: bool = False
    """Whether the directory entry of the file is durable."""

    @property
    def last(self) -> int:
        return self.first + len(self.ends) - 1

    @property
    def size(self) -> int:
        return self.ends[-1] if self.ends else 0


class Spool:
    """One executor's spool. It grows to `limit` bytes; then `append` raises SpoolFullError until a part is removed."""

    def __init__(
        self,
        directory: Path,
        executor: str,
        session: str,
        limit: int,
        *,
        disk: Callable[[Path], DiskSpace] = DiskSpace.under,
    ) -> None:
        """Create and lock the `.spool` file in `directory`, which must belong to the account alone; HutchError if not.

        A missing directory is created if only the account or root can write to its parent.
        """
        self._made_directory = _make_directory(directory)
        self.path = directory / f"{executor}.spool"
        self.executor = executor
        self._limit = limit
        self._parts: list[_Part] = []
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        write_at(self._fd, msgspec.json.encode(SpoolOwner(MAGIC, executor, session)) + b"\n", 0)
        self._is_synced = False
        self._disk = disk
        self._part_size = disk(directory).portion(_PART)

    @property
    def size(self) -> int:
        """Bytes of its records."""
        return sum(part.size for part in self._parts)

    def append(self, batch: EventBatch, *, is_last_chance: bool = False) -> None:
        """Write and sync `batch`. On SpoolFullError or OSError none of it is kept, and it may be tried again.

        Raises ENOSPC if less than the free share of the disk would be left, except with `is_last_chance`.
        """
        records = [record(batch.first + i, event) for i, event in enumerate(batch.events)]
        data = b"".join(records)
        if self.size + len(data) > self._limit:
            raise SpoolFullError
        disk = self._disk(self.path.parent)
        if not is_last_chance and disk.free - len(data) < disk.portion(_LEFT_FREE):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if not self._is_synced:
            os.fsync(self._fd)
            if self._made_directory:
                sync_directory(self.path.parent.parent)
            self._is_synced = True
        part = self._part_for(batch.first)
        fd = os.open(part.path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            failpoint("spool.before_write")
            write_at(fd, data, part.size)
            failpoint("spool.before_sync")
            os.fsync(fd)
            if not part.is_named:
                sync_directory(self.path.parent)
                part.is_named = True
            witness("spooled", self.executor, batch.last)
            failpoint("spool.after_sync")
        except OSError:
            with suppress(OSError):
                os.ftruncate(fd, part.size)
            raise
        finally:
            os.close(fd)
        for written in records:
            part.ends.append(part.size + len(written))

    def _part_for(self, first: int) -> _Part:
        """Return the part that record number `first` goes to."""
        if self._parts:
            part = self._parts[-1]
            if not part.ends:
                self._remove(part)
            elif part.size < self._part_size and part.last + 1 == first:
                return part
        part = _Part(part_path(self.path, first), first)
        self._parts.append(part)
        return part

    def read(self, first: int) -> EventBatch:
        """Return events from number `first` on, a batch at most. OSError if the files no longer hold `first`."""
        events: list[bytes] = []
        size = 0
        part = next((part for part in self._parts if part.first <= first <= part.last), None)
        if part is not None:
            fd = os.open(part.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                start = part.ends[first - part.first - 1] if first > part.first else 0
                for n, event in read_records(fd, start, part.size):
                    is_much = events and (size + len(event) > BATCH_BYTES or len(events) == BATCH_COUNT)
                    if n != first + len(events) or is_much:
                        break
                    events.append(event)
                    size += len(event)
            finally:
                os.close(fd)
        if not events:
            raise OSError(f"the spool {self.path.name} does not hold event {first} any more")
        return EventBatch(first, tuple(events))

    def can_forget(self, acked: int) -> bool:
        """Whether a part holds only records up to number `acked`."""
        return bool(self._parts) and self._parts[0].last <= acked

    def forget(self, acked: int) -> None:
        """Remove the parts that hold only records up to number `acked`."""
        while self.can_forget(acked):
            self._remove(self._parts[0])

    def _remove(self, part: _Part) -> None:
        part.path.unlink(missing_ok=True)
        self._parts.remove(part)

    def close(self) -> None:
        """Close the spool. An empty one is removed; one with records stays for the account's next executor."""
        with suppress(OSError):
            if not self.size:
                for part in self._parts:
                    part.path.unlink(missing_ok=True)
                self.path.unlink()
                if self._made_directory:
                    self.path.parent.rmdir()
        os.close(self._fd)


def _make_directory(directory: Path) -> bool:
    """Create the directory, or check the one that exists; return whether it was created. HutchError if it is unfit."""
    try:
        around = os.lstat(directory.parent)
        if not os.path.lexists(directory):
            if not stat.S_ISDIR(around.st_mode) or around.st_uid not in (0, os.geteuid()) or around.st_mode & 0o022:
                why = f"The spool directory {directory} would lie in a directory that other accounts can write to."
                raise HutchError(Reason.AGENT_UNAVAILABLE, why)
            os.mkdir(directory, 0o700)
            return True
        found = os.lstat(directory)
    except OSError as error:
        why = f"The spool directory {directory} cannot be created or examined: {error.strerror}."
        raise HutchError(Reason.AGENT_UNAVAILABLE, why) from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise HutchError(
            Reason.AGENT_UNAVAILABLE,
            f"The spool directory {directory} must belong to the account and be closed to others (mode 0700).",
        )
    return False
