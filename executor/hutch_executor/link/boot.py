"""The boot line: where hutchd is and who this executor is, as one JSON line on standard input."""

from __future__ import annotations

import os
import select
import time
from typing import Final

import msgspec

from hutch_shared import messages as m
from hutch_shared.errors import HutchError, Reason

__all__ = ["DEADLINE", "LINE_LIMIT", "read_boot"]

LINE_LIMIT: Final = 16 * 1024
DEADLINE: Final = 10.0


def read_boot(fd: int, *, deadline: float = DEADLINE) -> m.Boot:
    """Read the boot line from `fd`. HutchError when none comes in `deadline` seconds, or it cannot be used. Blocks."""
    line = _read_line(fd, time.monotonic() + deadline)
    try:
        boot = msgspec.json.decode(line, type=m.Boot)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise HutchError(Reason.INVALID_PARAMS, "The boot line cannot be read.") from None  # it holds the token
    if boot.protocol != m.PROTOCOL:
        raise HutchError(Reason.PROTOCOL_MISMATCH)
    return boot


def _read_line(fd: int, until: float) -> bytes:
    line = b""
    while b"\n" not in line:
        if len(line) > LINE_LIMIT:
            raise HutchError(Reason.FRAME_TOO_LARGE, f"The boot line is longer than {LINE_LIMIT} bytes.")
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        if not poll.poll(max(0.0, until - time.monotonic()) * 1000):
            raise HutchError(Reason.TIMED_OUT, "No boot line came on standard input.")
        try:
            chunk = os.read(fd, 4096)
        except OSError:  # a socket whose other end closed with our ready byte unread
            chunk = b""
        if not chunk:
            raise HutchError(Reason.CONNECTION_LOST, "hutchd ended before it sent the boot line.")
        line += chunk
    return line.partition(b"\n")[0]
