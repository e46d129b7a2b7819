"""Disk space that the store reserves, so that it can empty its write-ahead log on a full disk.

On a full disk the log may be the only file that can shrink, but emptying it makes the database grow. For this the store
releases the reserve, and takes it again from the space that the emptied log frees. The reserve is at least as large as
the log, except while a reader keeps the log from shrinking. While hutchd does not run, the reserve is released, so that
the next hutchd has space to start.
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path
from typing import Final

__all__ = ["Reserve"]

_LARGEST: Final = 16 << 20
_SHARE: Final = 4
"""The largest reserve, as the fraction 1/n of the disk."""
_OF_LOG: Final = 4
"""The size of the log at which it is checkpointed, as the fraction 1/n of the reserve."""
_OF_ROOM: Final = 8
"""The free space, beyond the reserve, at which the store resumes after a full disk: the fraction 1/n of the reserve."""


class Reserve:
    """The reserve: a file beside the database. All methods block; none raises."""

    def __init__(self, database: Path) -> None:
        """Release a reserve that an earlier process left. Takes no space yet."""
        self._path = database.with_name(database.name + "-reserve")
        self.release()

    @property
    def size(self) -> int:
        """The size of the reserve for this disk, in bytes."""
        try:
            disk = os.statvfs(self._path.parent)
        except OSError:
            return _LARGEST
        return min(_LARGEST, disk.f_blocks * disk.f_frsize // _SHARE)

    @property
    def log(self) -> int:
        """The size of the log, in bytes, at which it is checkpointed. It may grow a little larger before."""
        return self.size // _OF_LOG

    def take(self, *, with_room: bool = False) -> bool:
        """Take the whole reserve or nothing. Return False if the disk lacks the space.

        `with_room`: also require the free space that the store needs to resume.
        """
        size = self.size
        try:
            descriptor = os.open(self._path, os.O_CREAT | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                _fill(descriptor, size + (size // _OF_ROOM if with_room else 0))
                os.ftruncate(descriptor, size)
            finally:
                os.close(descriptor)
        except OSError as error:
            self.release()
            return error.errno not in (errno.ENOSPC, errno.EDQUOT)
        return True

    def release(self) -> None:
        """Release the reserve."""
        with suppress(OSError):
            self._path.unlink()


def _fill(descriptor: int, size: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)
        return
    while size > 0:
        size -= os.write(descriptor, bytes(min(size, 1 << 20)))
