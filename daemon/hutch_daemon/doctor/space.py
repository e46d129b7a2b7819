"""Examines the space for what Hutch and its agents store: the file systems, and the quota of an account."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from hutch_daemon.doctor.finding import Finding

__all__ = ["examine_space", "space"]

_LITTLE_SPACE: Final = 256 << 20
_FEW_FILES: Final = 1000
_QUOTA_SECONDS: Final = 5.0


def space(folder: Path, what: str, consequence: str) -> Finding:
    """Check that the file system of `folder` has room for data and files; `what` names the folder.

    `consequence` is a sentence about a full one. OSError if the folder cannot be looked at.
    """
    there = os.statvfs(folder)
    free = there.f_bavail * there.f_frsize
    subject = f"space: {free >> 20:,} MiB free at {what}{folder}"
    if free < _LITTLE_SPACE:
        return Finding(subject, f"Free some space: {consequence}")
    if there.f_files and there.f_favail < _FEW_FILES:
        return Finding(subject, f"Only {there.f_favail} more files fit on this disk, remove some: {consequence}")
    return Finding(subject)


def examine_space(name: str, home: str, agents: Path) -> Iterator[Finding]:
    """Examine the home of the account `name`, the directory of its agents' conversations, and its quota.

    Blocks for as long as the file systems do, and up to `_QUOTA_SECONDS` for `quota`, if that is installed.
    """
    agents = next(folder for folder in (agents, *agents.parents) if os.path.exists(folder))  # no error if hidden
    lost = "an agent does not keep its conversation when it is full, and then begins a new one."
    if _same_disk(Path(home), agents):
        places = {"the home ": (Path(home), f"programs of agents fail there when it is full, and {lost}")}
    else:
        places = {"the home ": (Path(home), "programs of agents fail there when it is full.")}
        places["the agents' conversations, "] = (agents, lost)
    for what, (folder, consequence) in places.items():
        try:
            yield space(folder, what, consequence)
        except OSError as error:
            yield Finding(f"space: {what}{folder}", f"It cannot be examined: {error.strerror}.")
    if over := _over_quota(name):
        yield Finding(f"quota of {name}", f"The account has used it up: remove files, or raise it. {over}")


def _same_disk(one: Path, other: Path) -> bool:
    try:
        return one.stat().st_dev == other.stat().st_dev
    except OSError:
        return False


def _over_quota(name: str) -> str:
    """Return what quota(1) says of the file systems on which an account has exceeded its quota; "" if there are none.

    An account without rights may ask for itself only.
    """
    quota = shutil.which("quota")
    if quota is None:
        return ""
    try:
        done = subprocess.run(
            [quota, "-q", "-w", "-u", name],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_QUOTA_SECONDS,
            cwd="/",
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return " ".join(done.stdout.split())[:300]
