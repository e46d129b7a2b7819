"""What every process of Hutch that holds a secret does first. It imports little: what comes before it can be read."""

from __future__ import annotations

import ctypes
import resource
import sys

__all__ = ["adopt_orphans", "forbid_dumps", "forbid_new_privileges"]

_PR_SET_DUMPABLE = 4
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NO_NEW_PRIVS = 38


def forbid_dumps() -> None:
    """Leave no core file, and let no other process of this account read the memory or the environment.

    What this process starts leaves no core file either, and cannot change that. The second is Linux's (prctl(2),
    PR_SET_DUMPABLE); elsewhere only the first holds. OSError when it cannot be had.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _prctl(_PR_SET_DUMPABLE, 0)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parents ended. Linux only, like the next; OSError as above."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def forbid_new_privileges() -> None:
    """Let neither this process nor what it starts gain rights by executing a set-uid program."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(option, value, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl failed")
