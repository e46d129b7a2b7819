"""Takes too many resources. Each kind has a bound, for machines without limits. Standard library only.

    hog.py KIND FOLDER SECONDS

`memory`: up to 512 MiB. `fork`: 300 processes. `bomb`: 60 that fork without end. `disk`: 64 MiB a round; `sync`: each
round is on the disk before the next. `descriptors`: 20 processes that each open all they may, also connections to
$SOCKET. `every`: bomb, memory, disk and descriptors at once, repeatedly. For comparison, `busy` computes on one
processor and `build` on all. It creates FOLDER/ready when it has begun, and prints as JSON what it got.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

KIND, FOLDER, SECONDS = sys.argv[1], Path(sys.argv[2]), float(sys.argv[3])
MOST_MEMORY = 512 << 20
MOST_DISK = 64 << 20
DEADLINE = time.monotonic() + SECONDS


def ready() -> None:
    """Create the file that shows that it has begun."""
    (FOLDER / "ready").touch()


def memory() -> dict[str, object]:
    """Allocate memory until the bound, or until it is stopped."""
    ready()
    held = []
    for _ in range(MOST_MEMORY >> 20):
        piece = bytearray(1 << 20)
        for at in range(0, len(piece), 4096):
            piece[at] = 1
        held.append(piece)
    return {"MiB": len(held)}


def fork() -> dict[str, object]:
    """Start processes that stay; count those that are refused."""
    pids, refused = [], 0
    for _ in range(300):
        try:
            pid = os.fork()
        except OSError:
            refused += 1
            continue
        if pid == 0:
            signal.alarm(int(SECONDS) + 1)
            signal.pause()
        pids.append(pid)
    ready()
    return {"started": len(pids), "refused": refused}


def bomb() -> dict[str, object]:
    """Fork without pause in 60 processes."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for _ in range(60):
        with contextlib.suppress(OSError):
            if os.fork() == 0:
                while time.monotonic() < DEADLINE:
                    with contextlib.suppress(OSError):
                        if os.fork() == 0:
                            os._exit(0)
                os._exit(0)
    ready()
    time.sleep(max(0.0, DEADLINE - time.monotonic()))
    return {}


def disk(sync: bool = False) -> dict[str, object]:
    """Rewrite one file."""
    ready()
    rounds = 0
    with contextlib.suppress(OSError):
        while time.monotonic() < DEADLINE:
            with (FOLDER / "filler").open("wb") as file:
                for _ in range(MOST_DISK >> 20):
                    file.write(os.urandom(1 << 10) * 1024)
                if sync:
                    file.flush()
                    os.fsync(file.fileno())
            rounds += 1
    (FOLDER / "filler").unlink(missing_ok=True)
    return {"rounds": rounds}


def sync() -> dict[str, object]:
    """Rewrite one file; sync each round."""
    return disk(True)


def descriptors() -> dict[str, object]:
    """In 20 processes, open as many descriptors as possible, and keep them open."""
    where = os.environ.get("SOCKET", "")
    (FOLDER / "held").write_text("")
    for number in range(20):
        if os.fork() == 0:
            held: list[object] = []
            connected = 0
            with contextlib.suppress(OSError):
                for at in range(100_000):
                    if at % 4 == 0 and where and connected < 200:
                        line = socket.socket(socket.AF_UNIX)
                        line.settimeout(1)
                        held.append(line)
                        with contextlib.suppress(OSError):
                            line.connect(where)
                            connected += 1
                    else:
                        held.extend(os.pipe() if at % 2 else (os.open("/dev/null", os.O_RDONLY),))
            with contextlib.suppress(OSError):
                os.close(0)
                with open(FOLDER / "held", "a") as out:
                    out.write(f"{len(held)} ")
            if number == 0:
                ready()
            time.sleep(max(0.0, DEADLINE - time.monotonic()))
            os._exit(0)
    time.sleep(max(0.0, DEADLINE - time.monotonic()))
    counts = [int(word) for word in (FOLDER / "held").read_text().split()]
    return {
        "held": max(counts, default=0),
        "processes": len(counts),
        "limit": resource.getrlimit(resource.RLIMIT_NOFILE),
    }


def build() -> dict[str, object]:
    """Compute on every processor, as a compiler does."""
    for _ in range(len(os.sched_getaffinity(0)) - 1):
        if os.fork() == 0:
            busy()
            os._exit(0)
    return busy()


def busy() -> dict[str, object]:
    """Compute on one processor."""
    ready()
    count = 0
    while time.monotonic() < DEADLINE:
        count += 1
    return {"count": count}


def every() -> dict[str, object]:
    """Run all kinds at once; start one again if the kernel kills it."""
    kinds = ("memory", "bomb", "disk", "descriptors")
    running: dict[str, subprocess.Popen[bytes]] = {}
    begun = dict.fromkeys(kinds, 0)
    while time.monotonic() < DEADLINE:
        for kind in kinds:
            if kind not in running or running[kind].poll() is not None:
                words = [sys.executable, "-I", __file__, kind, str(FOLDER), f"{max(1.0, DEADLINE - time.monotonic())}"]
                with contextlib.suppress(OSError):
                    running[kind] = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
                    begun[kind] += 1
        time.sleep(0.05)
    return {"begun": begun}


def main() -> None:
    """Run the kind."""
    resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * MOST_DISK, 2 * MOST_DISK))
    kinds: tuple[Callable[[], dict[str, object]], ...] = (
        memory,
        fork,
        bomb,
        disk,
        sync,
        descriptors,
        busy,
        build,
        every,
    )
    print(json.dumps({do.__name__: do for do in kinds}[KIND]()), flush=True)


if __name__ == "__main__":
    main()
