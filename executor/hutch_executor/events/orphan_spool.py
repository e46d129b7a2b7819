"""The spool of a dead executor of the account, handed to hutchd batch by batch."""

from __future__ import annotations

from contextlib import closing, suppress
from pathlib import Path
from typing import Final

import msgspec

from hutch_executor.events.outbox import BATCH_BYTES, BATCH_COUNT
from hutch_executor.events.spool_files import read_spool, remove_spool
from hutch_shared import messages as m
from hutch_shared.events import ReportedEvent
from hutch_shared.failpoints import failpoint

__all__ = ["take_spool"]

_decode: Final = msgspec.json.Decoder(ReportedEvent).decode


def take_spool(directory: Path, acked: int) -> m.SpooledEvents:
    """Return the events after number `acked`, a batch at most. If there are none, remove the spool and its directory.

    HutchError: `wrong_state` while the spool's executor lives, `not_found` if the file is not a spool. Blocks.
    """
    path = next(directory.glob("*.spool"), None)
    if path is None:
        _remove(directory)
        return m.SpooledEvents()
    owner, records = read_spool(path, acked)
    events: list[ReportedEvent] = []
    size = 0
    with closing(records):
        for n, event in records:
            if n <= acked:
                continue
            size += len(event)
            if events and (size > BATCH_BYTES or len(events) == BATCH_COUNT):
                break
            events.append(_decode(event))
        if not events:
            failpoint("spool.before_removal")
            remove_spool(path)
            _remove(directory)
    return m.SpooledEvents(owner.session, tuple(events))


def _remove(directory: Path) -> None:
    """Remove an empty directory. A link, another account's directory and one that is not empty stay."""
    with suppress(OSError):
        directory.rmdir()
