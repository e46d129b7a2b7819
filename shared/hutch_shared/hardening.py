"""Process hardening, the first act of every process of Hutch that holds a secret.

It imports little, because other processes can read the memory of this one until it has run.
"""

from __future__ import annotations

import ctypes
import resource
import sys

__all__ = ["adopt_orphans", "end_with_parent", "forbid_dumps", "forbid_new_privileges"]

_SIGTERM = 15
_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NO_NEW_PRIVS = 38


def forbid_dumps() -> None:
    """Write no core file, and keep other processes of this account from reading our memory and environment.

    Child processes cannot write core files either. Only Linux protects memory and environment (prctl(2),
    PR_SET_DUMPABLE). OSError when the system refuses.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _prctl(_PR_SET_DUMPABLE, 0)


def adopt_orphans() -> None:
    """Become the parent of descendants whose parents ended. Linux only; OSError when the system refuses."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_with_parent() -> None:
    """Let the kernel send this process SIGTERM when its parent ends. Linux only; OSError when the system refuses.

    A parent that ended before the call is not noticed: compare getppid(2) afterwards.
    """
    _prctl(_PR_SET_PDEATHSIG, _SIGTERM)


def forbid_new_privileges() -> None:
    """Keep this process and its children from gaining privileges by a set-uid program. No effect outside Linux."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(option, value, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl failed")
