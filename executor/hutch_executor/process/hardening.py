"""Hardens the executor, its first act: other processes of the account can then read less of it.

It imports little: until `harden` has returned, other processes of the account may look inside (see the README).
"""

from __future__ import annotations

import os
import stat
import struct
import sys
from contextlib import suppress

from hutch_shared.hardening import adopt_orphans, forbid_dumps

__all__ = ["READY", "announce", "harden", "replace_stdin"]

READY = b"\n"
"""The byte that an executor sends when other processes of the account can no longer look inside."""
_OOM_SCORE = b"500"


def harden() -> None:
    """Forbid core dumps and inspection by the same account, start a process session, adopt orphaned descendants.

    Skips steps that the platform lacks. The umask stays as it is: the executor gives its own files explicit modes.
    """
    _raise_oom_score()
    forbid_dumps()
    with suppress(PermissionError):  # already a session leader
        os.setsid()
    adopt_orphans()


def announce(fd: int) -> bool:
    """If `fd` is a socket, send one byte to say that this process is hardened. Return False if the other side is gone.

    On Linux this process's pid goes with the byte: the kernel checks it, and translates it for a receiver in another
    pid namespace. The environment may then check the hardening (/proc/PID now belongs to root) and send the boot line.
    On a pipe nothing is sent: the other side cannot read from it, and sends the boot line at once.
    """
    try:
        if not stat.S_ISSOCK(os.fstat(fd).st_mode):
            return True
        import socket

        with socket.socket(fileno=os.dup(fd)) as sock:
            if sys.platform != "linux":
                return sock.send(READY) == len(READY)
            sender = struct.pack("iII", os.getpid(), os.getuid(), os.getgid())
            return sock.sendmsg([READY], [(socket.SOL_SOCKET, socket.SCM_CREDENTIALS, sender)]) == len(READY)
    except OSError:
        return False


def replace_stdin() -> None:
    """Make /dev/null the standard input, so that no child reads from hutchd's socket."""
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)


def _raise_oom_score() -> None:
    """Let the kernel kill a session before hutchd when memory runs out. Must come before `forbid_dumps`."""
    with suppress(OSError):
        fd = os.open("/proc/self/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(fd, _OOM_SCORE)
        finally:
            os.close(fd)
