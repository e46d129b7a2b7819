"""Processes, and the peers of Unix sockets, as the kernel reports them. Nothing here needs an event loop."""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
import sys
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

from hutch_shared.errors import HutchError, Reason

__all__ = [
    "Credentials",
    "ancestors",
    "boot_id",
    "cgroup_parts",
    "cpu_time",
    "is_stopped",
    "peer_credentials",
    "require_live_peer",
    "start_time",
    "variable_of",
]

_LOOKS: Final = 10
_SO_PEERPIDFD: Final = 77  # Linux 6.5; asm-generic/socket.h
_SOL_LOCAL: Final = 0  # macOS: sys/un.h
_LOCAL_PEERCRED: Final = 1
_LOCAL_PEERPID: Final = 2
_XUCRED: Final = struct.Struct("=IIh2x16I")  # macOS: cr_version, cr_uid, cr_ngroups, cr_groups


# ---------------------------------------------------------------- peers


class Credentials(NamedTuple):
    """The peer's ids when it connected or began to listen. The pid may belong to another process by now."""

    uid: int
    gid: int
    pid: int


def peer_credentials(sock: socket.socket) -> Credentials:
    """Return the credentials of the peer; `not_allowed` if the kernel does not report them."""
    try:
        if sys.platform == "darwin":
            _, uid, _, gid, *_ = _XUCRED.unpack(sock.getsockopt(_SOL_LOCAL, _LOCAL_PEERCRED, _XUCRED.size))
            pid = sock.getsockopt(_SOL_LOCAL, _LOCAL_PEERPID)
        else:
            size = struct.calcsize("iII")
            pid, uid, gid = struct.unpack("iII", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    except (OSError, struct.error) as error:
        raise HutchError(Reason.NOT_ALLOWED, "The system does not report the peer of this connection.") from error
    if pid <= 0 or uid == 2**32 - 1:
        raise HutchError(
            Reason.NOT_ALLOWED, "The peer of this connection is not visible here (another pid or user namespace)."
        )
    return Credentials(uid, gid, pid)


def require_live_peer(sock: socket.socket) -> None:
    """Raise `not_allowed` if the process of the peer has ended, since its pid may be reused.

    With a pidfd of the peer (Linux 6.5) this is certain; elsewhere a pid reused before this call goes unnoticed.
    """
    try:
        pidfd = sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD) if sys.platform == "linux" else None
    except OSError as error:
        if error.errno != errno.ENOPROTOOPT:
            raise HutchError(Reason.NOT_ALLOWED, "The process that made this connection has ended.") from error
        pidfd = None
    try:
        gone = start_time(peer_credentials(sock).pid) is None or (pidfd is not None and _has_ended(pidfd))
    finally:
        if pidfd is not None:
            os.close(pidfd)
    if gone:
        raise HutchError(Reason.NOT_ALLOWED, "The process that made this connection has ended.")


def _has_ended(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


# ---------------------------------------------------------------- processes


@cache
def boot_id() -> str:
    """Return the id of this boot of the machine."""
    if sys.platform == "darwin":
        import subprocess

        found = subprocess.run(["/usr/sbin/sysctl", "-n", "kern.bootsessionuuid"], capture_output=True, check=True)
        return found.stdout.decode().strip()
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def start_time(pid: int) -> int | None:
    """Return the start time of process `pid`; None if it does not exist or is a zombie."""
    if sys.platform == "darwin":
        import subprocess
        from datetime import datetime

        found = subprocess.run(["/bin/ps", "-o", "stat=,lstart=", "-p", str(pid)], capture_output=True, text=True)
        state, _, started = found.stdout.strip().partition(" ")
        if found.returncode or not state or state.startswith("Z"):
            return None
        return int(datetime.strptime(started.strip(), "%a %b %d %H:%M:%S %Y").timestamp())  # noqa: DTZ007
    fields = _stat(pid)
    return None if fields is None or fields[0] in (b"Z", b"X") else int(fields[19])


def cpu_time(pid: int) -> int:
    """Return the CPU time that process `pid` has used, in clock ticks; 0 if it is not known, as on macOS."""
    fields = _stat(pid) if sys.platform == "linux" else None
    return 0 if fields is None else int(fields[11]) + int(fields[12])


def is_stopped(pid: int) -> bool:
    """Return whether a signal such as SIGSTOP, or a debugger, has stopped process `pid`."""
    if sys.platform == "darwin":
        import subprocess

        found = subprocess.run(["/bin/ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True)
        return found.stdout.strip().startswith("T")
    fields = _stat(pid)
    return fields is not None and fields[0] in (b"T", b"t")


def ancestors(pid: int) -> list[int]:
    """Return `pid` and its ancestors in this pid namespace, nearest first. Empty outside Linux.

    If a parent ends during the look-up, its children get another parent, and its pid may be reused at once. So two
    consecutive look-ups must agree. Empty if the process does not exist or the look-ups never agree.
    """
    line = _line_of(pid)
    for _ in range(_LOOKS):
        before, line = line, _line_of(pid)
        if line == before:
            return line
    return []


def _line_of(pid: int) -> list[int]:
    """Return the ancestors from one look-up; empty if a parent disappears."""
    line: list[int] = []
    while pid not in line and (fields := _stat(pid)) is not None:
        line.append(pid)
        pid = int(fields[1])
        if pid == 0:
            return line
    return []


def _stat(pid: int) -> list[bytes] | None:
    """Return the fields of /proc/PID/stat from the state on; None if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return text[text.rindex(b")") + 2 :].split()  # the name in parentheses may hold any character


def cgroup_parts(pid: int) -> tuple[str, ...]:
    """Return the components of the paths of a process's cgroups; empty if they cannot be read."""
    try:
        text = Path(f"/proc/{pid}/cgroup").read_text()
    except OSError:
        return ()
    return tuple(part for line in text.splitlines() for part in line.split(":", 2)[-1].split("/"))


def variable_of(pid: int, name: str) -> str | None:
    """Return a variable of the environment that `pid` was started with; None if it is missing or cannot be read."""
    try:
        environ = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return None
    prefix = os.fsencode(name) + b"="
    for item in environ.split(b"\0"):
        if item.startswith(prefix):
            return os.fsdecode(item[len(prefix) :])
    return None
