"""Stopping a hutchd that no client reaches: it is found by its locks and ended by a signal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from hutch_client.__main__ import main
from hutch_client.tables import count
from hutch_shared.hutchd_lock import DATABASE_LOCK, RESTORES, starting
from hutch_shared.process_record import RecordedProcess, write_record
from hutch_shared.processes import start_time

HOLD = """
import fcntl, os, sys
lock = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
fcntl.flock(lock, fcntl.LOCK_EX)
os.write(lock, " ".join([str(os.getpid()), *sys.argv[2:]]).encode() + b"\\n")
print(flush=True)
sys.stdin.read()
"""

ANSWER = """
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as listening:
    listening.bind(sys.argv[1])
    listening.listen()
    print(flush=True)
    line, _ = listening.accept()
    for frame in line.makefile("rb"):
        asked = json.loads(frame)
        answer = {"jsonrpc": "2.0", "id": asked["id"], "result": {"pid": os.getpid()}}
        line.sendall(json.dumps(answer).encode() + b"\\n")
        if asked["method"] == "stop_daemon":
            line.shutdown(socket.SHUT_WR)
    print("closed")
"""
"""Stops like hutchd: it closes the connection, and ends when the client has closed it too."""


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clean_environment: None) -> Path:
    """A state directory that HUTCH_STATE_DIR names; nothing listens in it."""
    made = tmp_path / "state"
    made.mkdir(0o700)
    monkeypatch.setenv("HUTCH_STATE_DIR", str(made))
    return made


@contextmanager
def starting_hutchd(state: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process that has inherited the lock of its start, and does nothing more."""
    with starting(state) as lock:
        assert lock is not None
        process = subprocess.Popen(["cat"], stdin=subprocess.PIPE, pass_fds=[lock.descriptor])
        lock.write(process.pid)
    with ending(process):
        yield process


@contextmanager
def unreachable_hutchd(state: Path, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process that holds the lock of the database, has written its pid and `words` there, and does nothing."""
    argv = [sys.executable, "-c", HOLD, str(state / DATABASE_LOCK), *words]
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with ending(process):
        assert process.stdout is not None
        process.stdout.readline()
        yield process


@contextmanager
def ending(process: subprocess.Popen[bytes]) -> Iterator[None]:
    with process:
        try:
            yield
        finally:
            process.kill()


@pytest.mark.parametrize("hutchd", [starting_hutchd, unreachable_hutchd])
def test_a_hutchd_that_cannot_be_asked_is_terminated(
    state: Path, hutchd: Callable[[Path], AbstractContextManager[subprocess.Popen[bytes]]]
) -> None:
    """One that has opened nothing yet at once, another one when it stays unreachable for some seconds."""
    with hutchd(state) as process:
        code = main(["daemon", "stop", "--stop", "--timeout", "1"])

        assert code == 0
        assert process.wait() == -signal.SIGTERM


def test_a_stop_does_not_hold_up_the_hutchd_that_it_waits_for(state: Path) -> None:
    """hutchd ends when its clients have closed their connections; so the stop closes its own first."""
    socket_path = state / "run" / "client.sock"
    socket_path.parent.mkdir(0o700)
    argv = [sys.executable, "-c", ANSWER, str(socket_path)]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE)
    with ending(process):
        assert process.stdout is not None
        process.stdout.readline()
        reaper = threading.Thread(target=process.wait)  # a zombie counts as gone
        reaper.start()
        code = main(["daemon", "stop", "--stop", "--timeout", "1"])
        reaper.join()

        assert code == 0
        assert process.stdout.read() == b"closed\n"


@pytest.mark.parametrize("how", ["--drain", "--stop"])
def test_a_restore_is_named_and_left_alone(state: Path, capsys: pytest.CaptureFixture[str], how: str) -> None:
    """It ends by itself; a signal would stop it between two steps."""
    with unreachable_hutchd(state, RESTORES) as process:
        code = main(["daemon", "stop", how])
        assert process.poll() is None

    assert code == 3
    named = f"hutchd (pid {process.pid}) replaces the database by a backup. Try again when it has ended.\n"
    assert capsys.readouterr().err.endswith(named)


@pytest.mark.parametrize(("number", "words"), [(1, "1 process"), (2, "2 processes"), (1000, "1,000 processes")])
def test_processes_are_counted_in_words(number: int, words: str) -> None:
    """The plural is that of the noun."""
    assert count(number, "process") == words


def test_what_a_hutchd_that_is_gone_has_left_is_named_and_ended(
    state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the record of its processes; a process that has the pid of a recorded one since then is left alone."""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as left, ending(left):
        started = start_time(left.pid)
        assert started is not None
        recorded = RecordedProcess("executor e-1", left.pid, started, "s-1")
        write_record(state, [recorded, RecordedProcess("hutch-broker", os.getpid(), 1)])

        codes = [main(["daemon", "stop"])]
        named = capsys.readouterr().err
        codes.append(main(["daemon", "stop", "--stop"]))
        ended = capsys.readouterr().err

        assert left.wait() == -signal.SIGTERM
    codes.append(main(["daemon", "stop", "--stop"]))
    nothing = capsys.readouterr().err
    assert codes == [0, 0, 0]
    assert nothing == "No hutchd runs, and nothing of it is left.\n"
    assert f"Left running:\n  executor e-1 (pid {left.pid}), session s-1\n" in named
    assert "hutch-broker" not in named
    assert ended == "Ended what an earlier hutchd had left: 1 process.\n"
