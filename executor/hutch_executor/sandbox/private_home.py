"""The home of an agent under Landlock: a folder of its session, with links to what the sandbox shows of the real home.

Landlock mounts nothing, so it cannot put an empty folder over the home, as bubblewrap does. Instead `HOME` names this
folder. What tools write into their home stays here and is removed with the session's temporary files. A folder of the
real home of which only a part is shown is a folder here too, so that tools can add to it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress

__all__ = ["fill"]


def fill(folder: str, home: str, shown: Iterable[str], links: Mapping[str, str]) -> None:
    """Put a link to each shown path below the home into `folder`, at the same place; `links` are the home's own links.

    What exists in the folder stays, so it can be called before each command. OSError.
    """
    os.makedirs(folder, mode=0o700, exist_ok=True)
    entries = dict.fromkeys(shown)
    for path in sorted({*entries, *links}, key=lambda path: (path.count("/"), path)):
        for root in dict.fromkeys((home, os.path.realpath(home))):
            if path.startswith(f"{root}/"):
                _link(folder, os.path.relpath(path, root), links.get(path, path))


def _link(folder: str, name: str, target: str) -> None:
    """Make the link unless there is something, or a folder on the way is a link already and so shows it."""
    *above, last = name.split("/")
    at = folder
    for part in above:
        at = os.path.join(at, part)
        with suppress(FileExistsError):
            os.mkdir(at, 0o700)
        if os.path.islink(at) or not os.path.isdir(at):
            return
    with suppress(FileExistsError):
        os.symlink(target, os.path.join(at, last))
