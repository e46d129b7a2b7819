"""Shells that complete: found, installed where that can be done, else a reason to leave a test out."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

__all__ = ["complete_in_bash", "environment", "shell"]

_BASH = """
source <(hutch completion bash)
COMP_LINE=$1 COMP_POINT=${#1} COMP_TYPE=9
spec=($(complete -p hutch))
"${spec[-2]}" hutch
((${#COMPREPLY[@]})) && printf '%s\\n' "${COMPREPLY[@]}"
true
"""


def shell(name: str) -> str:
    """Return where it is; the test is skipped without it, or fails where everything must be tested (CI=true)."""
    if shutil.which(name) is None and os.geteuid() == 0 and shutil.which("apt-get") is not None:
        for words in (["update"], ["install", "-y", "--no-install-recommends", name]):
            command = ["apt-get", "-q", "-o", "DPkg::Lock::Timeout=300", *words]
            subprocess.run(command, capture_output=True, check=False)
    program = shutil.which(name)
    if program is None:
        if os.environ.get("CI") == "true":
            pytest.fail(f"{name} is not installed")
        pytest.skip(f"{name} is not installed")
    return program


def environment(**more: str) -> dict[str, str]:
    """Return an environment in which `hutch` is the one under test."""
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", **more}


def complete_in_bash(line: str) -> list[str]:
    """Return what bash offers when Tab is pressed at the end of `line`, sorted."""
    words = [shell("bash"), "--norc", "--noprofile", "-c", _BASH, "bash", line]
    done = subprocess.run(words, capture_output=True, text=True, env=environment(), timeout=60, check=True)
    assert done.stderr == ""
    return sorted(
        line.removesuffix(" ") for line in done.stdout.splitlines()
    )  # set off from the next word, where it is one
