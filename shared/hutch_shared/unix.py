"""Facts that only the kernel tells, and sockets that only their owner could have put there.

Who the other side of a socket is, which process a pid means, whether a path is safe to listen on. Nothing here waits
and nothing needs an event loop.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import pwd
import select
import socket
import stat
import struct
import sys
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Final, NamedTuple, Self

from hutch_shared.errors import HutchError, Reason

__all__ = [
    "PATH_LIMIT",
    "Credentials",
    "Listener",
    "Process",
    "ancestors",
    "boot_id",
    "check_directory",
    "connect",
    "listen",
    "peer_credentials",
    "peer_process",
    "process",
    "same_process",
    "start_time",
    "take_over",
]

PATH_LIMIT: Final = 107 if sys.platform == "linux" else 103
"""Bytes of a socket path: sun_path without its closing NUL."""

_BACKLOG: Final = 1024
_LOOKS: Final = 10
_SO_PEERPIDFD: Final = 77  # Linux 6.5; asm-generic/socket.h
_SOL_LOCAL: Final = 0  # macOS: sys/un.h
_LOCAL_PEERCRED: Final = 1
_LOCAL_PEERPID: Final = 2
_XUCRED: Final = struct.Struct("=IIh2x16I")  # macOS: cr_version, cr_uid, cr_ngroups, cr_groups


# ---------------------------------------------------------------- who is there


class Credentials(NamedTuple):
    """Who connected or listens, as the kernel saw it then. The pid may be another process's by now."""

    uid: int
    gid: int
    pid: int


