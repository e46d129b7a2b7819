"""The logs of the harness: each sign of a bug is reported with the lines around it and the kill before it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.crash.harness.logs import AFTER, BEFORE, PER_LOG, SIGNS, Logs
from tests.crash.harness.verdict import Kill

TRACE = b"Traceback (most recent call last):\n  File x\nValueError: y\n"
FIRST, SECOND = Kill(1, "hutchd 7", 1.0), Kill(2, "executor x-1 (8)", 2.5, "turn.end:2")


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "hutchd.log"


@pytest.fixture
def logs(tmp_path: Path, log: Path) -> Logs:
    return Logs(tmp_path / "logs", lambda: [log])


def test_a_bug_is_reported_with_its_lines_and_the_kill_before_it(log: Path, logs: Logs) -> None:
    """Lines written after the sign was noticed are included."""
    log.write_bytes(b"".join(b"line %d\n" % number for number in range(9)))
    logs.scan(FIRST)
    with log.open("ab") as file:
        file.write(TRACE[:40])
        file.flush()
        logs.scan(FIRST)
        file.write(TRACE[40:])
    logs.scan(SECOND)

    (bug,) = logs.violations()
    assert bug.lines == (*(f"line {number}" for number in range(9 - BEFORE, 9)), *TRACE.decode().splitlines())
    assert bug.as_json()["violation"] == (
        "bug: hutchd.log:10: Traceback (most recent call last): (after kill 1: hutchd 7 at 1.00 s)"
    )


def test_the_kill_names_the_failpoint(log: Path, logs: Logs) -> None:
    """The violation has the failpoint for which the current processes were started."""
    log.write_bytes(TRACE)
    logs.scan(SECOND)

    assert str(logs.violations()[0]).endswith("(after kill 2: executor x-1 (8) at 2.50 s, failpoint turn.end:2)")


@pytest.mark.parametrize("sign", SIGNS)
def test_each_sign_counts(log: Path, logs: Logs, sign: bytes) -> None:
    """A sign counts anywhere in a line."""
    log.write_bytes(b"before " + sign + b" after\n")
    logs.scan(None)

    assert len(logs.violations()) == 1


def test_a_chained_traceback_is_one_bug_and_a_log_has_a_few(log: Path, logs: Logs) -> None:
    """Signs within lines that are already shown are not reported again."""
    log.write_bytes(TRACE + b"During handling of the above exception, another exception occurred:\n" + TRACE)
    logs.scan(None)
    assert len(logs.violations()) == 1

    log.write_bytes(log.read_bytes() + (b"x\n" * AFTER + TRACE) * (PER_LOG + 2))
    logs.scan(None)
    assert len(logs.violations()) == PER_LOG


def test_a_log_that_was_removed_is_kept(log: Path, logs: Logs) -> None:
    """hutchd removes the logs of executors that are gone; the copies remain."""
    log.write_bytes(b"an ordinary line\n")
    logs.scan(None)
    log.unlink()
    logs.scan(None)

    assert (logs.folder / "hutchd.log").read_bytes() == b"an ordinary line\n"
    assert logs.violations() == []
