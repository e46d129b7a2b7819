"""What an executor does to itself before it does anything else, so that less can be read or stolen from it.

It imports little: until `harden` returned another process of the account may look inside (see the README).
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress

from hutch_shared.hardening import adopt_orphans, forbid_dumps

__all__ = ["READY", "announce", "harden", "replace_stdin"]

READY = b"\n"
"""What an executor says when nobody can look inside any more."""
_FIRST_TO_GO = b"500"


def harden() -> None:
    """Leave no core, let no process of the same account look inside, lead a session, adopt orphaned descendants.

    What a platform does not have is left out. Files that the executor makes get their mode explicitly; the umask stays
    as it is.
    """
    _be_first_to_go()
    forbid_dumps()
    with suppress(PermissionError):  # it leads one already
        os.setsid()
    adopt_orphans()


def announce(fd: int) -> bool:
    """Say on `fd` that this process is hardened, if that is a socket: one byte, once. False: nobody is there any more.

    Whoever started it may look (/proc/PID belongs to root by now) and then hand over the boot line. A pipe leads only
    one way, and there the line comes unasked.
    """
    if not stat.S_ISSOCK(os.fstat(fd).st_mode):
        return True
    try:
        return os.write(fd, READY) == len(READY)
    except OSError:
        return False


def replace_stdin() -> None:
    """Put /dev/null in the place of standard input, so that no child reads what is left of it."""
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)


def _be_first_to_go() -> None:
    """When memory runs out a session goes, not hutchd. Not allowed once not dumpable."""
    with suppress(OSError):
        fd = os.open("/proc/self/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(fd, _FIRST_TO_GO)
        finally:
            os.close(fd)