def peer_credentials(sock: socket.socket) -> Credentials:
    """Return who is at the other end. A failed look-up is a refusal: raises `not_allowed`."""
    try:
        if sys.platform == "darwin":
            _, uid, _, gid, *_ = _XUCRED.unpack(sock.getsockopt(_SOL_LOCAL, _LOCAL_PEERCRED, _XUCRED.size))
            pid = sock.getsockopt(_SOL_LOCAL, _LOCAL_PEERPID)
        else:
            size = struct.calcsize("iII")
            pid, uid, gid = struct.unpack("iII", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    except (OSError, struct.error) as error:
        raise HutchError(Reason.NOT_ALLOWED, "The system does not tell who is at the other end.") from error
    if pid <= 0 or uid == 2**32 - 1:
        raise HutchError(Reason.NOT_ALLOWED, "The process at the other end cannot be seen from here.")
    return Credentials(uid, gid, pid)


# ---------------------------------------------------------------- which process


class Process(NamedTuple):
    """One process, told from any other that has or had its pid. `start` is in clock ticks since boot."""

    pid: int
    start: int
    boot: str


@cache
def boot_id() -> str:
    """Return what tells this boot of the machine from any other."""
    if sys.platform == "darwin":
        import subprocess

        found = subprocess.run(["/usr/sbin/sysctl", "-n", "kern.bootsessionuuid"], capture_output=True, check=True)
        return found.stdout.decode().strip()
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def start_time(pid: int) -> int | None:
    """Return when process `pid` started; None when there is none, or only its zombie."""
    if sys.platform == "darwin":
        import subprocess
        from datetime import datetime

        found = subprocess.run(["/bin/ps", "-o", "stat=,lstart=", "-p", str(pid)], capture_output=True, text=True)
        state, _, started = found.stdout.strip().partition(" ")
        if found.returncode or not state or state.startswith("Z"):
            return None
        return int(datetime.strptime(started.strip(), "%a %b %d %H:%M:%S %Y").timestamp())  # noqa: DTZ007
    fields = _stat(pid)
    return None if fields is None or fields[0] in (b"Z", b"X") else int(fields[19])


def ancestors(pid: int) -> list[int]:
    """Return `pid` and its line of parents up to one that has none here, nearest first. Linux; elsewhere it is empty.

    A parent that ends while one looks hands its children on, and its pid may be another's at once: a line counts when
    two looks in a row find the same. The empty list where there is no such process, or its line does not hold still.
    """
    line = _line_of(pid)
    for _ in range(_LOOKS):
        before, line = line, _line_of(pid)
        if line == before:
            return line
    return []


def _line_of(pid: int) -> list[int]:
    """Look once; a line that breaks off is none."""
    line: list[int] = []
    while pid not in line and (fields := _stat(pid)) is not None:
        line.append(pid)
        pid = int(fields[1])
        if pid == 0:
            return line
    return []


def _stat(pid: int) -> list[bytes] | None:
    """Return the fields from the state on; None when there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return text[text.rindex(b")") + 2 :].split()  # the name before it may hold anything


def process(pid: int) -> Process | None:
    """Return the process that has `pid` now; None when there is none."""
    start = start_time(pid)
    return None if start is None else Process(pid, start, boot_id())


def same_process(pid: int, start: int, boot: str) -> bool:
    """Tell whether that very process lives. A reused pid, a zombie or another boot is not it."""
    return boot == boot_id() and start_time(pid) == start


def peer_process(sock: socket.socket) -> Process:
    """Return the process at the other end. Raises `not_allowed` when it has gone, so that its pid may be another's.

    Where the kernel gives a pidfd of the peer (Linux 6.5) it is sure; elsewhere a pid reused within this call is not
    noticed.
    """
    try:
        pidfd = sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD) if sys.platform == "linux" else None
    except OSError as error:
        if error.errno != errno.ENOPROTOOPT:
            raise HutchError(Reason.NOT_ALLOWED, "The process at the other end has gone.") from error
        pidfd = None
    try:
        found = process(peer_credentials(sock).pid)
        gone = found is None or (pidfd is not None and _has_ended(pidfd))
    finally:
        if pidfd is not None:
            os.close(pidfd)
    if found is None or gone:
        raise HutchError(Reason.NOT_ALLOWED, "The process at the other end has gone.")
    return found


def _has_ended(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


# ---------------------------------------------------------------- safe paths


def check_directory(directory: Path) -> None:
    """Raise `not_allowed` unless `directory` and all above it are such that only root and we can change them.

    Above it a sticky directory (`/tmp`) will do, since what is ours there stays ours; a symbolic link must be root's
    or ours, and where it leads is checked as well. FileNotFoundError when it is not there.
    """
    directory = Path(os.path.abspath(directory))  # resolve() would follow the links to be checked
    real = directory.resolve(strict=True)
    for path in (directory, *directory.parents):
        found = path.lstat()
        if stat.S_ISLNK(found.st_mode) and found.st_uid not in (0, os.geteuid()):
            raise HutchError(Reason.NOT_ALLOWED, f"{path} is a link that belongs to {_name(found.st_uid)}.")
    for path in (real, *real.parents):
        found = path.lstat()
        if not stat.S_ISDIR(found.st_mode):
            raise HutchError(Reason.NOT_ALLOWED, f"{path} is no directory.")
        if found.st_uid not in (0, os.geteuid()):
            raise HutchError(Reason.NOT_ALLOWED, f"{path} belongs to {_name(found.st_uid)}.")
        if _others_write(found) and (path == real or not found.st_mode & stat.S_ISVTX):
            raise HutchError(Reason.NOT_ALLOWED, f"Others may write to {path}; take that away with chmod go-w.")


def _others_write(found: os.stat_result) -> bool:
    if found.st_mode & stat.S_IWOTH:
        return True
    return bool(found.st_mode & stat.S_IWGRP) and found.st_gid != 0 and not _is_private_group(found.st_gid)


def _is_private_group(gid: int) -> bool:
    """Tell whether a group is our account's own: many systems give each account one, and directories to its group."""
    import grp

    try:
        account = pwd.getpwuid(os.geteuid())
        group = grp.getgrgid(gid)
    except KeyError:
        return False
    return account.pw_gid == gid and group.gr_name == account.pw_name and set(group.gr_mem) <= {account.pw_name}


def _name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"


def _check_length(path: Path) -> None:
    length = len(os.fsencode(path))
    if length > PATH_LIMIT:
        raise HutchError(
            Reason.INVALID_PARAMS,
            f"The socket path {path} has {length} bytes; this system takes {PATH_LIMIT}. Choose a shorter directory.",
        )


# ---------------------------------------------------------------- listening and connecting


class Listener:
    """A listening socket, the file that stands for it, and the lock that says that it lives.

    Usable as a context manager; closing removes the file (but not that of a socket that was `passed`), never the lock.
    """

    def __init__(self, path: Path, sock: socket.socket, lock: int, *, passed: bool = False) -> None:
        """Own both."""
        self.path = path
        self.socket = sock
        self._lock = lock
        self._passed = passed

    def close(self) -> None:
        """Stop listening. Closing again does nothing."""
        if self._lock < 0:
            return
        if not self._passed:
            with contextlib.suppress(FileNotFoundError):
                self.path.unlink()
        self.socket.close()
        os.close(self._lock)
        self._lock = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Listener {self.path}{' closed' if self._lock < 0 else ''}>"


def listen(path: Path, mode: int = 0o600) -> Listener:
    """Listen on `path`; the socket is non-blocking and never had a wider mode than `mode`.

    Raises `not_allowed` for an unsafe directory or a file in the way, `invalid_params` for a path that is too long,
    `wrong_state` when another process listens there: the lock on `<path>.lock` tells that, so that a socket file that
    a killed process left is taken over and a live one never.
    """
    _check_length(path)
    check_directory(path.parent)
    lock = _lock(path)
    try:
        _clear(path)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            before = os.umask(0o077)
            try:
                sock.bind(os.fspath(path))
            finally:
                os.umask(before)
            path.chmod(mode)
            sock.listen(_BACKLOG)
            sock.setblocking(False)
        except BaseException:
            sock.close()
            raise
    except BaseException:
        os.close(lock)
        raise
    return Listener(path, sock, lock)


def take_over(path: Path, fd: int, mode: int = 0o600) -> Listener:
    """Listen on a socket that was passed to this process in place of one that `listen(path, mode)` would make.

    It goes on without us: closing leaves the file where it is, and who dials then waits for the next one that is passed
    it. Raises as `listen` does, and `not_allowed` where it is no such socket, or not the one at `path`.
    """
    check_directory(path.parent)
    try:
        sock = socket.socket(fileno=fd)
    except OSError:
        raise HutchError(Reason.NOT_ALLOWED, f"What was passed for {path} (descriptor {fd}) is no socket.") from None
    try:
        if (why := _mismatch(sock, path, mode)) is not None:
            raise HutchError(Reason.NOT_ALLOWED, f"The socket that was passed for {path} {why}.")
        lock = _lock(path)
    except BaseException:
        sock.close()
        raise
    sock.set_inheritable(False)
    sock.setblocking(False)
    sock.listen(_BACKLOG)  # from now on who dials sees our uid and pid, not those of who passed it
    return Listener(path, sock, lock, passed=True)


def _mismatch(sock: socket.socket, path: Path, mode: int) -> str | None:
    """Return what keeps a socket from being the listening one at `path`."""
    if sock.family != socket.AF_UNIX or sock.type != socket.SOCK_STREAM:
        return "is no Unix stream socket"
    if not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        return "does not listen"
    name = sock.getsockname()
    if not isinstance(name, str) or os.path.realpath(name) != os.path.realpath(path):
        return f"listens elsewhere: {name!r}"
    try:
        found = path.lstat()
    except FileNotFoundError:
        return "cannot be reached any more: its file is gone. Start its socket unit again"
    if not stat.S_ISSOCK(found.st_mode):
        return "cannot be reached: another file lies there"
    if stat.S_IMODE(found.st_mode) & ~mode:
        return f"has the mode {stat.S_IMODE(found.st_mode):04o}; it may have {mode:04o}"
    return None


def _lock(path: Path) -> int:
    name = path.with_name(path.name + ".lock")
    try:
        lock = os.open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise HutchError(Reason.NOT_ALLOWED, f"{name} is a symbolic link; remove it.") from None
        raise
    try:
        if os.fstat(lock).st_uid not in (0, os.geteuid()):
            raise HutchError(Reason.NOT_ALLOWED, f"{name} belongs to {_name(os.fstat(lock).st_uid)}.")
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise HutchError(Reason.WRONG_STATE, f"Another process listens on {path}.") from None
    except BaseException:
        os.close(lock)
        raise
    return lock


def _clear(path: Path) -> None:
    """Remove a socket that nobody holds the lock of; anything else in the way is left alone."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise HutchError(Reason.NOT_ALLOWED, f"{path} is in the way: it is no socket. Remove it.")
    path.unlink()


def connect(path: Path, timeout: float | None = None) -> socket.socket:
    """Return a blocking socket that is connected to `path`; `timeout` seconds stay set on it.

    Raises FileNotFoundError or ConnectionRefusedError when nobody listens, PermissionError when the file's mode forbids
    it, `invalid_params` for a path that is too long.
    """
    _check_length(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(timeout)
        sock.connect(os.fspath(path))
    except BaseException:
        sock.close()
        raise
    return sock
