"""How much memory this process has, and how much it may have."""

from __future__ import annotations

import os
import resource
from pathlib import Path

__all__ = ["limit_memory", "resident_bytes"]


def limit_memory(bytes_: int) -> None:
    """Bound this process's and each child's private memory softly: allocations beyond it fail there and then."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    soft = bytes_ if hard == resource.RLIM_INFINITY else min(bytes_, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def resident_bytes() -> int:
    """Return the bytes of this process that are in memory now; 0 where the platform does not tell."""
    try:
        return int(Path("/proc/self/statm").read_bytes().split()[1]) * os.sysconf("SC_PAGESIZE")
    except OSError:
        return 0
