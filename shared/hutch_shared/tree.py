"""Reads and writes files below one directory whose content an agent may be changing at the same time.

Theory. Between the look at a path and its use, an agent could put a link in the place of a file or of any folder above
it. The link would lead to a file that the agent cannot read itself. Therefore no path is opened as a whole: each
component is opened from the descriptor of the folder that contains it, with a flag by which the kernel follows no link.
This module reads a link as text, and follows it inside the root only.

Always true of a file that a `Tree` returns: it is a regular file, each folder on the way to it was a folder inside the
root when it was opened, and no call waits for another process (a pipe, a terminal).
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import BinaryIO, Final, NamedTuple, Self

__all__ = ["LINKS", "Content", "Entry", "Tree", "UnfitFileError", "split_path"]

LINKS: Final = 40
"""The most links of a path that are followed, as in the kernel."""
_LENGTH: Final = 4096
_BASE: Final = os.O_NOFOLLOW | os.O_CLOEXEC
_FOLDER: Final = _BASE | os.O_DIRECTORY | getattr(os, "O_PATH", os.O_RDONLY)
_LISTED: Final = _BASE | os.O_DIRECTORY | os.O_RDONLY
_FILE: Final = _BASE | os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY
_NEW: Final = _BASE | os.O_RDWR | os.O_CREAT | os.O_EXCL
_MAYBE_LINK: Final = frozenset({errno.ELOOP, errno.EMLINK, errno.ENOTDIR})
"""How the kernel refuses a link, depending on the system and on the flags."""


class UnfitFileError(ValueError):
    """The file exists but is not read; the text is a clause about it, like `it is a pipe`."""


class Content(NamedTuple):
    """What a file contains."""

    data: bytes
    path: str
    """Its path below the root, without links."""
    is_cut: bool
    """Whether the file is longer than the limit."""


class Entry(NamedTuple):
    """A name in a folder."""

    name: str
    is_folder: bool
    """False for a link to a folder."""


@dataclass(slots=True)
class _Place:
    """The folder that a walk has reached: its descriptor, its names below the root, and the links left to follow."""

    descriptor: int
    names: list[str]
    links: int


class Tree:
    """A directory, held by its descriptor. Use it in a `with` block. All methods block."""

    def __init__(self, root: str) -> None:
        """Open `root`, an absolute path without links. OSError if it is missing, UnfitFileError if it has a link."""
        self.root = os.path.normpath(root)
        if not os.path.isabs(self.root):
            raise ValueError("the root of a tree is an absolute path")
        self._descriptor = os.open("/", _FOLDER)
        try:
            for name in split_path(self.root):
                self._descriptor = _step(self._descriptor, name)
        except OSError as error:
            self.close()
            if error.errno in _MAYBE_LINK:
                raise UnfitFileError(f"{self.root} is not a directory, or lies behind a symbolic link") from error
            raise

    def __repr__(self) -> str:
        return f"<Tree {self.root}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the descriptor. Safe to call twice."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    # ---------------------------------------------------------------- what is there

    def has(self, path: str) -> bool:
        """Return whether something has this name: a file, a folder or a link. Links on the way are not followed."""
        *folders, name = split_path(path)
        with suppress(OSError, UnfitFileError), self._at(folders, 0) as place:
            os.lstat(name, dir_fd=place.descriptor)
            return True
        return False

    def is_folder(self, path: str) -> bool:
        """Return whether `path` is a folder that this account can enter, and neither it nor its way is a link."""
        with suppress(OSError, UnfitFileError), self._at(split_path(path), 0):
            return True
        return False

    def entries(self, path: str, limit: int, *, links: int = 0) -> list[Entry]:
        """Return the names in a folder, sorted, at most `limit` of them. OSError, UnfitFileError."""
        with self._at(split_path(path), links) as place:
            listed = os.open(".", _LISTED, dir_fd=place.descriptor)
        try:
            found: list[Entry] = []
            with os.scandir(listed) as entries:
                for entry in entries:
                    if len(found) == limit:
                        break
                    found.append(Entry(entry.name, entry.is_dir(follow_symlinks=False)))
        finally:
            os.close(listed)
        return sorted(found)

    # ---------------------------------------------------------------- reading

    def read(self, path: str, limit: int, *, links: int = 0) -> Content:
        """Return at most `limit` bytes of a regular file.

        Up to `links` links are followed, if they stay inside the root. OSError if the file is missing or may not be
        read; UnfitFileError if it lies behind another link, or is not a regular file.
        """
        with self.opened(path, links=links) as (file, real):
            data = file.read(limit + 1)
        return Content(data[:limit], real, len(data) > limit)

    @contextmanager
    def opened(self, path: str, *, links: int = 0) -> Iterator[tuple[BinaryIO, str]]:
        """Open a regular file for reading; give it and its path below the root. Errors as in `read`."""
        descriptor, real = self._open(split_path(path), links)
        kind = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(kind):
            os.close(descriptor)
            raise UnfitFileError("it is a directory" if stat.S_ISDIR(kind) else "it is not a regular file")
        with open(descriptor, "rb") as file:
            yield file, real

    # ---------------------------------------------------------------- writing

    @contextmanager
    def writing(self, path: str) -> Iterator[BinaryIO]:
        """Give a new file (0600) to write and read; when the block ends, it replaces what has the name `path`.

        Missing folders are made (0700). If the block fails, nothing has changed. OSError; UnfitFileError if a folder on
        the way is a link.
        """
        *folders, name = split_path(path)
        for depth, folder in enumerate(folders):
            with self._at(folders[:depth], 0) as place, suppress(FileExistsError):
                os.mkdir(folder, 0o700, dir_fd=place.descriptor)
        with self._at(folders, 0) as place:
            new, at = f".{name}.new", place.descriptor
            with suppress(FileNotFoundError):
                os.unlink(new, dir_fd=at)
            try:
                with open(os.open(new, _NEW, 0o600, dir_fd=at), "r+b") as file:
                    yield file
                    file.flush()
                    os.fsync(file.fileno())
                os.rename(new, name, src_dir_fd=at, dst_dir_fd=at)
            except BaseException:
                with suppress(OSError):
                    os.unlink(new, dir_fd=at)
                raise

    def remove(self, path: str) -> None:
        """Remove a file or a link, if there is one. OSError; UnfitFileError if a folder on the way is a link."""
        *folders, name = split_path(path)
        with suppress(FileNotFoundError), self._at(folders, 0) as place:
            os.unlink(name, dir_fd=place.descriptor)

    # ---------------------------------------------------------------- walking

    def _open(self, names: list[str], links: int) -> tuple[int, str]:
        while True:
            *folders, name = names or ["."]
            if name == "..":
                raise UnfitFileError("it is a directory")
            with self._at(folders, links) as place:
                try:
                    descriptor = os.open(name, _FILE, dir_fd=place.descriptor)
                except OSError as error:
                    names = self._beyond(error, place, name)
                    links = place.links
                else:
                    return descriptor, "/".join([*place.names, name])

    @contextmanager
    def _at(self, names: list[str], links: int) -> Iterator[_Place]:
        """Walk to a folder and give it. Holds at most two descriptors, however deep it is."""
        place = _Place(os.dup(self._descriptor), [], links)
        rest = names[::-1]
        try:
            while rest:
                name = rest.pop()
                if name == "..":
                    self._climb(place)
                    continue
                try:
                    found = os.open(name, _FOLDER, dir_fd=place.descriptor)
                except OSError as error:
                    rest += self._beyond(error, place, name)[::-1]
                    self._return(place)
                else:
                    os.close(place.descriptor)
                    place.descriptor = found
                    place.names.append(name)
            yield place
        finally:
            os.close(place.descriptor)

    def _beyond(self, error: OSError, place: _Place, name: str) -> list[str]:
        """Return the names, from the root, that the link `name` stands for; raise `error` if it is not a link."""
        if error.errno not in _MAYBE_LINK:
            raise error
        try:
            target = os.readlink(name, dir_fd=place.descriptor)
        except OSError:
            raise error from None
        if not place.links:
            raise UnfitFileError("it is a symbolic link, or lies behind one") from error
        place.links -= 1
        if not target.startswith("/"):
            return [*place.names, *split_path(target)]
        root = "" if self.root == "/" else self.root
        if target != self.root and not target.startswith(f"{root}/"):
            raise UnfitFileError(f"it is a link out of {self.root}") from error
        return split_path(target[len(root) :])

    def _return(self, place: _Place) -> None:
        """Go back to the root."""
        root = os.dup(self._descriptor)
        os.close(place.descriptor)
        place.descriptor, place.names = root, []

    def _climb(self, place: _Place) -> None:
        """Go one folder up: walk there again from the root, since `..` of a moved folder leads elsewhere."""
        if not place.names:
            raise UnfitFileError(f"it leads out of {self.root}")
        names = place.names[:-1]
        self._return(place)
        for name in names:
            place.descriptor = _step(place.descriptor, name)
            place.names.append(name)


def _step(at: int, name: str) -> int:
    """Open the folder `name` in the folder `at`, then close `at`. On OSError `at` stays open."""
    found = os.open(name, _FOLDER, dir_fd=at)
    os.close(at)
    return found


def split_path(path: str) -> list[str]:
    """Return the names of a path, without empty ones and `.`. UnfitFileError if the system would not take the path."""
    try:
        if "\0" in path or len(os.fsencode(path)) > _LENGTH:
            raise UnfitFileError("its path cannot be used")
    except UnicodeEncodeError as error:
        raise UnfitFileError("its path cannot be used") from error
    return [name for name in path.split("/") if name not in ("", ".")]
