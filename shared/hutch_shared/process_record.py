"""The processes that a hutchd started and that may outlive it, recorded in its state directory.

hutchd rewrites the record at each change. A client reads it when hutchd is gone: to name what is left, and to end it.
A pid is believed only with the start time and the boot that were recorded with it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

from hutch_shared.processes import boot_id, start_time

__all__ = ["BROKER", "RecordedProcess", "read_record", "write_record"]

BROKER: Final = "hutch-broker"
"""The broker's name in the record."""

_NAME: Final = "processes.json"
_MAX_BYTES: Final = 4 << 20


class RecordedProcess(NamedTuple):
    """A process: an executor, with its session if it has one, or the broker."""

    name: str
    pid: int
    start_time: int
    session: str = ""

    @property
    def lives(self) -> bool:
        """Whether this process, and not another one with its pid, is alive."""
        return start_time(self.pid) == self.start_time

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid}){f', session {self.session}' if self.session else ''}"


def write_record(state: Path, processes: Iterable[RecordedProcess]) -> None:
    """Replace the record in the state directory. OSError if that fails; then the former one stays."""
    text = json.dumps({"boot": boot_id(), "processes": [one._asdict() for one in processes]})
    new = state / f"{_NAME}.new"
    try:
        new.write_text(text)
        new.replace(state / _NAME)
    except OSError:
        with suppress(OSError):
            new.unlink()
        raise


def read_record(state: Path) -> list[RecordedProcess]:
    """Return the recorded processes that live. Empty if there is no record, or none that the caller may read."""
    try:
        with open(state / _NAME, "rb") as file:
            found: Any = json.loads(file.read(_MAX_BYTES))
        if os.fspath(found["boot"]) != boot_id():
            return []
        recorded = [RecordedProcess(**one) for one in found["processes"]]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return [one for one in recorded if one.lives]
