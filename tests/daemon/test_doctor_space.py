"""What doctor says of the space and the quota of an account's home and of its agents' conversations."""

from __future__ import annotations

from pathlib import Path

import pytest

from hutch_daemon.doctor.space import examine_space
from tests.crash.disks.disk import fill, tmpfs

QUOTA = """#!/bin/sh
[ "$*" = '-q -w -u alice' ] && echo 'Disk quotas for user alice (uid 1001): /dev/sda1 20000* 10000 12000'
exit 1
"""


def test_room_for_both_is_fine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One disk is examined once; a directory that does not exist yet counts as the one in which it will be made."""
    monkeypatch.setenv("PATH", "/nowhere")

    found = [*examine_space("alice", str(tmp_path), tmp_path / "spool" / "agents")]

    assert [one.subject.split(" at ")[1] for one in found] == [f"the home {tmp_path}"]


def test_a_home_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest is examined."""
    monkeypatch.setenv("PATH", "/nowhere")

    home, agents = examine_space("alice", str(tmp_path / "none"), tmp_path)

    assert home.advice == "It cannot be examined: No such file or directory."
    assert "the agents' conversations" in agents.subject


def test_an_exceeded_quota_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is what quota(1) says of this account."""
    program = tmp_path / "quota"
    program.write_text(QUOTA)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")

    *_, of_alice = examine_space("alice", str(tmp_path), tmp_path)
    of_bob = [*examine_space("bob", str(tmp_path), tmp_path)]

    assert of_alice.subject == "quota of alice"
    assert "20000*" in (of_alice.advice or "")
    assert len(of_bob) == 1


@pytest.mark.system
@pytest.mark.parametrize("full", ["home", "agents", "both"])
def test_a_full_disk_is_advised_about(tmp_path: Path, full: str) -> None:
    """The advice says what happens then: programs fail, and conversations are not kept."""
    disk = tmp_path / "disk"
    disk.mkdir()
    with tmpfs(disk, "16m"):
        fill(disk)
        home = disk if full != "agents" else tmp_path
        agents = disk if full != "home" else tmp_path
        advice = [one.advice or "" for one in examine_space("alice", str(home), agents) if str(disk) in one.subject]

    assert len(advice) == 1
    assert ("programs of agents fail" in advice[0]) == (full != "agents")
    assert ("does not keep its conversation" in advice[0]) == (full != "home")
