"""Peers, processes and Unix sockets, as the kernel reports them.

It finds the account and process of a peer, identifies processes, and checks that a path is safe to listen on. Nothing
here blocks or needs an event loop.
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
"""The largest socket path in bytes: sun_path without its NUL."""

_BACKLOG: Final = 1024
_LOOKS: Final = 10
_SO_PEERPIDFD: Final = 77  # Linux 6.5; asm-generic/socket.h
_SOL_LOCAL: Final = 0  # macOS: sys/un.h
_LOCAL_PEERCRED: Final = 1
_LOCAL_PEERPID: Final = 2
_XUCRED: Final = struct.Struct("=IIh2x16I")  # macOS: cr_version, cr_uid, cr_ngroups, cr_groups


# ---------------------------------------------------------------- peers


class Credentials(NamedTuple):
    """The peer's ids when it connected or began to listen. The pid may belong to another process by now."""

    uid: int
    gid: int
    pid: int


def peer_credentials(sock: socket.socket) -> Credentials:
    """Return the credentials of the peer; `not_allowed` if the kernel does not report them."""
    try:
        if sys.platform == "darwin":
            _, uid, _, gid, *_ = _XUCRED.unpack(sock.getsockopt(_SOL_LOCAL, _LOCAL_PEERCRED, _XUCRED.size))
            pid = sock.getsockopt(_SOL_LOCAL, _LOCAL_PEERPID)
        else:
            size = struct.calcsize("iII")
            pid, uid, gid = struct.unpack("iII", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    except (OSError, struct.error) as error:
        raise HutchError(Reason.NOT_ALLOWED, "The system does not report the peer of this connection.") from error
    if pid <= 0 or uid == 2**32 - 1:
        raise HutchError(
            Reason.NOT_ALLOWED, "The peer of this connection is not visible here (another pid or user namespace)."
        )
    return Credentials(uid, gid, pid)


# ---------------------------------------------------------------- processes


class Process(NamedTuple):
    """One process. `start`, in clock ticks since boot, distinguishes it from others with the same pid."""

    pid: int
    start: int
    boot: str


@cache
def boot_id() -> str:
    """Return the id of this boot of the machine."""
    if sys.platform == "darwin":
        import subprocess

        found = subprocess.run(["/usr/sbin/sysctl", "-n", "kern.bootsessionuuid"], capture_output=True, check=True)
        return found.stdout.decode().strip()
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def start_time(pid: int) -> int | None:
    """Return the start time of process `pid`; None if it does not exist or is a zombie."""
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
    """Return `pid` and its ancestors in this pid namespace, nearest first. Empty outside Linux.

    If a parent ends during the look-up, its children get another parent, and its pid may be reused at once. So two
    consecutive look-ups must agree. Empty if the process does not exist or the look-ups never agree.
    """
    line = _line_of(pid)
    for _ in range(_LOOKS):
        before, line = line, _line_of(pid)
        if line == before:
            return line
    return []


def _line_of(pid: int) -> list[int]:
    """Return the ancestors from one look-up; empty if a parent disappears."""
    line: list[int] = []
    while pid not in line and (fields := _stat(pid)) is not None:
        line.append(pid)
        pid = int(fields[1])
        if pid == 0:
            return line
    return []


def _stat(pid: int) -> list[bytes] | None:
    """Return the fields of /proc/PID/stat from the state on; None if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return text[text.rindex(b")") + 2 :].split()  # the name in parentheses may hold any character


def process(pid: int) -> Process | None:
    """Return the process that has `pid` now, or None."""
    start = start_time(pid)
    return None if start is None else Process(pid, start, boot_id())


def same_process(pid: int, start: int, boot: str) -> bool:
    """Tell whether this process is alive: not a zombie, not a reused pid, not from another boot."""
    return boot == boot_id() and start_time(pid) == start


def peer_process(sock: socket.socket) -> Process:
    """Return the process of the peer; `not_allowed` if it has ended, since its pid may be reused.

    With a pidfd of the peer (Linux 6.5) this is certain; elsewhere a pid reused during this call goes unnoticed.
    """
    try:
        pidfd = sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD) if sys.platform == "linux" else None
    except OSError as error:
        if error.errno != errno.ENOPROTOOPT:
            raise HutchError(Reason.NOT_ALLOWED, "The process that made this connection has ended.") from error
        pidfd = None
    try:
        found = process(peer_credentials(sock).pid)
        gone = found is None or (pidfd is not None and _has_ended(pidfd))
    finally:
        if pidfd is not None:
            os.close(pidfd)
    if found is None or gone:
        raise HutchError(Reason.NOT_ALLOWED, "The process that made this connection has ended.")
    return found


def _has_ended(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


# ---------------------------------------------------------------- safe paths


def check_directory(directory: Path) -> None:
    """Raise `not_allowed` unless only root and our account can change `directory` and every directory above it.

    A sticky directory (`/tmp`) above it is safe, since others cannot replace our entries there. A symbolic link must
    belong to root or to us, and its target is checked too. FileNotFoundError if the directory does not exist.
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
            raise HutchError(Reason.NOT_ALLOWED, f"{path} is not a directory.")
        if found.st_uid not in (0, os.geteuid()):
            raise HutchError(Reason.NOT_ALLOWED, f"{path} belongs to {_name(found.st_uid)}.")
        if _others_write(found) and (path == real or not found.st_mode & stat.S_ISVTX):
            raise HutchError(Reason.NOT_ALLOWED, f"Others may write to {path}; run chmod go-w on it.")


def _others_write(found: os.stat_result) -> bool:
    if found.st_mode & stat.S_IWOTH:
        return True
    return bool(found.st_mode & stat.S_IWGRP) and found.st_gid != 0 and not _is_private_group(found.st_gid)


def _is_private_group(gid: int) -> bool:
    """Tell whether a group is private to our account: many systems make one per account and use it for directories."""
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
    """A listening socket, its file, and the lock that shows that it is live.

    A context manager. Closing removes the file, unless the socket was `passed` to us, and never removes the lock file.
    """

    def __init__(self, path: Path, sock: socket.socket, lock: int, *, passed: bool = False) -> None:
        """Own the socket and the lock."""
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
    """Listen on `path` without blocking. The socket file never has a wider mode than `mode`.

    `not_allowed` for an unsafe directory or a file in the way, `invalid_params` for a path that is too long,
    `wrong_state` when another process listens there. The lock on `<path>.lock` shows that: the socket file of a killed
    process is replaced, that of a live one never.
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
    """Listen on a socket that the service manager passed, in place of one that `listen(path, mode)` would make.

    The socket outlives us: closing leaves the file, and clients that connect then wait for the next process that gets
    it. Raises as `listen` does, and `not_allowed` if `fd` is not a listening socket at `path`.
    """
    check_directory(path.parent)
    try:
        sock = socket.socket(fileno=fd)
    except OSError:
        raise HutchError(Reason.NOT_ALLOWED, f"The descriptor {fd}, passed for {path}, is not a socket.") from None
    try:
        if (why := _mismatch(sock, path, mode)) is not None:
            raise HutchError(Reason.NOT_ALLOWED, f"The socket that was passed for {path} {why}.")
        lock = _lock(path)
    except BaseException:
        sock.close()
        raise
    sock.set_inheritable(False)
    sock.setblocking(False)
    sock.listen(_BACKLOG)  # clients now see our uid and pid, not those of the service manager
    return Listener(path, sock, lock, passed=True)


def _mismatch(sock: socket.socket, path: Path, mode: int) -> str | None:
    """Return why `sock` is not the listening socket at `path`, or None if it is."""
    if sock.family != socket.AF_UNIX or sock.type != socket.SOCK_STREAM:
        return "is not a Unix stream socket"
    if not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        return "does not listen"
    name = sock.getsockname()
    if not isinstance(name, str) or os.path.realpath(name) != os.path.realpath(path):
        return f"listens elsewhere: {name!r}"
    try:
        found = path.lstat()
    except FileNotFoundError:
        return "is unreachable: its file is gone. Restart its socket unit"
    if not stat.S_ISSOCK(found.st_mode):
        return "is unreachable: another file has its path"
    if stat.S_IMODE(found.st_mode) & ~mode:
        return f"has the mode {stat.S_IMODE(found.st_mode):04o}; the limit is {mode:04o}"
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
    """Remove a stale socket file; the caller holds the lock. `not_allowed` for any other file in the way."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise HutchError(Reason.NOT_ALLOWED, f"{path} is in the way and is not a socket. Remove it.")
    path.unlink()


def connect(path: Path, timeout: float | None = None) -> socket.socket:
    """Return a blocking socket connected to `path`; its timeout stays at `timeout` seconds.

    FileNotFoundError or ConnectionRefusedError when nothing listens there, PermissionError when the file's mode forbids
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
