"""Whether a directory takes more files, and why not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hutch_executor.account.space import free_space
from tests.crash.disks.disk import fill, tmpfs


def test_a_directory_with_room_takes_files_and_keeps_none(tmp_path: Path) -> None:
    """The trial leaves nothing behind, and the leftover of an earlier one does not count."""
    (tmp_path / ".hutch-space").touch()

    assert free_space(str(tmp_path)) == ""
    assert os.listdir(tmp_path) == [".hutch-space"]


def test_a_directory_that_takes_no_files_is_explained(tmp_path: Path) -> None:
    """The phrase continues a sentence about the directory."""
    assert free_space(str(tmp_path / "none")) == ": No such file or directory"


@pytest.mark.system
def test_a_full_file_system_is_explained(tmp_path: Path) -> None:
    """It says how much is left."""
    with tmpfs(tmp_path, "16m"):
        before = free_space(str(tmp_path))
        free = fill(tmp_path)
        full = free_space(str(tmp_path))
        free()

    assert before == ""
    assert "KiB left" in full
