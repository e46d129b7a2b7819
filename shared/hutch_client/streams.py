"""The process's standard streams: open, able to print any character, and their width."""

from __future__ import annotations

import io
import os
import sys

__all__ = ["columns", "mend_streams", "write_nowhere"]


def columns(descriptor: int, otherwise: int = 80) -> int:
    """Return the width of the terminal; `otherwise` if there is none or its width is unknown."""
    try:
        return os.get_terminal_size(descriptor).columns or otherwise
    except OSError:
        return otherwise


def mend_streams() -> None:
    """Open closed standard streams on /dev/null, and replace characters that a stream cannot encode.

    Without this the next file that is opened would become the standard stream.
    """
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # open() returns the lowest free descriptor: this one
            mode = "r" if name == "stdin" else "w"
            setattr(sys, name, open(descriptor, mode, encoding="utf-8", closefd=False))  # noqa: SIM115 - stays open
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def write_nowhere() -> None:
    """Discard the rest of standard output: its reader has gone, or it cannot be written."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
