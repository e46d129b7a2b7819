"""Reads and writes small secret files; writes are atomic and durable. Every function blocks for milliseconds."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

from hutch_shared.failpoints import failpoint

__all__ = ["UnsafeFileError", "destroy", "read", "replace", "sync_directory", "write_new"]


class UnsafeFileError(OSError):
    """The file is not a regular file that only we can read and write."""


def read(path: Path) -> bytes | None:
    """Return the content of a regular file with mode 0600, owned by us or root; None if it does not exist."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_uid not in (0, os.geteuid()) or found.st_mode & 0o077:
            raise UnsafeFileError(f"{path} must be a regular file of yours with mode 0600")
        return file.read()


def write_new(path: Path, content: bytes) -> bool:
    """Create the file; return False if it exists, without changing it."""
    temporary = _written(path, content)
    failpoint("keys.file.written")
    try:
        os.link(temporary, path)
    except FileExistsError:
        return False
    finally:
        temporary.unlink(missing_ok=True)
    sync_directory(path.parent)
    return True


def replace(path: Path, content: bytes) -> None:
    """Replace the file's content atomically."""
    temporary = _written(path, content)
    failpoint("keys.file.written")
    try:
        temporary.rename(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def destroy(descriptor: int) -> None:
    """Overwrite an open, already deleted file with zeros. A copy-on-write file system may keep the old blocks."""
    with contextlib.suppress(OSError):
        os.pwrite(descriptor, bytes(os.fstat(descriptor).st_size), 0)
        os.fsync(descriptor)


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _written(path: Path, content: bytes) -> Path:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    return temporary
