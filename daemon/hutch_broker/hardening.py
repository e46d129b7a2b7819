"""What the broker does to itself before it holds a secret: no core, no look inside, no new privileges."""

from __future__ import annotations

import ctypes
import os
import resource
import sys
from typing import Final

__all__ = ["harden"]

_PR_SET_DUMPABLE: Final = 4
_PR_SET_NO_NEW_PRIVS: Final = 38


def harden() -> None:
    """Leave no core; on Linux let no process of the same account read or trace this one."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.umask(0o077)
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        for option, value in ((_PR_SET_DUMPABLE, 0), (_PR_SET_NO_NEW_PRIVS, 1)):
            if libc.prctl(option, value, 0, 0, 0) != 0:
                raise OSError(ctypes.get_errno(), "prctl failed")
