"""systemd-analyze for the tests that need it: found, installed where that can be done, else why they are left out."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

__all__ = ["systemd_analyze"]


def systemd_analyze() -> str:
    """Return where it is; the test is skipped without it, or fails where everything must be tested (CI=true)."""
    if shutil.which("systemd-analyze") is None and os.geteuid() == 0 and shutil.which("apt-get") is not None:
        for words in (["update"], ["install", "-y", "--no-install-recommends", "systemd"]):
            command = ["apt-get", "-q", "-o", "DPkg::Lock::Timeout=300", *words]
            subprocess.run(command, capture_output=True, check=False)
    program = shutil.which("systemd-analyze")
    if program is None:
        if os.environ.get("CI") == "true":
            pytest.fail("systemd-analyze is not installed")
        pytest.skip("systemd-analyze is not installed")
    return program
