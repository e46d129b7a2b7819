"""What an executor does to itself before it does anything else, so that less can be read or stolen from it."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Final

from hutch_shared.hardening import adopt_orphans, forbid_dumps

__all__ = ["ALLOWED_ENVIRONMENT", "harden", "replace_stdin", "scrub_environment"]

ALLOWED_ENVIRONMENT: Final = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|LANG|LANGUAGE|LC_[A-Z]+|TERM|TZ|TMPDIR|XDG_[A-Z_]+|SSL_CERT_(FILE|DIR)"
    r"|(HTTPS?|NO)_PROXY|(https?|no)_proxy"
    r"|HUTCH_(EXECUTOR_ID|LOG_LEVEL)"
)
_FIRST_TO_GO: Final = "500"


def harden() -> None:
    """Leave no core, let no process of the same account look inside, lead a session, adopt orphaned descendants.

    What a platform does not have is left out. Files that the executor makes get their mode explicitly; the umask stays
    the account's, since the agent's files are made with it.
    """
    with suppress(PermissionError):  # it leads one already
        os.setsid()
    with suppress(OSError):  # when memory runs out a session goes, not hutchd; not allowed once not dumpable
        Path("/proc/self/oom_score_adj").write_text(_FIRST_TO_GO)
    forbid_dumps()
    adopt_orphans()


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
