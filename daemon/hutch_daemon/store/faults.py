"""A table of disk faults that stop the store: how each is recognised, described and healed.

SQLite's result codes are listed at https://www.sqlite.org/rescode.html; the low byte is the primary code.
"""

from __future__ import annotations

import errno
import sqlite3
from enum import Enum
from typing import Final

from hutch_shared.errors import HutchError, Reason

__all__ = ["Cure", "StoreFault", "fault_of", "fault_of_os", "unavailable"]


class Cure(Enum):
    """How the store recovers from a fault. The writer tries every half second."""

    PROBE = "a small write succeeds on the same connection; after a full disk, there is also space for more than that"
    REOPEN = "everything is closed; the database is reopened and its log written into it"
    NONE = "a person has to act and restart hutchd"


class StoreFault(Enum):
    """A reason why nothing can be stored, with a sentence for the user and a cure."""

    FULL = ("The disk is full; nothing was accepted. The store resumes by itself when there is space.", Cure.PROBE)
    BUSY = (
        "Another process holds the database; nothing was accepted. The store resumes when it is released.",
        Cure.PROBE,
    )
    HELD = ("A reader holds the write-ahead log at its full size; nothing was accepted.", Cure.PROBE)
    READ_ONLY = ("The database cannot be written to; nothing was accepted. Make its file system writable.", Cure.REOPEN)
    IO = ("The disk reports errors; nothing was accepted. See the system's log.", Cure.REOPEN)
    CORRUPT = (
        "The database is damaged and was left as it is; nothing was accepted. `hutch doctor` says how to restore it.",
        Cure.NONE,
    )

    def __init__(self, sentence: str, cure: Cure) -> None:
        self.sentence = sentence
        self.cure = cure


_BY_CODE: Final[dict[int, StoreFault]] = {
    sqlite3.SQLITE_FULL: StoreFault.FULL,
    sqlite3.SQLITE_BUSY: StoreFault.BUSY,
    sqlite3.SQLITE_LOCKED: StoreFault.BUSY,
    sqlite3.SQLITE_PERM: StoreFault.READ_ONLY,
    sqlite3.SQLITE_READONLY: StoreFault.READ_ONLY,
    sqlite3.SQLITE_IOERR: StoreFault.IO,
    sqlite3.SQLITE_CANTOPEN: StoreFault.IO,
    sqlite3.SQLITE_PROTOCOL: StoreFault.IO,
    sqlite3.SQLITE_CORRUPT: StoreFault.CORRUPT,
    sqlite3.SQLITE_NOTADB: StoreFault.CORRUPT,
}
_BY_ERRNO: Final[dict[int, StoreFault]] = {
    errno.ENOSPC: StoreFault.FULL,
    errno.EDQUOT: StoreFault.FULL,
    errno.EROFS: StoreFault.READ_ONLY,
    errno.EACCES: StoreFault.READ_ONLY,
    errno.EPERM: StoreFault.READ_ONLY,
}


def fault_of(error: BaseException) -> StoreFault | None:
    """Return the fault that an error of SQLite means; None if the statement caused it, not the disk."""
    if not isinstance(error, sqlite3.Error):
        return None
    return _BY_CODE.get(getattr(error, "sqlite_errorcode", 0) & 0xFF)


def fault_of_os(error: OSError) -> StoreFault:
    """Return the fault that an error of the kernel means."""
    return _BY_ERRNO.get(error.errno or 0, StoreFault.IO)


def unavailable(fault: StoreFault, detail: str = "") -> HutchError:
    """Return a new `store_unavailable` error that names the fault."""
    return HutchError(Reason.STORE_UNAVAILABLE, fault.sentence, fault=fault.name.lower(), detail=detail)
