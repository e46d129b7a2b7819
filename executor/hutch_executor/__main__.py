"""`python -m hutch_executor` runs one executor: it reads its boot line from standard input and dials hutchd.

With `--reaper` it forks first: the parent becomes the reaper, which has nothing of the executor but its exit code. The
executor hardens itself before any slow import. If standard input is a socket, it then writes one byte to report that,
with its pid. The environment checks the hardening before it sends the boot line with the token; meanwhile the executor
imports the rest. Exit codes: 0 ended in order, 2 could not start, 3 did not end in time.
"""

from __future__ import annotations

import os
import sys

from hutch_executor.process.hardening import announce, harden
from hutch_executor.process.reaper import REAPER_OPTION, Reaper, fork_reaper

__all__ = ["main"]


def main(reaper: Reaper | None = None) -> int:
    """Run an executor to its end; return the exit code."""
    harden()
    if not announce(0):
        sys.stderr.write("hutch-executor: cannot start: the process that started it is gone.\n")
        return 2
    from hutch_executor.run import run

    return run(reaper)


def _exit() -> None:
    reaper = fork_reaper() if REAPER_OPTION in sys.argv else None
    code = main(reaper)
    import logging

    logging.shutdown()
    sys.stderr.flush()
    if reaper is not None:
        reaper.report_end(code)
    os._exit(code)  # a thread that hangs in a file system must not hold up the exit


if __name__ == "__main__":
    _exit()
