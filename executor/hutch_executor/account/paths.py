"""Paths as the account sees them: symbolic links followed, `..` gone."""

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
    """Return the real path of each of `paths`; relative ones stand in `cwd`.

    One that cannot be resolved, comes after the first 256, or is not done within `deadline` seconds (a file server
    that does not answer) is missing. On cancel a thread may go on for a while; it changes
    nothing, and `threads` bounds how many there are.
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
    """Return the real path; what does not exist yet lies where its parent really is. None when that is unknown."""
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
    """Return the longest part of `path` that exists. OSError where that cannot be told."""
    while True:
        try:
            os.lstat(path)
        except (FileNotFoundError, NotADirectoryError):
            path = os.path.dirname(path)
        else:
            return path
