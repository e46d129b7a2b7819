"""Running the service manager's commands."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from typing import Final

__all__ = ["failure_text", "try_command"]

_TIMEOUT: Final = 120.0


def try_command(argv: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, at most two minutes. A command that cannot be started has the return code 1."""
    try:
        return subprocess.run(argv, capture_output=True, text=True, check=False, timeout=_TIMEOUT, cwd="/")
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(list(argv), 1, "", str(error))


def failure_text(done: subprocess.CompletedProcess[str]) -> str:
    """Return the text that a failed command printed."""
    return (done.stderr or done.stdout).strip() or f"exit code {done.returncode}"
