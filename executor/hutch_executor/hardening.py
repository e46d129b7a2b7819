"""What an executor does to itself before it does anything else, so that less can be read or stolen from it."""

from __future__ import annotations

import ctypes
import os
import re
import resource
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final

__all__ = ["ALLOWED_ENVIRONMENT", "harden", "replace_stdin", "scrub_environment"]

ALLOWED_ENVIRONMENT: Final = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|LANG|LANGUAGE|LC_[A-Z]+|TERM|TZ|TMPDIR|XDG_[A-Z_]+|SSL_CERT_(FILE|DIR)"
    r"|(HTTPS?|NO)_PROXY|(https?|no)_proxy"
    r"|HUTCH_(EXECUTOR_ID|LOG_LEVEL)"
)
_PR_SET_DUMPABLE: Final = 4
_PR_SET_CHILD_SUBREAPER: Final = 36
_FIRST_TO_GO: Final = "500"


def harden() -> None:
    """Leave no core, let no process of the same account look inside, lead a session, adopt orphaned descendants.

    What a platform does not have is left out. Files that the executor makes get their mode explicitly; the umask stays
    the account's, since the agent's files are made with it.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))
    with suppress(PermissionError):  # it leads one already
        os.setsid()
    if sys.platform == "linux":
        with suppress(
            OSError
        ):  # when memory runs out a session goes, not hutchd; not allowed any more once not dumpable
            Path("/proc/self/oom_score_adj").write_text(_FIRST_TO_GO)
        libc = ctypes.CDLL(None, use_errno=True)
        for option, value in ((_PR_SET_DUMPABLE, 0), (_PR_SET_CHILD_SUBREAPER, 1)):
            if libc.prctl(option, value, 0, 0, 0) != 0:
                raise OSError(ctypes.get_errno(), "prctl failed")


def scrub_environment() -> None:
    """Remove every variable that is not on the list, so that no child inherits it."""
    for name in list(os.environ):
        if not ALLOWED_ENVIRONMENT.fullmatch(name):
            del os.environ[name]


def replace_stdin() -> None:
    """Put /dev/null in the place of standard input, so that no child reads what is left of it."""
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
