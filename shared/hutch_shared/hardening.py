"""What every process of Hutch that holds a secret does first."""

from __future__ import annotations

import ctypes
import resource
import sys
from typing import Final

__all__ = ["forbid_dumps", "prctl"]

_PR_SET_DUMPABLE: Final = 4


def forbid_dumps() -> None:
    """Leave no core file, and let no other process of this account read the memory or the environment.

    The second is Linux's (prctl(2), PR_SET_DUMPABLE); elsewhere only the first holds. OSError when it cannot be had.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))
    prctl(_PR_SET_DUMPABLE, 0)


def prctl(option: int, value: int) -> None:
    """Call prctl(2) on Linux, and nothing elsewhere. OSError when it is refused."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(option, value, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl failed")
