"""Sweeps a dedicated account: ends its processes, removes its files and IPC objects from world-writable places.

A child becomes the account and cleans up, so the kernel lets it remove only the account's own files.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hutch_launcher.child import LIBC, become, reset_signals
from hutch_launcher.groups import Groups, KillRound, kill, processes
from hutch_launcher.packets import DONE, FAILED, NOT_YET, LaunchReply, LaunchRequest
from hutch_launcher.rules import LaunchAccount

__all__ = ["Sweeper", "Sweeps"]

_PLACES: Final = ("/tmp", "/var/tmp", "/dev/shm", "/dev/mqueue")  # noqa: S108
_DEADLINE: Final = 5.0
_RESULT_KEPT: Final = 1.0  # seconds


@dataclass
class Sweeper:
    """A child that cleans up. It is killed at `deadline`; after its exit, its `code` is kept until `deadline`."""

    pid: int
    pidfd: int
    deadline: float
    code: int | None = None


class Sweeps:
    """The sweepers, by uid of the account. Nothing here waits."""

    def __init__(self) -> None:
        """Start without sweepers."""
        self._by_uid: dict[int, Sweeper] = {}

    def __bool__(self) -> bool:
        """Return whether a sweeper runs, or has a result that `sweep` has not returned."""
        return bool(self._by_uid)

    def running(self) -> dict[int, int]:
        """Return the pidfds of sweepers that run, by uid."""
        return {uid: sweeper.pidfd for uid, sweeper in self._by_uid.items() if sweeper.code is None}

    def sweep(self, account: LaunchAccount, request: LaunchRequest) -> LaunchReply:
        """Do one round: start a sweeper, or report on the present one. Kill every other process of the account."""
        sweeper = self.check(request.uid)
        left = [one.pid for one in processes() if request.uid in one.uids and (not sweeper or one.pid != sweeper.pid)]
        for pid in left:
            kill(pid)
        not_yet = LaunchReply(NOT_YET, "Cleaning up goes on.", killed=KillRound(len(left)))
        if sweeper is not None:
            if sweeper.code is None:
                return not_yet
            del self._by_uid[request.uid]
            if sweeper.code >= 0 and not left:  # a negative code is the signal that killed it: sweep again
                failed = LaunchReply(FAILED, f"Not all that {account.name} has could be removed.")
                return failed if sweeper.code else LaunchReply(DONE)
        pid = os.fork()
        if pid == 0:
            try:
                reset_signals()
                os._exit(_sweep_as(account, request))
            finally:
                os._exit(2)
        self._by_uid[request.uid] = Sweeper(pid, os.pidfd_open(pid), time.monotonic() + _DEADLINE)
        return not_yet

    def check(self, uid: int) -> Sweeper | None:
        """Reap the account's sweeper if it has exited, kill it after its deadline, forget its result if that is old."""
        sweeper, now = self._by_uid.get(uid), time.monotonic()
        if sweeper is None:
            return None
        if sweeper.code is None:
            exited, status = os.waitpid(sweeper.pid, os.WNOHANG)
            if exited:
                os.close(sweeper.pidfd)
                sweeper.code, sweeper.deadline = os.waitstatus_to_exitcode(status), now + _RESULT_KEPT
            elif now > sweeper.deadline:
                kill(sweeper.pid)
        elif now > sweeper.deadline:
            del self._by_uid[uid]
            return None
        return sweeper

    def check_all(self) -> None:
        """Check every sweeper."""
        for uid in list(self._by_uid):
            self.check(uid)

    def forget(self, uid: int) -> None:
        """Drop the result of a sweep: an executor is about to start, so the account will not stay clean."""
        self._by_uid.pop(uid, None)


# ---------------------------------------------------------------- in the child


def _sweep_as(account: LaunchAccount, request: LaunchRequest) -> int:
    """Become the account and clean up; return 1 if a file could not be removed."""
    os.closerange(3, 1 << 20)
    become(account, request, Groups())
    with suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)
    owned = [entry.path for place in _PLACES if os.path.isdir(place) for entry in os.scandir(place) if _is_own(entry)]
    for path in owned:
        _remove(path)
    for kind in ("shm", "sem", "msg"):
        with suppress(OSError):
            names, *rows = (line.split() for line in Path(f"/proc/sysvipc/{kind}").read_text().splitlines())
            for row in rows:
                if str(account.uid) in (row[names.index("uid")], row[names.index("cuid")]):
                    _remove_ipc(kind, int(row[1]))
    return int(any(os.path.lexists(path) for path in owned))


def _is_own(entry: os.DirEntry[str]) -> bool:
    with suppress(OSError):
        return entry.stat(follow_symlinks=False).st_uid == os.getuid()
    return False


def _remove_ipc(kind: str, number: int) -> None:
    if kind == "sem":
        LIBC.semctl(number, 0, 0)  # IPC_RMID
    else:
        getattr(LIBC, f"{kind}ctl")(number, 0, None)


def _remove(path: str) -> None:
    """Remove a file or a tree. Subdirectories move to the top first, so a deep tree needs no long path or recursion."""
    if _unlink(path):
        return
    stuck: set[str] = set()
    with suppress(OSError), _opened(path) as top:
        while names := set(os.listdir(top)) - stuck:
            for name in names:
                try:
                    if not _unlink(name, top):
                        _empty_into(top, name)
                        os.rmdir(name, dir_fd=top)
                except OSError:
                    stuck.add(name)
    with suppress(OSError):
        os.rmdir(path)


def _empty_into(top: int, name: str) -> None:
    """Remove the files in a directory of `top`, and move its subdirectories to `top`."""
    with _opened(name, top) as inner:
        if os.fstat(inner).st_dev != os.fstat(top).st_dev:  # a mount
            return
        for below in os.listdir(inner):
            if not _unlink(below, inner):
                with suppress(OSError), _opened(below, inner):
                    os.rename(below, f"hutch-{os.urandom(16).hex()}", src_dir_fd=inner, dst_dir_fd=top)


def _unlink(name: str, directory: int | None = None) -> bool:
    with suppress(OSError):
        os.unlink(name, dir_fd=directory)
        return True
    return False


@contextmanager
def _opened(name: str, directory: int | None = None) -> Iterator[int]:
    """Open a directory that is not a link, after restoring its owner's permissions."""
    handle = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=directory)
    try:
        with suppress(OSError):
            os.chmod(f"/proc/self/fd/{handle}", 0o700)
        fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY, dir_fd=handle)
    finally:
        os.close(handle)
    try:
        yield fd
    finally:
        os.close(fd)
