"""Failpoints and the log of promises act only if the environment names them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

SHARED = Path(__file__).parents[2] / "shared"
PASSES = "from hutch_shared.failpoints import failpoint; [failpoint('here') for _ in range(3)]"


def run(program: str, **environment: str) -> int:
    """Run a program; return its exit code."""
    clean = {"PATH": os.environ["PATH"], "PYTHONPATH": str(SHARED)}
    return subprocess.run([sys.executable, "-c", program], env=clean | environment, timeout=60, check=False).returncode


def test_a_marked_place_kills_one_process(tmp_path: Path) -> None:
    """Only the first process that removes the file is killed; the witness log has its pid."""
    mark, notes = tmp_path / "mark", tmp_path / "notes"
    mark.touch()
    environment = {"HUTCH_FAILPOINT": "here:2", "HUTCH_FAILPOINT_MARK": str(mark), "HUTCH_WITNESS": str(notes)}

    codes = [run(PASSES, **environment) for _ in range(2)]

    assert codes == [-signal.SIGKILL, 0]
    assert not mark.exists()
    assert [line[:2] for line in map(json.loads, notes.read_text().splitlines())] == [["died", "here"]]


def test_another_place_and_no_place_kill_nobody() -> None:
    """Only the named failpoint kills."""
    codes = [run(PASSES, HUTCH_FAILPOINT="there"), run(PASSES)]

    assert codes == [0, 0]
