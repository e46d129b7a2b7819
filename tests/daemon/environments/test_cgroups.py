"""A cgroup of an executor: what a kill does if the cgroup cannot be searched."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from hutch_daemon.environments.cgroups import Cgroup


def test_a_cgroup_that_cannot_be_searched_does_not_stay_frozen(tmp_path: Path) -> None:
    """With the version 1 freezer, a kill that fails thaws the processes again."""
    (tmp_path / "freezer.state").write_text("THAWED")
    (tmp_path / "cgroup.procs").mkdir()

    with pytest.raises(OSError, match="directory"):
        Cgroup(tmp_path, 1).kill(time.monotonic())

    assert (tmp_path / "freezer.state").read_text() == "THAWED"
