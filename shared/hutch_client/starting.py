"""Starts the user's hutchd: detached from the terminal, its log in the state directory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from hutch_client import exits
from hutch_client.endpoint import Endpoint, dial, find_endpoint, own_hutchd
from hutch_shared.errors import HutchError, Reason
from hutch_shared.hutchd_lock import INHERITED, HutchdProcess, StartLock, find_hutchd, starting
from hutch_shared.paths import find_paths, make_private

__all__ = ["HUTCHD", "is_running", "log_path", "log_tail", "run_hutchd", "start"]

HUTCHD: Final = (sys.executable, "-P", "-m", "hutch_daemon")
"""`-P`: otherwise a directory hutch_daemon in the current directory would run."""

_LOG_LIMIT: Final = 16 << 20
_BETWEEN_LOOKS: Final = 0.02


def is_running(path: Path) -> bool:
    """Return whether a trusted hutchd answers there. HutchError NOT_ALLOWED if the server's uid is not trusted."""
    try:
        dial(path).close()
    except HutchError as error:
        if error.reason is not Reason.CONNECTION_LOST:
            raise
        return False
    return True


def _require_own(endpoint: Endpoint) -> None:
    """Raise HutchError CONNECTION_LOST unless a hutchd that this user starts would listen there."""
    if endpoint.socket != find_paths().client_socket:
        raise HutchError(
            Reason.CONNECTION_LOST,
            f"No hutchd answers at {endpoint.socket}, which HUTCH_HOST names, and yours would listen elsewhere: unset"
            " HUTCH_HOST to use your own.",
        )


def log_path() -> Path:
    """Return where a started hutchd writes its log."""
    return find_paths().state / "hutchd.log"


def start(argv: Sequence[str] = HUTCHD, *, timeout: float = 30.0) -> int | None:
    """Start hutchd and return its pid as soon as it answers; None if another hutchd runs or answered first.

    Raises HutchError CONNECTION_LOST, with the end of the log, if it ends or does not answer within `timeout` seconds;
    if it is the host's, whose place no private one takes, or another one that HUTCH_HOST names; with its pid, if one
    runs that cannot be reached.
    After a time-out it keeps running: it may only be slow. A start that is in flight already is waited for.
    """
    endpoint = find_endpoint()
    path, state = endpoint.socket, find_paths().state
    deadline = time.monotonic() + timeout
    try:
        dial(path).close()
    except HutchError as error:
        if error.reason is not Reason.CONNECTION_LOST or endpoint.kind == "host":
            raise
    else:
        _require_going(own_hutchd(path))
        return None
    _require_own(endpoint)
    make_private(state)
    while True:
        found = find_hutchd(state)
        _require_going(found)
        if is_running(path):
            return None
        if found is None:
            with starting(state) as lock:
                if lock is not None:
                    return _start(argv, path, lock, timeout)
        elif time.monotonic() > deadline:
            raise HutchError(Reason.CONNECTION_LOST, f"Nothing answers at {path}: {found.sentence()}")
        time.sleep(_BETWEEN_LOOKS)


def _require_going(found: HutchdProcess | None) -> None:
    if found is not None and found.state == "stopped":
        raise HutchError(Reason.CONNECTION_LOST, found.sentence())


def _start(argv: Sequence[str], path: Path, lock: StartLock, timeout: float) -> int | None:
    """Start hutchd, which holds `lock` from then on until it serves; see `start`."""
    log = log_path()
    if log.exists() and log.stat().st_size > _LOG_LIMIT:
        log.replace(log.with_suffix(".log.1"))
    with open(os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600), "wb") as output:
        begin = output.seek(0, os.SEEK_END)
        daemon = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd="/",
            env={**os.environ, INHERITED: str(lock.descriptor)},
            pass_fds=[lock.descriptor],
            start_new_session=True,
        )
    lock.write(daemon.pid)
    lock.release()
    deadline = time.monotonic() + timeout
    while True:
        ended = daemon.poll() is not None  # before `is_running`: if ours has ended, another hutchd answers
        if is_running(path):
            if ended:
                return None
            daemon.returncode = 0  # it outlives this process: Popen must not wait for it
            return daemon.pid
        if ended and daemon.returncode == -signal.SIGTERM:
            raise HutchError(Reason.CONNECTION_LOST, f"hutchd (pid {daemon.pid}) was stopped while it started.")
        if ended:
            raise HutchError(Reason.CONNECTION_LOST, f"hutchd did not start. {log} ends with:\n{log_tail(log, begin)}")
        if time.monotonic() > deadline:
            raise HutchError(
                Reason.CONNECTION_LOST,
                f"hutchd (pid {daemon.pid}) has not answered in {timeout:g} s. It is still starting: its log is {log}.",
            )
        time.sleep(_BETWEEN_LOOKS)


def log_tail(log: Path, begin: int = 0, lines: int = 20) -> str:
    """Return the last lines of the log, of the part after byte `begin`."""
    with open(log, "rb") as file:
        file.seek(max(begin, log.stat().st_size - (64 << 10)))
        return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])


def run_hutchd(option: str, *, system: bool) -> str:
    """Run hutchd with `--check`, `--config` or another option that only prints; return the output.

    HutchError INVALID_PARAMS if it cannot use its settings, INTERNAL if it fails.
    """
    done = subprocess.run([*HUTCHD, option, *(["--system"] if system else [])], capture_output=True, text=True)
    if done.returncode == exits.OK:
        return done.stdout
    error = done.stderr.strip()
    if done.returncode == exits.USAGE:
        raise HutchError(Reason.INVALID_PARAMS, error.removeprefix("hutchd: "))
    last = error.splitlines()[-1] if error else str(done.returncode)
    raise HutchError(Reason.INTERNAL, f"`hutchd {option}` failed: {last}")
