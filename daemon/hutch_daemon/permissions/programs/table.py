"""The whole table, and the look-up of a program's row."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from itertools import chain
from types import MappingProxyType
from typing import Final

from hutch_daemon.permissions.programs import development, files, git, interpreters
from hutch_daemon.permissions.programs.row import Program, base_name, names, rows

__all__ = ["CHANGES_PATHS", "PRINTS_ITS_WORDS", "PROGRAMS", "READS_BELOW", "is_known", "lookup"]

_MODULES: Final = (files, git, development, interpreters)
PROGRAMS: Final[Mapping[str, Program]] = MappingProxyType(
    rows(*chain.from_iterable(module.ROWS.items() for module in _MODULES))
)
_UNKNOWN: Final = Program()
PRINTS_ITS_WORDS: Final = names("echo printf true false : pwd")
"""Programs that take no operand as a file name."""
READS_BELOW: Final[Mapping[str, frozenset[str]]] = MappingProxyType(
    {
        **dict.fromkeys(("rg", "ag", "ack", "tar", "zip", "rsync"), frozenset[str]()),
        **dict.fromkeys(("grep", "egrep", "fgrep", "diff", "cp", "scp"), names("r R a --recursive --archive")),
    }
)
"""Programs that read all files below a directory: with one of these options, or always if the set is empty."""
CHANGES_PATHS: Final = names("ln cp mv tar gtar bsdtar unzip rsync install git patch dd")
"""Programs that can change which file a path leads to for later commands of the line."""


@lru_cache(maxsize=1024)
def lookup(program: str) -> Program:
    """Return the row of a program, found by its base name with or without a version (`python3.12`)."""
    name = base_name(program)
    row = PROGRAMS.get(name) or PROGRAMS.get(name.rstrip("0123456789.-"))
    # On macOS, names of GNU programs start with `g` (`gsort`).
    return row or (PROGRAMS.get(name[1:]) if name.startswith("g") else None) or _UNKNOWN


def is_known(program: str) -> bool:
    """Return whether the table has a row for the program."""
    return lookup(program) is not _UNKNOWN
