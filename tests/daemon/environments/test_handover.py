"""The boot token goes to an executor whose memory its account cannot read, and to no other process."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from hutch_daemon.environments.handover import await_ready, hand_over, name_senders
from hutch_shared import messages as m
from hutch_shared.errors import HutchError, Reason

BOOT = m.Boot("x-1", "token-that-is-secret", "/nowhere.sock", os.getuid(), "script")
CLOSED = "import ctypes, os, sys; ctypes.CDLL(None).prctl(4, 0, 0, 0, 0); os.write(0, b'\\n')\n"
OPEN = "import os, sys; os.write(0, b'\\n')\n"
ECHO = "sys.stdout.write(sys.stdin.readline()); sys.stdout.flush()"
NOBODY = 65534


@contextmanager
def running(text: str, uid: int | None = None) -> Iterator[tuple[subprocess.Popen[str], socket.socket]]:
    """Run a program with a socket as its standard input."""
    ours, theirs = socket.socketpair()
    with subprocess.Popen(
        [sys.executable, "-c", text] if uid is None else ["/usr/bin/env", "-i", "/bin/sh", "-c", text],
        stdin=theirs.fileno(),
        stdout=subprocess.PIPE,
        text=True,
        user=uid,
        group=uid,
        extra_groups=None if uid is None else [],
    ) as process:
        theirs.close()
        try:
            yield process, ours
        finally:
            ours.close()
            process.kill()


def start_up(sock: socket.socket, started: int, uid: int, deadline: float) -> int:
    """Wait until the executor is ready, and hand the boot line over; return the executor's pid."""
    process = await_ready(sock, started, uid, deadline)
    hand_over(sock, process.pid, uid, BOOT, deadline)
    return process.pid


def soon() -> float:
    """Return a deadline that this test never reaches."""
    return time.monotonic() + 30.0


def test_a_closed_process_gets_its_boot_line() -> None:
    """The whole line arrives."""
    with running(CLOSED + ECHO) as (process, sock):
        start_up(sock, process.pid, os.getuid(), soon())
        assert process.stdout is not None
        assert '"token":"token-that-is-secret"' in process.stdout.readline()


def test_a_process_that_its_account_can_read_gets_no_token() -> None:
    """The process reports that it is ready, but the kernel says that it is dumpable.

    The test uses another account, as root is exempt.
    """
    uid = NOBODY if os.getuid() == 0 else os.getuid()
    text = "printf '\\n' >&0; read line; printf %s \"$line\"" if os.getuid() == 0 else OPEN + ECHO
    with running(text, uid if os.getuid() == 0 else None) as (process, sock):
        with pytest.raises(HutchError, match="memory that processes of its account can read") as caught:
            start_up(sock, process.pid, uid, soon())
        assert caught.value.reason is Reason.ISOLATION_UNAVAILABLE
        sock.close()
        assert process.stdout is not None
        assert process.stdout.read() == ""


def test_a_traced_process_gets_no_token() -> None:
    """A tracer that attached before the process became non-dumpable could read the token."""
    tracer = """
import ctypes, os, sys, time
libc = ctypes.CDLL(None, use_errno=True)
pid = os.fork()
if pid == 0:
    libc.prctl(0x59616d61, -1, 0, 0, 0)
    libc.ptrace(0, 0, 0, 0)
    libc.prctl(4, 0, 0, 0, 0)
    os.write(0, b"\\n")
    time.sleep(600)
print(pid, flush=True)
time.sleep(600)
"""
    with running(tracer) as (process, sock):
        assert process.stdout is not None
        traced = int(process.stdout.readline())
        try:
            with pytest.raises(HutchError, match="is traced by another process"):
                start_up(sock, traced, os.getuid(), soon())
        finally:
            os.kill(traced, signal.SIGKILL)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("pass", "ended before it was ready"),
        ("import os, time; os.write(0, b'x'); time.sleep(600)", "ended before it was ready"),
        ("import time; time.sleep(600)", "did not come up in time"),
    ],
)
def test_a_process_that_does_not_get_ready_gets_no_token(text: str, says: str) -> None:
    """The process exits, sends something else, or sends nothing."""
    with running(text) as (process, sock), pytest.raises(HutchError, match=says) as caught:
        start_up(sock, process.pid, os.getuid(), time.monotonic() + (30.0 if "ended" in says else 0.3))
    assert caught.value.reason is Reason.AGENT_UNAVAILABLE


def test_a_handover_error_contains_no_token() -> None:
    """This holds even if the process exits just before it gets the line."""
    with running(CLOSED) as (process, sock):
        process.wait()
        with pytest.raises(HutchError) as caught:
            start_up(sock, process.pid, os.getuid(), soon())
        assert "secret" not in repr(caught.value)


FORKED = """
import ctypes, os, sys, time
if os.fork():
    time.sleep(600)
if sys.argv[1] == "far" and os.fork():
    os._exit(0)
ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)
os.write(0, b"\\n")
print(os.getpid(), flush=True)
time.sleep(600)
"""


def test_the_executor_is_the_child_that_answers_for_the_started_process() -> None:
    """The kernel reports the pid of the sender: with a reaper, that is a child of the process that was started."""
    with running(FORKED.replace("sys.argv[1]", "'near'")) as (process, sock):
        name_senders(sock)
        executor = start_up(sock, process.pid, os.getuid(), soon())
        assert process.stdout is not None
        answered = int(process.stdout.readline())
        os.kill(executor, signal.SIGKILL)

        assert executor == answered
        assert executor != process.pid


def test_a_process_that_is_no_child_of_the_started_one_gets_no_token() -> None:
    """A grandchild that init adopted holds the socket and answers."""
    with running(FORKED.replace("sys.argv[1]", "'far'")) as (process, sock):
        name_senders(sock)
        assert process.stdout is not None
        far = int(process.stdout.readline())
        try:
            with pytest.raises(HutchError, match="ended before it was ready"):
                start_up(sock, process.pid, os.getuid(), soon())
        finally:
            os.kill(far, signal.SIGKILL)
