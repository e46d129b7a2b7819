"""This process's memory: its limit and its size; and its limit of open files."""

from __future__ import annotations

import os
import resource
from pathlib import Path

__all__ = ["limit_memory", "limit_open_files", "resident_bytes"]


def limit_memory(limit: int) -> None:
    """Limit the private memory of this process and of each child to `limit` bytes: larger allocations fail."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    soft = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def limit_open_files(limit: int) -> None:
    """Limit the open files of this process and of each child to `limit`, or to the present hard limit if less."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))


def resident_bytes() -> int:
    """Return the resident size of this process in bytes; 0 where the platform does not report it."""
    try:
        return int(Path("/proc/self/statm").read_bytes().split()[1]) * os.sysconf("SC_PAGESIZE")
    except OSError:
        return 0
