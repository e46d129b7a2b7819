"""What tests may change on a machine, before and after: `python3 scripts/machine.py (save|compare) FILE`.

`compare` prints what is there now and was not, and what was there and is not, and exits 1 if there is any. It waits a
few seconds for what is on its way out. Left out: kernel threads, the caller and its ancestors, what pytest keeps of a
failed test (`pytest-of-*`), and what other programs of a machine come and go with (`_PASSING`).
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
"""Seconds that `compare` waits for what ends by itself."""
# The last: what useradd and its kin keep of a file before they change it.
_PASSING = re.compile(r"/tmp/pytest-of-.*|(/var)?/tmp/systemd-private-.*|/run/(apt|udev|utmp).*|/etc/[^/]+-")


def snapshot() -> dict[str, list[str]]:
    """Return what there is, by kind."""
    return {
        "packages": _packages(),
        "mounts": sorted({line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()}),
        "accounts": sorted(one.pw_name for one in pwd.getpwall()),
        "groups": sorted(one.gr_name for one in grp.getgrall()),
        "cgroups": sorted(place for place, _, _ in os.walk("/sys/fs/cgroup") if "hutch" in place),
        "processes": _processes(),
        "files": sorted(
            str(path) for place in PLACES if os.path.isdir(place) for path in Path(place).iterdir()
            if not _PASSING.match(str(path))
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
    return sorted(line for pid, line in lines.items() if pid not in ours and 2 not in (pid, parents[pid]))


def differences(before: dict[str, list[str]], now: dict[str, list[str]]) -> list[str]:
    """Return a line for everything that differs; a process that ended is no difference."""
    lines = []
    for kind, there in now.items():
        lines += [f"{kind}: new: {one}" for one in there if one not in before[kind]]
        lines += [f"{kind}: gone: {one}" for one in before[kind] if one not in there and kind != "processes"]
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
