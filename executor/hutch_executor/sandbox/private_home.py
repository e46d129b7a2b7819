"""The home of an agent under Landlock: a folder of its session, with links to what the sandbox shows of the real home.

Landlock mounts nothing, so it cannot put an empty folder over the home, as bubblewrap does. Instead `HOME` names this
folder. What tools write into their home stays here and is removed with the session's temporary files. A folder of the
real home of which only a part is shown is a folder here too, so that tools can add to it.

The agent can put a link in the place of each folder here, and this code runs outside its sandbox: it follows none.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Final

__all__ = ["fill", "make", "moved"]

_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_UNFIT: Final = (errno.ELOOP, errno.ENOTDIR, errno.EACCES)
"""The agent put something else than a folder there, or closed it."""

_WRITTEN: Final = {"XDG_CACHE_HOME": ".cache", "XDG_STATE_HOME": ".local/state"}
"""Variables that name folders which tools write, and the usual place of each in a home."""


def moved(env: Mapping[str, str], home: str, folder: str) -> dict[str, str]:
    """Return XDG variables for an agent whose home is `folder`, in place of those in `env` that name the real one.

    Tools could not write there. A folder for caches or states that lies elsewhere moves into the home, too.
    """
    found = {}
    for name, value in env.items():
        if not name.startswith("XDG_"):
            continue
        root = next((root for root in (home, os.path.realpath(home)) if f"{value}/".startswith(f"{root}/")), None)
        if root is not None:
            found[name] = os.path.normpath(os.path.join(folder, os.path.relpath(value, root)))
        elif value and name in _WRITTEN:
            found[name] = os.path.join(folder, _WRITTEN[name])
    return found


def make(top: str, names: str) -> None:
    """Make the folder `names` below `top`, an existing folder that no agent can replace. OSError if one is a link."""
    with _opened(top) as start, _below(start, names.split("/")):
        pass


def fill(top: str, names: str, home: str, shown: Iterable[str], links: Mapping[str, str]) -> None:
    """Make the folder `names` as `make` does, and a link in it to each shown path below the home, at the same place.

    `links` are the home's own links. What exists in the folder stays, so it can be called before each command. OSError.
    """
    entries = dict.fromkeys(shown)
    with _opened(top) as start, _below(start, names.split("/")) as folder:
        for path in sorted({*entries, *links}, key=lambda path: (path.count("/"), path)):
            for root in dict.fromkeys((home, os.path.realpath(home))):
                if path.startswith(f"{root}/"):
                    _link(folder, os.path.relpath(path, root), links.get(path, path))


def _link(folder: int, name: str, target: str) -> None:
    """Make the link unless there is something, or a folder on the way is a link already and so shows it."""
    *above, last = name.split("/")
    try:
        with _below(folder, above) as at, suppress(FileExistsError):
            os.symlink(target, last, dir_fd=at)
    except OSError as error:
        if error.errno not in _UNFIT:
            raise


@contextmanager
def _opened(path: str, at: int | None = None) -> Iterator[int]:
    descriptor = os.open(path, _FOLDER, dir_fd=at)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def _below(at: int, names: list[str]) -> Iterator[int]:
    """Open the folder `names` below an open one, through no link; make what is missing. OSError."""
    if not names:
        yield at
        return
    with suppress(FileExistsError):
        os.mkdir(names[0], 0o700, dir_fd=at)
    with _opened(names[0], at) as inside, _below(inside, names[1:]) as found:
        yield found
