"""The hutchd of a state directory, found by its locks, however it is reached: running, stopped by a signal, starting.

A running hutchd holds the lock of its database and has written its pid there. Before that, from the moment in which
somebody decides to start it until it serves, the lock of `hutchd.starting` is held: first by the starter, then by the
new process, which inherits it. The kernel releases both locks when their process ends, so what is found is true.

Theory. Only a lock says that a process is alive and is this one; a pid in a file says neither. To look at a lock one
must try it: a look takes it, shared, for some microseconds. So a process that takes a lock tries again for a moment.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, Literal, NamedTuple

from hutch_shared.processes import is_stopped, start_time

__all__ = [
    "DATABASE_LOCK",
    "INHERITED",
    "RESTORES",
    "HutchdProcess",
    "StartLock",
    "find_hutchd",
    "inherited_start",
    "starting",
    "try_lock",
]

DATABASE_LOCK: Final = "hutch.db.lock"
"""The lock file of the database, in the state directory."""
RESTORES: Final = "restores"
"""Behind the pid in this file: the process does not serve, it replaces the database by a backup."""
INHERITED: Final = "HUTCH_START_LOCK"
"""The variable with the descriptor of the start's lock, for a new hutchd."""

_START_LOCK: Final = "hutchd.starting"
_TRIES: Final = 20
_BETWEEN: Final = 0.005
"""A lock is tried this often, with this pause in seconds: others may be looking at it."""


class HutchdProcess(NamedTuple):
    """A hutchd that lives. `stopped`: a signal such as SIGSTOP stopped it. `running`: it may be ending, too.

    `restoring`: it replaces the database by a backup, and will end by itself.
    """

    pid: int
    """0 if it is not known: the starter has not started it yet, or it is in a pid namespace that is not visible."""
    state: Literal["running", "starting", "stopped", "restoring"]
    holds_database: bool

    def remedy(self) -> str:
        """Return what helps somebody who cannot reach it."""
        match self.state:
            case "stopped":
                return f"Let it go on: `kill -CONT {self.pid}`."
            case "starting":
                return "Try again in a moment."
            case "restoring":
                return "Try again when it has ended."
            case "running" if not self.pid:
                return "It may run in another container: reach it or end it from there."
            case "running":
                return "Try again in some seconds, or end it: `hutch daemon stop`."

    def sentence(self) -> str:
        """Return what it does, and what helps, for somebody who cannot reach it."""
        who = f"hutchd (pid {self.pid})" if self.pid else "hutchd"
        match self.state:
            case "stopped":
                does = "is stopped, as by SIGSTOP or Ctrl-Z"
            case "starting":
                does = "is starting"
            case "restoring":
                does = "replaces the database by a backup"
            case "running":
                does = "runs and cannot be reached: it is ending, or its socket was removed and is not bound again yet"
        return f"{who} {does}. {self.remedy()}"


def find_hutchd(state: Path) -> HutchdProcess | None:
    """Return the hutchd of a state directory; None if there is none, or if the caller may not read its locks."""
    starter, user = _holder(state / _START_LOCK), _holder(state / DATABASE_LOCK)
    holder = user or starter
    if holder is None:
        return None
    pid, word = holder
    stage: Literal["running", "starting", "stopped", "restoring"] = "running" if starter is None else "starting"
    if word == RESTORES:
        stage = "restoring"
    return HutchdProcess(pid, "stopped" if pid and is_stopped(pid) else stage, holds_database=user is not None)


def _holder(path: Path) -> tuple[int, str] | None:
    """Return the pid of the process that holds a lock, 0 if it wrote none yet, and the word behind it, or ""; None if
    nobody holds it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        written, _, word = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip().partition(" ")
        pid = int(written) if written.isdigit() else 0
        return pid if start_time(pid) is not None else 0, word
    except OSError:
        return None
    else:
        return None
    finally:
        os.close(descriptor)


def try_lock(descriptor: int) -> bool:
    """Take the lock of an open file; False if another process has it. Blocks for a moment at most."""
    for _ in range(_TRIES):
        with suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        time.sleep(_BETWEEN)
    return False


class StartLock:
    """The lock of a start in flight, held by the starter or by the new hutchd."""

    def __init__(self, descriptor: int) -> None:
        """Own the descriptor of the locked file."""
        self.descriptor = descriptor

    def write(self, pid: int) -> None:
        """Record the pid of the new hutchd. If the disk is full the lock says less, and the start goes on."""
        with suppress(OSError):
            os.pwrite(self.descriptor, f"{pid}\n".encode(), 0)
            os.ftruncate(self.descriptor, len(f"{pid}\n"))

    def release(self) -> None:
        """Report that the start is over, if no other process shares the lock. Again: does nothing."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


@contextmanager
def starting(state: Path) -> Iterator[StartLock | None]:
    """Hold the lock of a start while the block runs; yield None if another start is in flight.

    A child that inherits the descriptor holds the lock on. OSError if the file cannot be made.
    """
    descriptor = os.open(state / _START_LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    lock = StartLock(descriptor)
    try:
        if try_lock(descriptor):
            with suppress(OSError):
                os.ftruncate(descriptor, 0)
            yield lock
        else:
            yield None
    finally:
        lock.release()


def inherited_start(state: Path) -> StartLock | None:
    """Return the lock of our own start: from the starter, or taken here. None if that is impossible.

    Its variable is removed from the environment, and no child inherits the descriptor.
    """
    given = os.environ.pop(INHERITED, "")
    if given.isdecimal():
        try:
            os.set_inheritable(int(given), False)
        except OSError:
            return None
        return StartLock(int(given))
    try:
        descriptor = os.open(state / _START_LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError:
        return None
    if not try_lock(descriptor):
        os.close(descriptor)
        return None
    lock = StartLock(descriptor)
    lock.write(os.getpid())
    return lock
