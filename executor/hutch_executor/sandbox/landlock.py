"""Landlock's rights for a plan of a sandbox: which rights each kernel's ABI has, and which rules give them.

Theory. A ruleset denies every right that it handles; a rule gives rights to a file or to a whole hierarchy. Nothing
takes a right away below a rule. So a place inside a shown one cannot be hidden by a rule: the shown folder gets no
rule, but each of its entries does, except those on the way to the hidden place (`_split`). That is exact only where
nothing new may be made; in a writable folder nothing can be hidden or protected, and such a plan is refused.

Always true:

- A rule belongs to a file, not to its name: a file that replaces another one later is covered by its folder's rule, and
  by none where the folder had to be split.
- Rights of a later ABI than the kernel's are left out. The filter and the supervisor stand in for truncation, TCP and
  abstract sockets; what is then open (signals, below ABI 6) is in `hutch_shared.attacks`.
- Devices are given one by one. /dev/shm and pseudo-terminals would show those of the account's other processes.

Source: Documentation/userspace-api/landlock.rst of the kernel.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Mapping
from typing import Final

from hutch_executor.sandbox import confine
from hutch_executor.sandbox.places import Access, is_inside
from hutch_shared.errors import HutchError, Reason

__all__ = ["NEWEST", "make_ruleset", "rules_for", "shown_whole", "truncates"]

NEWEST: Final = 7
"""The newest ABI that this module knows. A newer kernel offers all of it, too."""
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_MAKE_CHAR, _MAKE_BLOCK, _REFER, _TRUNCATE, _IOCTL_DEV = 1 << 6, 1 << 11, 1 << 13, 1 << 14, 1 << 15
_FIRST: Final = (1 << 13) - 1
"""All rights of the first ABI."""
_LATER: Final = {2: _REFER, 3: _TRUNCATE, 5: _IOCTL_DEV}
_OF_FILES: Final = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV
"""The rights that a rule of a file, which is no folder, may give."""
_READ: Final = _EXECUTE | _READ_FILE | _READ_DIR
_CHANGE: Final = _FIRST & ~(_MAKE_CHAR | _MAKE_BLOCK) | _REFER | _TRUNCATE | _IOCTL_DEV
_DEVICE: Final = _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV
_TCP: Final = 0b11
"""Binding and connecting."""
_SCOPES: Final = 0b11
"""Abstract Unix sockets and signals."""
_TCP_SINCE, _SCOPES_SINCE = 4, 6
_DEVICES: Final = ("null", "zero", "full", "random", "urandom", "tty")


def rules_for(places: Mapping[str, Access]) -> dict[str, int]:
    """Return the rights that give a plan's places, by path, with those of all ABIs. Looks at the file system.

    `isolation_unavailable` if a place that is not writable lies in a writable one.
    """
    found: dict[str, int] = {}
    for path, access in places.items():
        inside = [one for one in places if one != path and is_inside(one, path)]
        match access:
            case "read":
                closed = [one for one in inside if places[one] in ("hidden", "private", "taken", "devices")]
                found |= dict(_split(path, closed))
            case "write":
                if (other := next((one for one in inside if places[one] != "write"), None)) is not None:
                    why = f"Landlock cannot protect {other} in {path}, which the agent can change; bubblewrap can."
                    raise HutchError(Reason.ISOLATION_UNAVAILABLE, why)
                found[path] = _CHANGE
            case "devices":
                found |= {f"{path}/{name}": _DEVICE for name in _DEVICES}
            case "processes":
                found |= {path: _READ}
    return found


def shown_whole(rules: Mapping[str, int]) -> list[str]:
    """Return the paths that are shown with everything in them."""
    return [path for path, rights in rules.items() if rights != _READ_DIR]


def make_ruleset(rules: Mapping[str, int], *, network: bool, abi: int) -> int:
    """Return a ruleset's descriptor, which a confined command inherits. The caller closes it.

    Without `network` no TCP is allowed, from ABI 4 on. Paths that are gone are left out. OSError if the kernel refuses.
    """
    handled = _handled(abi)
    ruleset = confine.make_ruleset(
        abi, handled, _TCP if abi >= _TCP_SINCE and not network else 0, _SCOPES if abi >= _SCOPES_SINCE else 0
    )
    try:
        for path, rights in rules.items():
            _add(ruleset, path, rights & handled)
    except OSError:
        os.close(ruleset)
        raise
    return ruleset


def truncates(abi: int) -> bool:
    """Return whether files outside can be cut to another length by their path, which the ABI does not cover."""
    return abi < 3


def _handled(abi: int) -> int:
    return _FIRST | sum(rights for since, rights in _LATER.items() if abi >= since)


def _add(ruleset: int, path: str, rights: int) -> None:
    try:
        opened = os.open(path, os.O_PATH | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EACCES):  # what the account cannot reach needs no rule
            return
        raise
    try:
        mode = os.fstat(opened).st_mode
        if not stat.S_ISDIR(mode):
            rights &= _OF_FILES
        if rights and not stat.S_ISLNK(mode):
            confine.add_path(ruleset, opened, rights)
    finally:
        os.close(opened)


def _split(path: str, closed: list[str]) -> Iterator[tuple[str, int]]:
    """Yield the rules that show `path` except the closed places in it, and what lies in them."""
    if not closed:
        yield path, _READ
        return
    if not any(os.path.isdir(one) for one in closed):  # a folder's rule to list it would list those below it too
        yield path, _READ_DIR
    with os.scandir(path) as entries:
        names = sorted(entry.path for entry in entries)
    for name in names:
        if name not in closed:
            yield from _split(name, [one for one in closed if is_inside(one, name)])
