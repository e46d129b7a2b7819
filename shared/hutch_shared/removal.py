"""Removes a directory with everything in it: of any depth, whatever modes it has, and without following a link."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

__all__ = ["remove_anything", "remove_tree"]


def remove_tree(path: str) -> None:
    """Remove the directory `path`, if it exists. OSError if something in it cannot be removed. Blocks.

    Subdirectories move to the top first, so that a deep tree needs no long path and no recursion.
    """
    try:
        with _opened(path) as top:
            while names := os.listdir(top):
                for name in names:
                    if not _unlink(name, top):
                        _empty_into(top, name)
                        os.rmdir(name, dir_fd=top)
        os.rmdir(path)
    except FileNotFoundError:
        return


def remove_anything(path: str) -> None:
    """Remove what is at `path`, if anything: a file, a link itself, or a directory. OSError if it stays. Blocks."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return
    except (IsADirectoryError, PermissionError):  # EPERM: a directory on other systems
        remove_tree(path)


def _empty_into(top: int, name: str) -> None:
    """Remove the files in a directory of `top`, and move its subdirectories to `top`."""
    with _opened(name, top) as inner:
        if os.fstat(inner).st_dev != os.fstat(top).st_dev:
            raise OSError(errno.EBUSY, "another file system is mounted in it")
        for below in os.listdir(inner):
            if not _unlink(below, inner):
                with _opened(below, inner):  # makes it writable, which a move needs
                    os.rename(below, f"hutch-{os.urandom(16).hex()}", src_dir_fd=inner, dst_dir_fd=top)


def _unlink(name: str, directory: int) -> bool:
    """Remove a name; return False if it is a directory."""
    try:
        os.unlink(name, dir_fd=directory)
    except (IsADirectoryError, PermissionError) as error:
        if isinstance(error, PermissionError) and error.errno != errno.EPERM:  # other systems: EPERM for a directory
            raise
        return False
    return True


@contextmanager
def _opened(name: str, directory: int | None = None) -> Iterator[int]:
    """Open a directory that is not a link, after restoring its owner's permissions."""
    flags = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    handle = os.open(name, flags | getattr(os, "O_PATH", os.O_RDONLY), dir_fd=directory)
    try:
        with suppress(OSError):
            os.chmod(f"/proc/self/fd/{handle}", 0o700)
        found = os.open(".", flags | os.O_RDONLY, dir_fd=handle)
    finally:
        os.close(handle)
    try:
        yield found
    finally:
        os.close(found)
