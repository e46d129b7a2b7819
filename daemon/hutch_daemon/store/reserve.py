"""Disk space that the store reserves, so that it can empty its log on a full disk.

On a full disk the write-ahead log may be the only file that can shrink; but to empty it, the database must grow. The
store releases the reserve for this and takes it again from the space that the emptied log frees. The reserve is at
least as large as a log, except while a reader holds the log. It is released while hutchd does not run, so that the next
one has room to start.
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
"""The reserve is at most this fraction (1/n) of the disk."""
_OF_LOG: Final = 4
"""The log is checkpointed when it reaches this fraction (1/n) of the reserve."""
_OF_ROOM: Final = 8
"""After a full disk, the store resumes when this fraction (1/n) of the reserve is free beyond it."""


class Reserve:
    """A file beside the database. All methods block; none raises."""

    def __init__(self, database: Path) -> None:
        """Take no space yet; release what an earlier process left."""
        self._path = database.with_name(database.name + "-reserve")
        self.release()

    @property
    def size(self) -> int:
        """The bytes to reserve on this disk."""
        try:
            disk = os.statvfs(self._path.parent)
        except OSError:
            return _LARGEST
        return min(_LARGEST, disk.f_blocks * disk.f_frsize // _SHARE)

    @property
    def log(self) -> int:
        """The size of the log in bytes at which it is checkpointed; it may grow somewhat larger before that is done."""
        return self.size // _OF_LOG

    def take(self, *, with_room: bool = False) -> bool:
        """Take the whole reserve or nothing; False if the disk lacks the space.

        `with_room`: also require the space in which the store can resume.
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
