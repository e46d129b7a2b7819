"""sudo for the tests that need it: found, installed where that can be done, else a reason to leave them out."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

__all__ = ["visudo"]


def visudo() -> str:
    """Return where visudo is, beside sudo; skipped without it, or failed where everything must be tested (CI=true)."""
    path = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"
    if shutil.which("visudo", path=path) is None and os.geteuid() == 0 and shutil.which("apt-get") is not None:
        for words in (["update"], ["install", "-y", "--no-install-recommends", "sudo"]):
            command = ["apt-get", "-q", "-o", "DPkg::Lock::Timeout=300", *words]
            subprocess.run(command, capture_output=True, check=False)
    program = shutil.which("visudo", path=path)
    if program is None:
        if os.environ.get("CI") == "true":
            pytest.fail("sudo is not installed")
        pytest.skip("sudo is not installed")
    return program
