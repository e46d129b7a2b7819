"""Programs of the system that tests need. `scripts/prepare` installs them; a test without one is skipped."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

__all__ = ["bubblewrap", "landlock_holds", "link_programs", "required_program", "systemd_analyze", "visudo"]


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


@cache
def landlock_holds() -> bool:
    """Return whether Landlock can make a sandbox here, by the executor's own trial."""
    spec = b'{"program": "", "kind": "landlock"}'
    command = (sys.executable, "-P", "-m", "hutch_executor.sandbox")
    return subprocess.run(command, input=spec, capture_output=True, check=False).returncode == 0


def link_programs(folder: Path) -> None:
    """Link the system's programs into a folder that can be the whole PATH, all but bubblewrap."""
    for place in ("/bin", "/usr/bin", "/usr/local/bin"):
        for path in Path(place).iterdir():
            if path.name != "bwrap" and not (folder / path.name).is_symlink():
                (folder / path.name).symlink_to(path)


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
