"""hutchd's locks: what they say of a hutchd that runs, starts, stands still or is gone."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Timer

from hutch_shared.hutchd_lock import DATABASE_LOCK, HutchdProcess, find_hutchd, inherited_start, starting, try_lock
from hutch_shared.process_record import RecordedProcess, read_record, write_record
from hutch_shared.processes import start_time

HOLD = """
import fcntl, os, sys
lock = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
fcntl.flock(lock, fcntl.LOCK_EX)
os.write(lock, b"%d\\n" % os.getpid())
print(flush=True)
sys.stdin.read()
"""


@contextmanager
def holding(path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process that holds a lock and has written its pid."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield process
        finally:
            process.kill()


def test_a_hutchd_is_found_while_it_holds_its_lock(tmp_path: Path) -> None:
    """A pid in the file alone says nothing: the kernel frees the lock of a killed process."""
    assert find_hutchd(tmp_path) is None

    with holding(tmp_path / DATABASE_LOCK) as process:
        found = find_hutchd(tmp_path)
    assert found == HutchdProcess(process.pid, "running", holds_database=True)
    assert (tmp_path / DATABASE_LOCK).read_text() == f"{process.pid}\n"
    assert find_hutchd(tmp_path) is None


def test_a_hutchd_that_a_signal_stopped_is_named_with_what_helps(tmp_path: Path) -> None:
    """So is one that was stopped while it started."""
    with holding(tmp_path / DATABASE_LOCK) as process:
        os.kill(process.pid, signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        found = find_hutchd(tmp_path)
        os.kill(process.pid, signal.SIGCONT)

    assert found is not None
    assert found.state == "stopped"
    assert f"`kill -CONT {process.pid}`" in found.sentence()


def test_a_hutchd_whose_pid_is_not_visible_is_found_too(tmp_path: Path) -> None:
    """Its lock says that it lives, in another container perhaps; then no command claims that there is none."""
    with open(tmp_path / DATABASE_LOCK, "wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        found = find_hutchd(tmp_path)

    assert found == HutchdProcess(0, "running", holds_database=True)
    assert "another container" in found.sentence()


def test_a_start_is_in_flight_until_the_new_process_serves(tmp_path: Path) -> None:
    """The starter holds the lock first, then the process that inherits it; one start at a time."""
    with starting(tmp_path) as lock:
        assert lock is not None
        assert find_hutchd(tmp_path) == HutchdProcess(0, "starting", holds_database=False)
        with starting(tmp_path) as second:
            assert second is None
        with subprocess.Popen(["cat"], stdin=subprocess.PIPE, pass_fds=[lock.descriptor]) as child:
            lock.write(child.pid)
            lock.release()
            inherited = find_hutchd(tmp_path)
            assert child.stdin is not None
            child.stdin.close()
        assert inherited == HutchdProcess(child.pid, "starting", holds_database=False)
    assert find_hutchd(tmp_path) is None


def test_a_hutchd_that_nobody_started_takes_the_lock_itself(tmp_path: Path) -> None:
    """It holds the lock until it serves, and both locks together mean that it still starts."""
    lock = inherited_start(tmp_path)
    assert lock is not None
    assert find_hutchd(tmp_path) == HutchdProcess(os.getpid(), "starting", holds_database=False)
    with holding(tmp_path / DATABASE_LOCK) as process:
        assert find_hutchd(tmp_path) == HutchdProcess(process.pid, "starting", holds_database=True)
        lock.release()
        assert find_hutchd(tmp_path) == HutchdProcess(process.pid, "running", holds_database=True)


def test_a_look_does_not_keep_anybody_from_the_lock(tmp_path: Path) -> None:
    """A process that takes the lock while another one looks at it tries again."""
    looking = os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT)
    taking = os.open(tmp_path / "lock", os.O_RDWR)
    fcntl.flock(looking, fcntl.LOCK_SH)
    ends = Timer(0.02, os.close, (looking,))
    ends.start()

    assert try_lock(taking)
    ends.join()
    os.close(taking)


def test_the_record_names_the_processes_that_live(tmp_path: Path) -> None:
    """A pid with another start time is another process, and a record of another boot names none."""
    own = start_time(os.getpid())
    assert own is not None
    mine = RecordedProcess("executor x-1", os.getpid(), own, "s-1")

    write_record(tmp_path, [mine, RecordedProcess("hutch-broker", os.getpid(), own + 1)])
    assert read_record(tmp_path) == [mine]
    assert str(mine) == f"executor x-1 (pid {os.getpid()}), session s-1"

    record = tmp_path / "processes.json"
    record.write_text(record.read_text().replace('"boot": "', '"boot": "other-'))
    assert read_record(tmp_path) == []
    record.write_text("[")
    assert read_record(tmp_path) == []
    assert read_record(tmp_path / "nowhere") == []
