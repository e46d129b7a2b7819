"""Finds the programs of the system that the executor itself starts, outside every sandbox."""

from __future__ import annotations

import os
import shutil
from typing import Final

__all__ = ["find_tool"]

_SYSTEM: Final = "/usr/bin:/bin:/usr/sbin:/sbin"


def find_tool(name: str) -> str | None:
    """Return the path of a program: in the system's folders, otherwise on PATH. None if it is missing.

    PATH may have a folder of a project, where an agent could put a program of the same name. No agent can change the
    system's folders.
    """
    return shutil.which(name, path=_SYSTEM) or shutil.which(name, path=os.environ.get("PATH", ""))
