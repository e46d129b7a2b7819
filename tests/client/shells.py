"""Completion in a real shell."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.preloaded import PRELOADED
from tests.programs import required_program

__all__ = ["complete_each_in_bash", "complete_in_bash", "environment"]

_BASH = """
source <(hutch completion bash)
spec=($(complete -p hutch))
for COMP_LINE; do
  COMP_POINT=${#COMP_LINE} COMP_TYPE=9 COMPREPLY=()
  "${spec[-2]}" hutch
  ((${#COMPREPLY[@]})) && printf '%s\\n' "${COMPREPLY[@]}"
  echo "<end>"
done
"""


def environment(**more: str) -> dict[str, str]:
    """Return an environment in which `hutch` is the program under test."""
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", **more}


def complete_in_bash(line: str) -> list[str]:
    """Return the completions of bash for Tab at the end of `line`, sorted."""
    return complete_each_in_bash([line])[line]


def complete_each_in_bash(lines: Sequence[str]) -> dict[str, list[str]]:
    """Return the completions of one bash for the end of each line, sorted."""
    words = [required_program("bash"), "--norc", "--noprofile", "-c", _BASH, "bash", *lines]
    env = environment(PATH=f"{PRELOADED.folder()}{os.pathsep}{os.environ['PATH']}")
    done = subprocess.run(words, capture_output=True, text=True, env=env, timeout=60, check=True)
    assert done.stderr == ""
    offers = done.stdout.split("<end>\n")[:-1]
    # a blank marks a completed word
    return {
        line: sorted(one.removesuffix(" ") for one in offer.splitlines())
        for line, offer in zip(lines, offers, strict=True)
    }
