"""The environment variables that an executor keeps; it removes all others at its start."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final

__all__ = ["ALLOWED_ENVIRONMENT", "TEMPORARY", "scrub_environment", "without_places"]

ALLOWED_ENVIRONMENT: Final = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|LANG|LANGUAGE|LC_[A-Z]+|TERM|TZ|TMPDIR|XDG_[A-Z_]+|SSL_CERT_(FILE|DIR)"
    r"|(HTTPS?|NO)_PROXY|(https?|no)_proxy"
    r"|HUTCH_(EXECUTOR_ID|LOG_LEVEL)"
)
"""Matches the whole name of an allowed variable."""

TEMPORARY: Final = ("/tmp", "/var/tmp", "/dev/shm")  # noqa: S108  these are avoided
"""Folders in which everybody may put programs."""


def scrub_environment() -> None:
    """Remove every variable that is not allowed, so that no child inherits it, and relative folders from PATH."""
    for name in list(os.environ):
        if not ALLOWED_ENVIRONMENT.fullmatch(name):
            del os.environ[name]
    if "PATH" in os.environ:
        os.environ["PATH"] = without_places(os.environ["PATH"], ()) or os.defpath  # empty: the working directory


def without_places(path: str, places: Iterable[str]) -> str:
    """Return the absolute folders of a PATH that lie in none of `places`, by their name and by their real path.

    A program in a relative folder is another one in each working directory, so a folder of an agent could supply it.
    """
    avoided = [Path(name) for place in places for name in (os.path.normpath(place), os.path.realpath(place))]

    def is_kept(folder: str) -> bool:
        names = (Path(os.path.normpath(folder)), Path(os.path.realpath(folder)))
        return os.path.isabs(folder) and not any(name.is_relative_to(place) for name in names for place in avoided)

    return os.pathsep.join(folder for folder in path.split(os.pathsep) if is_kept(folder))
