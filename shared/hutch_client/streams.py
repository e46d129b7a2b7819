"""The process's standard streams: there, able to take any character, and as wide as they are."""

from __future__ import annotations

import io
import os
import sys

__all__ = ["columns", "mend_streams", "write_nowhere"]


def columns(descriptor: int, otherwise: int = 80) -> int:
    """Return how wide the terminal is; `otherwise` where there is none, or one that does not say."""
    try:
        return os.get_terminal_size(descriptor).columns or otherwise
    except OSError:
        return otherwise


def mend_streams() -> None:
    """Let nothing else take the place of a standard stream that is closed, and no character be too much for one."""
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest that is free: this one
            mode = "r" if name == "stdin" else "w"
            setattr(sys, name, open(descriptor, mode, encoding="utf-8", closefd=False))  # noqa: SIM115 - for good
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def write_nowhere() -> None:
    """Let what is still to be printed go: nobody reads it, or it cannot be written."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
