"""Room on the disk that the store holds back, so that it can always put its log in order.

On a full disk the write-ahead log can be the only thing that could shrink, and what is in it cannot be brought into the
database, which would grow by it. The reserve is given back for that, and taken again from what the emptied log leaves.
It is at least as large as what a log holds, except while a reader holds the log. It is given back, too, for as long as
hutchd does not run: a new one finds room to begin.
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
"""Of a small disk it takes one part in so many."""
_OF_LOG: Final = 4
"""The log is brought into the database when it has the size of one part in so many of the reserve."""
_OF_ROOM: Final = 8
"""And what was stopped by a full disk goes on when there is room for one part in so many."""


class Reserve:
    """A file beside the database. All calls block; none raises."""

    def __init__(self, database: Path) -> None:
        """Take nothing yet, and give back what an earlier one left."""
        self._path = database.with_name(database.name + "-reserve")
        self.give_back()

    @property
    def size(self) -> int:
        """Bytes that it should have on this disk."""
        try:
            disk = os.statvfs(self._path.parent)
        except OSError:
            return _LARGEST
        return min(_LARGEST, disk.f_blocks * disk.f_frsize // _SHARE)

    @property
    def log(self) -> int:
        """Bytes of log that are brought into the database; some more may come before that was done."""
        return self.size // _OF_LOG

    def take(self, *, with_room: bool = False) -> bool:
        """Take it whole, or leave it; False where the disk has not that (nor, `with_room`, some more to go on with)."""
        size = self.size
        try:
            descriptor = os.open(self._path, os.O_CREAT | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                _fill(descriptor, size + (size // _OF_ROOM if with_room else 0))
                os.ftruncate(descriptor, size)
            finally:
                os.close(descriptor)
        except OSError as error:
            self.give_back()
            return error.errno not in (errno.ENOSPC, errno.EDQUOT)
        return True

    def give_back(self) -> None:
        """Let the disk have it."""
        with suppress(OSError):
            self._path.unlink()


def _fill(descriptor: int, size: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)
        return
    while size > 0:
        size -= os.write(descriptor, bytes(min(size, 1 << 20)))
