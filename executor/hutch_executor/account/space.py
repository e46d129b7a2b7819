"""Why a directory of the account may take no more files: its file system is full, or the account's quota."""

from __future__ import annotations

import os
import tempfile
from typing import Final

__all__ = ["free_space"]

_FEW_BYTES: Final = 1 << 20
_FEW_FILES: Final = 16
_TRIAL_SIZE: Final = 64 * 1024


def free_space(path: str) -> str:
    """Return a phrase for the end of a sentence about `path`: why nothing can be stored there; "" if it can. Blocks.

    Tries to write 64 KiB to a file without a name: a quota shows only then.
    """
    try:
        found = os.statvfs(path)
        if found.f_bavail * found.f_frsize < _FEW_BYTES:
            return f": its file system has {found.f_bavail * found.f_frsize >> 10} KiB left"
        if found.f_files and found.f_favail < _FEW_FILES:
            return f": its file system has room for {found.f_favail} more files"
        with tempfile.TemporaryFile(dir=path, buffering=0) as trial:
            left = _TRIAL_SIZE
            while left:
                left -= trial.write(bytes(left))
            os.fsync(trial.fileno())
    except OSError as error:
        return f": {error.strerror}"
    return ""
