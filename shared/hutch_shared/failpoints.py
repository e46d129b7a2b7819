"""Named places where a test can make the process die, and what a process was promised.

`HUTCH_FAILPOINT=name[:k]` kills the process (SIGKILL, as a power cut would) at its k-th pass of that place; with
`HUTCH_FAILPOINT_MARK=file` only the one of several processes that finds the file and removes it.
`HUTCH_WITNESS=file` collects what processes were promised. All are read once, when the module is imported; without
them nothing happens.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
from typing import Final

__all__ = ["VARIABLES", "WITNESSED", "failpoint", "witness"]

VARIABLES: Final = ("HUTCH_FAILPOINT", "HUTCH_FAILPOINT_MARK", "HUTCH_WITNESS")
"""What a process has to hand on to those it starts."""


def _parse(text: str) -> tuple[str | None, int]:
    name, _, count = text.partition(":")
    return name or None, int(count or 1)


_NAME, _PASS = _parse(os.environ.get("HUTCH_FAILPOINT", ""))
_MARK: Final = os.environ.get("HUTCH_FAILPOINT_MARK")
_passes: Final = itertools.count(1)
_WITNESS: Final = os.environ.get("HUTCH_WITNESS")
WITNESSED: Final = _WITNESS is not None
"""Whether somebody collects what is said to `witness`: for where there is much to say."""


def failpoint(name: str) -> None:
    """Die here, without any clean-up, if this is the pass of the place that the environment names."""
    if name == _NAME and next(_passes) == _PASS and _is_meant():
        witness("died", name, os.getpid())
        os.kill(os.getpid(), signal.SIGKILL)


def _is_meant() -> bool:
    if _MARK is not None:
        try:
            os.unlink(_MARK)
        except FileNotFoundError:
            return False
    return True


def witness(name: str, *values: str | int) -> None:
    """Note what this process was promised, where somebody collects it."""
    if _WITNESS is not None:
        with open(_WITNESS, "ab", buffering=0) as file:
            file.write(json.dumps([name, *values]).encode() + b"\n")
