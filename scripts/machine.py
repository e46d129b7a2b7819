"""Compares a machine before and after tests: `python3 scripts/machine.py (save|compare) FILE`.

`compare` prints the differences since `save` and exits 1 if there are any. It waits a few seconds for processes that
are about to end. Other programs of the machine start processes and make temporary files too, so a new process counts
only if it comes from the tests (`_is_of_tests`), and a new file in a temporary directory only if its name does
(`_NAMES`). Not counted: the caller and its ancestors, and the files that pytest keeps of a failed test (`pytest-of-*`).
"""

from __future__ import annotations

import grp
import json
import os
import pwd
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

PLACES = ("/tmp", "/var/tmp", "/dev/shm", "/opt", "/home", "/run", "/etc", "/etc/sudoers.d", "/etc/systemd/system")
PATIENCE = 15.0
"""Seconds that `compare` waits for processes that are about to end."""
# claude-UID: the folder that the CLI keeps for each account. hutch-crash-SEED: what a run of kills keeps of a
# violation, which fails that run anyway. The last pattern: the copies that useradd keeps of a file.
_PASSING = re.compile(
    r"/tmp/pytest-of-.*|/tmp/claude-[0-9]+|(/var)?/tmp/systemd-private-.*|/tmp/hutch-crash-.*"
    r"|/run/(apt|udev|utmp).*|/etc/[^/]+-"
)


_TEMPORARY = ("/tmp/", "/var/tmp/", "/dev/shm/", "/run/")
_MAY_GO = (*_TEMPORARY, "/opt/hutch-test-")
"""Tests may remove these: what is temporary, and the copy of Hutch that an earlier, killed run left behind."""
_NAMES = re.compile(r"hutch|claude|hypothesis|pytest|xdist")


def snapshot() -> dict[str, list[str]]:
    """Return the things that tests may leave behind, by kind."""
    return {
        "packages": _packages(),
        "mounts": sorted({line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()}),
        "accounts": sorted(one.pw_name for one in pwd.getpwall()),
        "groups": sorted(one.gr_name for one in grp.getgrall()),
        "cgroups": sorted(place for place, _, _ in os.walk("/sys/fs/cgroup") if "hutch" in place),
        "processes": _processes(),
        "files": sorted(
            str(path) for place in PLACES if os.path.isdir(place) for path in Path(place).iterdir()
            if not _PASSING.match(str(path)) and (not str(path).startswith(_TEMPORARY) or _NAMES.search(path.name))
        ),
    }  # fmt: skip


def _packages() -> list[str]:
    if shutil.which("dpkg-query") is None:
        return []
    words = ["dpkg-query", "-W", "-f", "${db:Status-Abbrev} ${Package} ${Version}\n"]
    return sorted(subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines())


def _processes() -> list[str]:
    parents: dict[int, int] = {}
    lines: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            except OSError:
                continue
            fields = stat.rpartition(")")[2].split()
            parents[int(entry.name)] = int(fields[1])
            lines[int(entry.name)] = f"{entry.name}@{fields[19]} {command or stat.split()[1]}"
    ours, pid = set(), os.getpid()
    while pid in parents:
        ours.add(pid)
        pid = parents[pid]
    return sorted(line for pid, line in lines.items() if pid not in ours and _is_of_tests(pid))


def _is_of_tests(pid: int) -> bool:
    """Tell whether a process belongs to a test account, or its command, environment or directory names Hutch."""
    place = Path(f"/proc/{pid}")
    try:
        uid = place.stat().st_uid
        name = pwd.getpwuid(uid).pw_name
    except (OSError, KeyError):
        return place.exists()  # its account no longer exists
    try:
        texts = [
            (place / "cmdline").read_bytes(),
            (place / "environ").read_bytes(),
            os.readlink(place / "cwd").encode(),
        ]
    except OSError:
        texts = []
    return name.startswith("hutch") or any(b"hutch" in text.lower() or b"pytest" in text for text in texts)


def differences(before: dict[str, list[str]], now: dict[str, list[str]]) -> list[str]:
    """Return a line for each new thing, and for each missing one of a kind that matters.

    Processes, cgroups and the files of `_MAY_GO` may go.
    """
    lines = []
    for kind, there in now.items():
        lines += [f"{kind}: new: {one}" for one in there if one not in before[kind]]
        if kind not in ("processes", "cgroups"):
            gone = [one for one in before[kind] if one not in there and not one.startswith(_MAY_GO)]
            lines += [f"{kind}: gone: {one}" for one in gone]
    return lines


def main() -> int:
    """Save or compare."""
    what, file = sys.argv[1], Path(sys.argv[2])
    if what == "save":
        file.write_text(json.dumps(snapshot()))
        return 0
    before = json.loads(file.read_text())
    until = time.monotonic() + PATIENCE
    while (found := differences(before, snapshot())) and time.monotonic() < until:
        time.sleep(0.5)
    for line in found:
        print(f"machine: {line}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
