"""Runs in a sandbox of Landlock, in its working directory: `landlock_attempts.py ROOT PID PORT`. Prints the outcomes.

ROOT holds a secret, a socket and a shown folder; PID and PORT are of a process outside. Each outcome is `done` or the
name of the error.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path


def attempt(act: Callable[[], object]) -> str:
    """Do it and return what happened."""
    try:
        act()
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    return "done"


def dial(family: int, address: tuple[str, int] | str) -> None:
    """Connect to the address."""
    with socket.socket(family) as one:
        one.connect(address)


def main() -> None:
    """Attempt everything."""
    root, pid, port = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    work, shown = Path.cwd(), root / "shown" / "file"
    for name in ("one", "two"):
        (work / name).mkdir()
    (work / "one" / "file").write_text("x")
    acts: dict[str, Callable[[], object]] = {
        "read": (root / "secret").read_text,
        "list": lambda: os.listdir(root),
        "write": lambda: (root / "new").write_text("x"),
        "append": lambda: os.close(os.open(shown, os.O_WRONLY | os.O_APPEND)),
        "truncate": lambda: os.truncate(shown, 0),
        "chmod": lambda: os.chmod(root / "secret", 0o644),
        "chmod shown": lambda: os.chmod(shown, 0o600),
        "remove": lambda: os.remove(shown),
        "link": lambda: os.link(root / "secret", "stolen"),
        "move out": lambda: os.rename("one", root / "moved"),
        "environ": Path(f"/proc/{pid}/environ").read_bytes,
        "signal": lambda: os.kill(pid, 0),
        "abstract": lambda: dial(socket.AF_UNIX, f"\0hutch-test-{pid}"),
        "unix": lambda: dial(socket.AF_UNIX, str(root / "secret.sock")),
        "tcp": lambda: dial(socket.AF_INET, ("127.0.0.1", port)),
        "look": shown.read_text,
        "work": lambda: (work / "made").write_text("x"),
        "chmod own": lambda: os.chmod(work / "made", 0o755),
        "truncate own": lambda: os.truncate(work / "made", 0),
        "move": lambda: os.rename("one/file", "one/other"),
        "move between": lambda: os.rename("one/other", "two/other"),
    }
    print(json.dumps({name: attempt(act) for name, act in acts.items()}))


if __name__ == "__main__":
    main()
