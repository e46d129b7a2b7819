"""`python -m hutch_executor`: an executor. It gets its boot line on standard input and dials hutchd.

It makes itself unreadable before it imports anything that takes long, and says so where standard input is a socket:
whoever started it verifies that, and only then hands over the boot line with its token, while the rest is imported.
Exit codes: 0 it left as it was told to, 2 it could not start, 3 it did not manage to leave in time.
"""

from __future__ import annotations

import os
import sys

from hutch_executor.process.hardening import announce, harden

__all__ = ["main"]


def main() -> int:
    """Run an executor to its end; return the exit code."""
    harden()
    if not announce(0):
        return 2
    from hutch_executor.run import live

    return live()


def _exit() -> None:
    code = main()
    import logging

    logging.shutdown()
    sys.stderr.flush()
    os._exit(code)  # a thread that hangs in a file system must not hold it up


if __name__ == "__main__":
    _exit()
