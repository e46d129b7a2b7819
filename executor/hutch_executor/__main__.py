"""`python -m hutch_executor`: an executor. It reads its boot line from standard input and dials hutchd.

It hardens itself before it imports anything that takes long. If standard input is a socket it then announces that with
one byte; its parent checks the hardening and only then sends the boot line with the token, while the rest is imported.
Exit codes: 0 left in order, 2 could not start, 3 did not leave in time.
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
        sys.stderr.write("hutch-executor: cannot start: the process that started it is gone.\n")
        return 2
    from hutch_executor.run import run

    return run()


def _exit() -> None:
    code = main()
    import logging

    logging.shutdown()
    sys.stderr.flush()
    os._exit(code)  # a thread that hangs in a file system must not hold up the exit


if __name__ == "__main__":
    _exit()
