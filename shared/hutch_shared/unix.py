"""Unix sockets: checks that a path is safe to listen on, listens and connects. Nothing here needs an event loop."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import pwd
import socket
import stat
import sys
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from hutch_shared.errors import HutchError, Reason

__all__ = [
    "PATH_LIMIT",
    "Listener",
    "check_directory",
    "connect",
    "listen",
    "take_over",
]

PATH_LIMIT: Final = 107 if sys.platform == "linux" else 103
"""The largest socket path in bytes: sun_path without its NUL."""

_BACKLOG: Final = 1024


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
            f"The socket path {path} has {length} bytes; this system allows {PATH_LIMIT}. Choose a shorter directory.",
        )


# ---------------------------------------------------------------- listening and connecting


class Listener:
    """A listening socket, its file, and the lock that shows that it is live.

    A context manager. Closing removes the file if this process made it and it is still the same file, unless the socket
    was `passed` to us. The lock file is never removed.
    """

    def __init__(self, path: Path, sock: socket.socket, lock: int | None, mode: int, *, passed: bool = False) -> None:
        """Own the socket and the lock; None if the caller has another lock for this path."""
        self.path = path
        self.socket = sock
        self.passed = passed
        """The service manager made the file."""
        self._mode = mode
        self._lock = lock
        self._file = _file_id(path)
        self._open = True

    def fault(self) -> str | None:
        """Return why nobody can connect, as the end of a sentence about the file; None if the file is in its place."""
        found = _file_id(self.path)
        if found is None:
            return "is gone"
        if found != self._file:
            return "was replaced by another file"
        if self._lock is not None and _file_id(_lock_path(self.path)) != _id_of(os.fstat(self._lock)):
            return "has lost its lock file"
        return None

    def rebind(self) -> socket.socket:
        """Make the socket and its lock again, in the existing directory; return the former socket.

        The caller accepts what waits on the former socket and closes it. A socket file of another process is removed if
        that process does not hold the lock. Raises as `listen` does, and OSError; then nothing has changed.
        """
        check_directory(self.path.parent)
        lock = self._lock
        if lock is not None and _file_id(_lock_path(self.path)) != _id_of(os.fstat(lock)):
            lock = _take_lock(self.path)
        try:
            sock = _bind(self.path, self._mode)
        except BaseException:
            if lock is not None and lock != self._lock:
                os.close(lock)
            raise
        former, self.socket = self.socket, sock
        former_lock, self._lock = self._lock, lock
        if former_lock is not None and former_lock != lock:
            os.close(former_lock)
        self._file = _file_id(self.path)
        self.passed = False
        return former

    def close(self) -> None:
        """Stop listening. Closing again does nothing."""
        if not self._open:
            return
        self._open = False
        if not self.passed and self._file is not None and _file_id(self.path) == self._file:
            with contextlib.suppress(FileNotFoundError):
                self.path.unlink()
        self.socket.close()
        if self._lock is not None:
            os.close(self._lock)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Listener {self.path}{'' if self._open else ' closed'}>"


def listen(path: Path, mode: int = 0o600, *, lock: bool = True) -> Listener:
    """Listen on `path` without blocking. The socket file never has a wider mode than `mode`.

    `not_allowed` for an unsafe directory or a file in the way, `invalid_params` for a path that is too long,
    `wrong_state` when another process listens there. The lock on `<path>.lock` shows that: the socket file of a killed
    process is replaced, that of a live one never. Without `lock` the caller must hold another lock for this path.
    """
    _check_length(path)
    check_directory(path.parent)
    held = _take_lock(path) if lock else None
    try:
        sock = _bind(path, mode)
    except BaseException:
        if held is not None:
            os.close(held)
        raise
    return Listener(path, sock, held, mode)


def _bind(path: Path, mode: int) -> socket.socket:
    """Return a socket that listens on `path`, in place of a stale socket file. The caller holds the lock."""
    _clear(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        before = os.umask(0o177)
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
    return sock


def _file_id(path: Path) -> tuple[int, int] | None:
    """Return what identifies the file at `path` while somebody has it open; None if there is none or it is hidden."""
    try:
        return _id_of(path.lstat())
    except OSError:
        return None


def _id_of(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


def take_over(path: Path, fd: int, mode: int = 0o600) -> Listener:
    """Listen on a socket that the service manager passed, in place of one that `listen(path, mode)` would make.

    The socket outlives us: closing leaves the file, and clients that connect then wait for the next process that gets
    it. If its file is gone, nobody can connect to it any more, and `listen(path, mode)` takes its place. Raises as
    `listen` does, and `not_allowed` if `fd` is not a listening socket at `path`.
    """
    check_directory(path.parent)
    try:
        sock = socket.socket(fileno=fd)
    except OSError:
        raise HutchError(Reason.NOT_ALLOWED, f"The descriptor {fd}, passed for {path}, is not a socket.") from None
    try:
        if (why := _mismatch(sock, path, mode)) is not None:
            raise HutchError(Reason.NOT_ALLOWED, f"The socket that was passed for {path} {why}.")
        if not os.path.lexists(path):
            sock.close()
            return listen(path, mode)
        lock = _take_lock(path)
    except BaseException:
        sock.close()
        raise
    sock.set_inheritable(False)
    sock.setblocking(False)
    sock.listen(_BACKLOG)  # clients now see our uid and pid, not those of the service manager
    return Listener(path, sock, lock, mode, passed=True)


def _mismatch(sock: socket.socket, path: Path, mode: int) -> str | None:
    """Return why `sock` is not the listening socket at `path`, or None if it is or if its file is gone."""
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
        return None
    if not stat.S_ISSOCK(found.st_mode):
        return "is unreachable: another file has its path"
    if stat.S_IMODE(found.st_mode) & ~mode:
        return f"has the mode {stat.S_IMODE(found.st_mode):04o}; the limit is {mode:04o}"
    return None


def _lock_path(path: Path) -> Path:
    return path.with_name(path.name + ".lock")


def _take_lock(path: Path) -> int:
    name = _lock_path(path)
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
