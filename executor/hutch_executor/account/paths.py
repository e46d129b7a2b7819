"""Real paths, as the account sees them: symbolic links followed, `..` removed."""

from __future__ import annotations

import os
from typing import Final

import anyio
from anyio import to_thread

__all__ = ["PATHS_LIMIT", "PATH_LENGTH_LIMIT", "resolve_path", "resolve_paths"]

PATHS_LIMIT: Final = 256
PATH_LENGTH_LIMIT: Final = 4096
DEADLINE: Final = 5.0


async def resolve_paths(
    paths: tuple[str, ...], cwd: str, threads: anyio.CapacityLimiter, *, deadline: float = DEADLINE
) -> dict[str, str]:
    """Return the real path of each of `paths`; relative ones start from `cwd`.

    Left out: paths that cannot be resolved, those after the first 256, and those that take more than `deadline` seconds
    (on a file server that does not answer). After a cancel a thread may run on for a while; it changes nothing, and
    `threads` bounds how many there are.
    """
    real: dict[str, str] = {}

    def resolve_all() -> None:
        for path in paths[:PATHS_LIMIT]:
            if (found := resolve_path(path, cwd)) is not None:
                real[path] = found

    with anyio.move_on_after(deadline):
        await to_thread.run_sync(resolve_all, abandon_on_cancel=True, limiter=threads)
    return dict(real)


def resolve_path(path: str, cwd: str) -> str | None:
    """Return the real path; a missing file is resolved through its real parent. None if that fails."""
    if "\0" in path or len(path) > PATH_LENGTH_LIMIT:
        return None
    try:
        real = os.path.realpath(os.path.join(cwd, path))
        real.encode()
        if os.path.realpath(_existing(real), strict=True) != _existing(real):
            return None
    except (OSError, ValueError):
        return None
    return real


def _existing(path: str) -> str:
    """Return the longest prefix of `path` that exists. OSError if the account may not look."""
    while True:
        try:
            os.lstat(path)
        except (FileNotFoundError, NotADirectoryError):
            path = os.path.dirname(path)
        else:
            return path
