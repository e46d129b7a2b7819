"""bubblewrap for the tests that need it: found, installed where that can be done, else a reason to leave them out."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

__all__ = ["bubblewrap"]


def bubblewrap() -> str:
    """Return where it is; the test is skipped without it, or fails where everything must be tested (CI=true)."""
    if shutil.which("bwrap") is None and os.geteuid() == 0 and shutil.which("apt-get") is not None:
        for words in (["update"], ["install", "-y", "bubblewrap"]):
            command = ["apt-get", "-q", "-o", "DPkg::Lock::Timeout=300", *words]
            subprocess.run(command, capture_output=True, check=False)
    program = shutil.which("bwrap")
    why = "bubblewrap is not installed" if program is None else _trouble(program)
    if program is None or why:
        if os.environ.get("CI") == "true":
            pytest.fail(why)
        pytest.skip(why)
    return program


def _trouble(program: str) -> str:
    words = ["--unshare-user", "--unshare-pid", "--ro-bind", "/", "/", "--proc", "/proc", "true"]
    done = subprocess.run([program, *words], capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else f"bubblewrap cannot be used here: {done.stderr.strip()}"
