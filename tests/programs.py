"""Programs of the system that tests need. `scripts/prepare` installs them; a test without one is skipped."""

from __future__ import annotations

import os
import shutil
import subprocess
from functools import cache

import pytest

__all__ = ["bubblewrap", "required_program", "systemd_analyze", "visudo"]


def required_program(name: str) -> str:
    """Return the path of a program; skip the test if it is not installed."""
    found = shutil.which(name, path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin")
    if found is None:
        pytest.skip(f"{name} is not installed; as root, scripts/prepare installs it")
    return found


def bubblewrap() -> str:
    """Return the path of bubblewrap; skip the test if it is not installed or cannot make a sandbox here."""
    found = required_program("bwrap")
    if why := _trouble(found):
        pytest.skip(f"bubblewrap cannot be used here: {why}")
    return found


def systemd_analyze() -> str:
    """Return the path of systemd-analyze; skip the test without it."""
    return required_program("systemd-analyze")


def visudo() -> str:
    """Return the path of visudo; skip the test without it."""
    return required_program("visudo")


@cache
def _trouble(bwrap: str) -> str:
    words = ["--unshare-user", "--unshare-pid", "--ro-bind", "/", "/", "--proc", "/proc", "true"]
    done = subprocess.run([bwrap, *words], capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stderr.strip() or f"it exits {done.returncode}"
