"""What counts as a difference of the machine after tests."""

from __future__ import annotations

from types import ModuleType

import pytest

from tests.scripts import load_script


@pytest.fixture(scope="module")
def machine() -> ModuleType:
    """The script, imported."""
    return load_script("machine")


@pytest.mark.parametrize("path", ["/opt/hutch-test-1", "/tmp/hutch-1"])
def test_what_a_killed_run_left_may_go_and_must_not_come(machine: ModuleType, path: str) -> None:
    """A run may remove the leftovers of an earlier one; the same file counts if it is new."""
    empty: dict[str, list[str]] = {"files": []}
    there = {"files": [path]}

    assert machine.differences(there, empty) == []
    assert machine.differences(empty, there) == [f"files: new: {path}"]


def test_other_files_and_accounts_must_not_go(machine: ModuleType) -> None:
    """A file of the machine or an account that is gone counts."""
    before = {"files": ["/etc/hosts", "/opt/wheels"], "accounts": ["daemon"]}

    lines = machine.differences(before, {"files": [], "accounts": []})

    assert lines == ["files: gone: /etc/hosts", "files: gone: /opt/wheels", "accounts: gone: daemon"]
