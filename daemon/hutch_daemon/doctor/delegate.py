"""Runs examinations as another account, in a separate process that has only the rights of that account."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from hutch_daemon.doctor.finding import Finding
from hutch_shared.reach import PathReader, closed

__all__ = ["ask_as", "run_as"]

_SERVICE: Final = (
    "import msgspec, sys; from hutch_daemon.doctor import as_service;"
    " sys.stdout.buffer.write(msgspec.json.encode(list(as_service())))"
)
_EXAMINATION: Final = 100.0
_PLACES: Final = ("HUTCH_CONFIG", "HUTCH_STATE_DIR", "HUTCH_RUNTIME_DIR")


def run_as(
    who: PathReader, command: Sequence[str], *, timeout: float, given: bytes = b"", path: str = os.defpath
) -> subprocess.CompletedProcess[bytes]:
    """Run a command as an account, with its current groups and no privilege. Only root can do this.

    The command inherits only the variables in `_PLACES`. It is killed after `timeout` seconds, with TimeoutExpired;
    OSError if it cannot be started.
    """
    environ = {"PATH": path, "HOME": who.home, "USER": who.name, "LOGNAME": who.name, "LANG": "C.UTF-8"}
    environ |= {name: os.environ[name] for name in _PLACES if name in os.environ}
    return subprocess.run(
        command,
        input=given,
        capture_output=True,
        check=False,
        timeout=timeout,
        cwd="/",
        env=environ,
        user=who.uid,
        group=who.gid,
        extra_groups=sorted(who.gids),
        umask=0o077,
        start_new_session=True,
    )


def ask_as(account: PathReader) -> Iterator[Finding]:
    """Run `as_service` under hutchd's account."""
    subject = f"examination as {account.name}"
    try:
        done = run_as(account, (sys.executable, "-P", "-c", _SERVICE), timeout=_EXAMINATION)
        found = msgspec.json.decode(done.stdout, type=list[Finding])
    except OSError as error:
        why = closed(os.path.realpath(sys.executable), account, 1) or error.strerror
        yield Finding(subject, f"It cannot run {sys.executable}: {why}. Install Hutch where it can.")
    except subprocess.TimeoutExpired:
        yield Finding(subject, f"It took longer than {_EXAMINATION:g} s.")
    except msgspec.DecodeError:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        why = closed(__file__, account) or " ".join(last) or f"exit code {done.returncode}"
        yield Finding(subject, f"It failed: {why}.")
    else:
        yield from found
