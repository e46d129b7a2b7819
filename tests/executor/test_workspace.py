"""The folders in which sandboxes are tried: what killed probes left is removed, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from hutch_executor.sandbox.workspace import remove_abandoned, workspace

PROBE = "from hutch_executor.sandbox.workspace import workspace\nwith workspace() as w: print(w, flush=True); input()"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of temporary files."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def age(path: Path) -> None:
    """Make a folder an hour old."""
    os.utime(path, (time.time() - 3600,) * 2)


def test_a_folder_is_removed_at_its_end(place: Path) -> None:
    """With what is in it."""
    with workspace() as made:
        Path(made, "tried").touch()
        assert Path(made).parent == place

    assert list(place.iterdir()) == []


def test_the_folder_of_a_killed_probe_is_removed(place: Path) -> None:
    """Not while the probe runs; not while it may be of an earlier version's probe, which takes no lock."""
    with subprocess.Popen(
        [sys.executable, "-c", PROBE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as probe:
        assert probe.stdout is not None
        made = Path(probe.stdout.readline().strip())
        age(made)
        remove_abandoned()
        during = made.exists()
        probe.kill()
    os.utime(made)
    remove_abandoned()
    young = made.exists()
    age(made)
    remove_abandoned()

    assert (during, young, made.exists()) == (True, True, False)


def test_what_is_not_an_own_closed_folder_stays(place: Path) -> None:
    """A link, a file, a folder that others can read, and a folder of another name."""
    target = place / "target"
    target.mkdir(mode=0o700)
    (place / "hutch-sandbox-link").symlink_to(target)
    (place / "hutch-sandbox-file").touch()
    (place / "hutch-sandbox-open").mkdir(mode=0o755)
    (place / "hutch-other").mkdir(mode=0o700)
    for path in place.iterdir():
        age(path)

    remove_abandoned()

    assert len(list(place.iterdir())) == 5
