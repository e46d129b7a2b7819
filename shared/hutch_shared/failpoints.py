"""Named places where a test can make the process die, and faults that a test can plant.

`HUTCH_FAILPOINT=name[:k]` kills the process (SIGKILL, as a power cut would) at its k-th pass of that place; without it
nothing happens. `HUTCH_PLANTED=name[,name…]` switches deliberate mistakes on, and only where `HUTCH_TEST_BUILD=1`
stands too: they show that the tests would notice. Both are read once, when the module is imported.
"""

from __future__ import annotations

import itertools
import os
import signal
from typing import Final

__all__ = ["failpoint", "planted"]


def _parse(text: str) -> tuple[str | None, int]:
    name, _, count = text.partition(":")
    return name or None, int(count or 1)


_NAME, _PASS = _parse(os.environ.get("HUTCH_FAILPOINT", ""))
_passes: Final = itertools.count(1)
_PLANTED: Final = frozenset(
    os.environ.get("HUTCH_PLANTED", "").split(",") if os.environ.get("HUTCH_TEST_BUILD") == "1" else ()
)


def failpoint(name: str) -> None:
    """Die here, without any clean-up, if this is the pass of the place that the environment names."""
    if name == _NAME and next(_passes) == _PASS:
        os.kill(os.getpid(), signal.SIGKILL)


def planted(name: str) -> bool:
    """Tell whether the mistake of this name was switched on, in a test build."""
    return name in _PLANTED
