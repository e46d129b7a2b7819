"""The environment variables that an executor keeps; it removes all others at its start."""

from __future__ import annotations

import os
import re
from typing import Final

__all__ = ["ALLOWED_ENVIRONMENT", "scrub_environment"]

ALLOWED_ENVIRONMENT: Final = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|LANG|LANGUAGE|LC_[A-Z]+|TERM|TZ|TMPDIR|XDG_[A-Z_]+|SSL_CERT_(FILE|DIR)"
    r"|(HTTPS?|NO)_PROXY|(https?|no)_proxy"
    r"|HUTCH_(EXECUTOR_ID|LOG_LEVEL)"
)
"""Matches the whole name of an allowed variable."""


def scrub_environment() -> None:
    """Remove every variable that is not allowed, so that no child inherits it."""
    for name in list(os.environ):
        if not ALLOWED_ENVIRONMENT.fullmatch(name):
            del os.environ[name]
