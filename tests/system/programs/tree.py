"""Starts processes that are hard to end, and then runs on: a tool call in its middle.

    tree.py FILE

Writes the pids of all of them to FILE: children in sessions of their own that ignore every signal, whose parents are
gone, that are stopped, and one whose first thread has ended. None of them has a variable of Hutch.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from pathlib import Path

started: list[int] = []


def idle() -> None:
    """Ignore every signal, and do nothing for ten minutes."""
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, 32, 33}:
        signal.signal(number, signal.SIG_IGN)
    time.sleep(600)


def without_first_thread() -> None:
    """End the first thread only: /proc shows the process as a zombie."""
    threading.Thread(target=time.sleep, args=(600,)).start()
    ctypes.CDLL(None).pthread_exit(0)


def stopped() -> None:
    """Stop."""
    os.kill(os.getpid(), signal.SIGSTOP)


def spawn(what: object, *, orphan: bool = False) -> None:
    """Run `what` in a process of its own session; with `orphan`, its parent ends."""
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if not orphan or os.fork() == 0:
            os.write(writer, f"{os.getpid()}\n".encode())
            os.closerange(3, 64)
            assert callable(what)
            what()
        os._exit(0)
    if orphan:
        os.wait()
    os.close(writer)
    started.append(int(os.read(reader, 20)))
    os.close(reader)


def main() -> None:
    """Start them, write the file, and run on."""
    for what in (idle, stopped, without_first_thread):
        for orphan in (False, True):
            spawn(what, orphan=orphan)
    file = Path(sys.argv[1])
    new = file.with_suffix(".new")
    new.write_text(" ".join(map(str, [os.getpid(), os.getppid(), *started])))
    new.rename(file)
    time.sleep(600)


main()
