"""The folders in which sandboxes are tried. A lock holds each, so that the folders of killed probes can be removed.

A folder may be removed if nobody holds its lock and it is older than a probe can run: earlier versions took no lock.
Only own folders that are closed to others are removed. The folder of temporary files is sticky, so nobody else can put
another folder in the place of an own one.
"""

from __future__ import annotations

import fcntl
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

from hutch_shared.removal import remove_tree

__all__ = ["remove_abandoned", "workspace"]

_PREFIX: Final = "hutch-sandbox-"
_LONGEST_PROBE: Final = 120.0
"""Seconds after which a folder whose lock nobody holds is abandoned."""


@contextmanager
def workspace() -> Iterator[str]:
    """Yield a new, empty folder of this account, closed to others; remove it at the end. OSError on failure."""
    path = tempfile.mkdtemp(prefix=_PREFIX)
    try:
        held = _opened(path)
        try:
            fcntl.flock(held, fcntl.LOCK_EX)
            yield path
        finally:
            os.close(held)
    finally:
        remove_tree(path)


def remove_abandoned() -> None:
    """Remove the folders that killed probes of this account left. What cannot be removed stays. Blocks."""
    with suppress(OSError), os.scandir(tempfile.gettempdir()) as entries:
        for entry in entries:
            if entry.name.startswith(_PREFIX):
                with suppress(OSError):
                    _remove_if_abandoned(entry.path)


def _remove_if_abandoned(path: str) -> None:
    held = _opened(path)
    try:
        found = os.fstat(held)
        is_own = found.st_uid == os.geteuid() and not stat.S_IMODE(found.st_mode) & 0o077
        if is_own and time.time() - found.st_mtime >= _LONGEST_PROBE:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError, an OSError, if a probe runs there
            remove_tree(path)
    finally:
        os.close(held)


def _opened(path: str) -> int:
    """Open a directory that is not a link."""
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
