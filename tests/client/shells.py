"""Completion in a real shell."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.programs import required_program

__all__ = ["complete_in_bash", "environment"]

_BASH = """
source <(hutch completion bash)
COMP_LINE=$1 COMP_POINT=${#1} COMP_TYPE=9
spec=($(complete -p hutch))
"${spec[-2]}" hutch
((${#COMPREPLY[@]})) && printf '%s\\n' "${COMPREPLY[@]}"
true
"""


def environment(**more: str) -> dict[str, str]:
    """Return an environment in which `hutch` is the program under test."""
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", **more}


def complete_in_bash(line: str) -> list[str]:
    """Return what bash offers when Tab is pressed at the end of `line`, sorted."""
    words = [required_program("bash"), "--norc", "--noprofile", "-c", _BASH, "bash", line]
    done = subprocess.run(words, capture_output=True, text=True, env=environment(), timeout=60, check=True)
    assert done.stderr == ""
    return sorted(line.removesuffix(" ") for line in done.stdout.splitlines())  # a blank marks a completed word
