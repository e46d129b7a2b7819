"""The boot line: one JSON line on standard input that says where hutchd is and which executor this is."""

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
"""Bytes of the boot line."""
DEADLINE: Final = 10.0
_CHUNK: Final = 4096


def read_boot(fd: int, *, deadline: float = DEADLINE) -> m.Boot:
    """Read the boot line from `fd`, within `deadline` seconds. Blocks.

    HutchError: `timed_out`; `connection_lost` if the other side ends or dies first; `frame_too_large`,
    `invalid_params` or `protocol_mismatch` for a line that cannot be used.
    """
    line = _read_line(fd, time.monotonic() + deadline)
    try:
        boot = msgspec.json.decode(line, type=m.Boot)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        # `from None`: the original message could quote the line, which holds the token
        raise HutchError(Reason.INVALID_PARAMS, "The boot line cannot be read.") from None
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
            chunk = os.read(fd, _CHUNK)
        except OSError:  # a reset: hutchd died before it read this executor's byte
            chunk = b""
        if not chunk:
            raise HutchError(Reason.CONNECTION_LOST, "hutchd ended before it sent the boot line.")
        line += chunk
    return line.partition(b"\n")[0]
