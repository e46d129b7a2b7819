"""Starts executors in turn by hutch-launcher and by a plain fork and exec, and prints the seconds of each as JSON.

    starter.py SOCKET UID ROUNDS BALLAST

Runs as the account that the launcher serves, with the interpreter of the executors that it starts. A start is complete
once the executor is ready for its boot line. BALLAST is the memory of this process in MiB.
"""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import time
from pathlib import Path

from hutch_daemon.environments.launcher_client import LauncherClient, LauncherStatus, Started
from hutch_shared.ids import new_id

ARGV = (sys.executable, "-P", "-m", "hutch_executor")


def by_launcher(launcher: LauncherClient, uid: int, output: int) -> tuple[float, float]:
    """Start an executor; return the seconds until the launcher answered and until the executor was ready."""
    executor = new_id("executor")
    began = time.perf_counter()
    started = launcher.start(uid, executor, output, memory=1 << 30, pids=512)
    assert isinstance(started, Started), started
    answered = time.perf_counter() - began
    try:
        wait_ready(started.sock)
        return answered, time.perf_counter() - began
    finally:
        started.sock.close()
        os.close(started.pidfd)
        while launcher.kill(uid, executor).status is LauncherStatus.NOT_YET:
            time.sleep(0.001)


def plainly(output: int) -> tuple[float, float]:
    """Start an executor as this account."""
    ours, theirs = socket.socketpair()
    began = time.perf_counter()
    with subprocess.Popen(
        ARGV, stdin=theirs.fileno(), stdout=output, stderr=output, cwd="/", env={"PATH": os.defpath, "HOME": "/"}
    ) as process:
        answered = time.perf_counter() - began
        theirs.close()
        try:
            wait_ready(ours)
            return answered, time.perf_counter() - began
        finally:
            ours.close()
            process.kill()


def wait_ready(sock: socket.socket) -> None:
    """Wait for the byte with which an executor says that it is ready."""
    assert select.select([sock], [], [], 60.0)[0], "it did not come up"
    assert sock.recv(1) == b"\n", "it ended before it was ready"


def main() -> None:
    """Measure and print."""
    path, uid, rounds, ballast = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    held = bytearray(ballast << 20)
    held[::4096] = b"x" * len(held[::4096])  # touches every page
    output = os.open("/dev/null", os.O_WRONLY)
    reader, writer = os.pipe()
    launcher = LauncherClient(path)
    seconds: dict[str, list[tuple[float, float]]] = {"launcher": [], "plain": []}
    for _ in range(rounds):
        seconds["launcher"].append(by_launcher(launcher, uid, writer))
        seconds["plain"].append(plainly(output))
    launcher.close()
    os.close(reader)
    print(json.dumps(seconds))


if __name__ == "__main__":
    main()
