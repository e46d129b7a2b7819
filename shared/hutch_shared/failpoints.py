"""Failpoints, named places where a test can kill the process; and a log of the promises made to a process.

`HUTCH_FAILPOINT=name[:k]` kills the process (SIGKILL, like a power cut) when it passes that place for the k-th time.
With `HUTCH_FAILPOINT_MARK=file` too, only the first process that can remove the file is killed. `HUTCH_WITNESS=file`
collects promises made to processes: for example, an event that was acknowledged. The variables are read once, at
import; without them nothing happens.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
from typing import Final

__all__ = ["VARIABLES", "WITNESSED", "failpoint", "witness"]

VARIABLES: Final = ("HUTCH_FAILPOINT", "HUTCH_FAILPOINT_MARK", "HUTCH_WITNESS")
"""Variables that a process must pass on to the processes that it starts."""


def _parse(text: str) -> tuple[str | None, int]:
    name, _, count = text.partition(":")
    return name or None, int(count or 1)


_NAME, _PASS = _parse(os.environ.get("HUTCH_FAILPOINT", ""))
_MARK: Final = os.environ.get("HUTCH_FAILPOINT_MARK")
_passes: Final = itertools.count(1)
_WITNESS: Final = os.environ.get("HUTCH_WITNESS")
WITNESSED: Final = _WITNESS is not None
"""Whether `witness` writes anything. Check it before preparing many calls of `witness`."""


def failpoint(name: str) -> None:
    """Kill this process, without clean-up, if HUTCH_FAILPOINT names this place and this pass of it."""
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
    """Append a promise made to this process to the file HUTCH_WITNESS, if that is set."""
    if _WITNESS is not None:
        with open(_WITNESS, "ab", buffering=0) as file:
            file.write(json.dumps([name, *values]).encode() + b"\n")
