"""A lock that allows one hutchd per state directory. The kernel releases it when the process ends."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hutch_daemon.store.faults import fault_of_os, unavailable
from hutch_shared.errors import HutchError, Reason
from hutch_shared.hutchd_lock import RESTORES, try_lock

__all__ = ["hold"]


@contextmanager
def hold(path: Path, *, restores: bool = False) -> Iterator[None]:
    """Hold the lock file at `path`, which is created with mode 0600. Others see whether the holder `restores` a backup.

    HutchError: WRONG_STATE if another process holds it, STORE_UNAVAILABLE if it cannot be created.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise unavailable(fault_of_os(error), str(error)) from error
    try:
        if not try_lock(descriptor):
            holder, _, word = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip().partition(" ")
            holder = holder or "unknown"
            does = f"uses {path.parent}; stop it first: `hutch daemon stop`."
            if word == RESTORES:
                does = f"replaces the database in {path.parent} by a backup; try again when it has ended."
            raise HutchError(Reason.WRONG_STATE, f"Another hutchd (pid {holder}) {does}", pid=holder)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}{f' {RESTORES}' if restores else ''}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)
