"""Whether an account can reach a file: checks each component of its path, as the kernel does.

It uses owners and modes only, which every account may read. Access control lists and security modules may decide
otherwise; only an attempt to open the file shows that.
"""

from __future__ import annotations

import grp
import os
import pwd
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

__all__ = ["PathReader", "closed", "members"]

_LINKS: Final = 40


@dataclass(frozen=True, slots=True)
class PathReader:
    """An account that reads files, with all its current groups."""

    name: str
    uid: int
    gid: int
    gids: frozenset[int]
    home: str
    shell: str

    @classmethod
    def named(cls, name: str) -> Self:
        """Look an account up. KeyError if there is none."""
        found = pwd.getpwnam(name)
        gids = frozenset(os.getgrouplist(name, found.pw_gid))
        return cls(name, found.pw_uid, found.pw_gid, gids, found.pw_dir, found.pw_shell)

    def may(self, found: os.stat_result, bits: int) -> bool:
        """Whether the mode gives this account all of `bits` (4 read, 2 write, 1 execute or traverse)."""
        if self.uid == 0:
            return True
        shift = 6 if found.st_uid == self.uid else 3 if found.st_gid in self.gids else 0
        return found.st_mode >> shift & bits == bits


def closed(path: str | Path, reader: PathReader, bits: int = 4) -> str | None:
    """Return why `reader` cannot reach `path`: a clause about the first component that stops it. None if it can.

    Links are followed, as in the kernel. `bits` is the access wanted to the last component; a directory must also be
    traversable.
    """
    at, rest, links = Path("/"), [*Path(os.path.abspath(path)).parts[1:]], 0
    while True:
        try:
            found = at.lstat()
        except FileNotFoundError:
            return f"{at} does not exist"
        except OSError as error:
            return f"{at} cannot be examined ({error.strerror})"
        if stat.S_ISLNK(found.st_mode):
            links += 1
            if links > _LINKS:
                return f"{at} leads through too many links"
            target = os.path.normpath(at.parent / at.readlink())
            at, rest = Path("/"), [*Path(target).parts[1:], *rest]
            continue
        folder = stat.S_ISDIR(found.st_mode)
        wanted = (1 if rest else bits | 1) if folder else bits
        if not reader.may(found, wanted):
            return f"{at} is closed to it ({stat.filemode(found.st_mode)} {_owner(found)})"
        if not rest:
            return None
        if not folder:
            return f"{at} is not a directory"
        at /= rest.pop(0)


def members(group: str) -> list[str]:
    """Return the members of a group, sorted, with accounts whose primary group it is. KeyError if it is missing."""
    found = grp.getgrnam(group)
    return sorted({*found.gr_mem, *(one.pw_name for one in pwd.getpwall() if one.pw_gid == found.gr_gid)})


def _owner(found: os.stat_result) -> str:
    try:
        user = pwd.getpwuid(found.st_uid).pw_name
    except KeyError:
        user = str(found.st_uid)
    try:
        group = grp.getgrgid(found.st_gid).gr_name
    except KeyError:
        group = str(found.st_gid)
    return f"{user} {group}"
