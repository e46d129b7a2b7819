"""Sends a starting executor its boot line, which contains the token, once no other process can read its memory.

Right after its start, an executor makes itself non-dumpable, and then writes one byte to its standard input, a socket.
hutchd checks this with the kernel: root owns the /proc entries of a process that is not dumpable. A tracer may have
attached earlier, so a traced executor gets no token. (See proc(5), and PR_SET_DUMPABLE in prctl(2).)

An executor that has a reaper is not the process that was started, but a child of it. So the kernel reports the pid of
the process that sent the byte. (See SCM_CREDENTIALS in unix(7).)
"""

from __future__ import annotations

import os
import re
import select
import socket
import struct
import sys
import time
from pathlib import Path
from typing import Final

import msgspec

from hutch_daemon.environments.processes import ProcessEntry, look_up
from hutch_shared import messages as m
from hutch_shared.errors import HutchError, Reason

__all__ = ["await_ready", "hand_over", "name_senders", "read_line"]

_SENDER: Final = struct.Struct("iII")
"""The kernel's record of a sender: pid, uid, gid."""
_TRACER: Final = re.compile(rb"^TracerPid:\s*(\d+)$", re.MULTILINE)


def read_line(sock: socket.socket, deadline: float, limit: int = 64 * 1024) -> bytes:
    """Return the next line of an executor without its newline, or b"" if none arrives before `deadline`. Blocks."""
    line = b""
    while b"\n" not in line and len(line) < limit and _readable(sock, deadline):
        try:
            chunk = sock.recv(limit)
        except OSError:
            break
        if not chunk:
            break
        line += chunk
    return line.partition(b"\n")[0] if b"\n" in line else b""


def name_senders(sock: socket.socket) -> None:
    """Let the kernel report who sends to `sock`, where it can. Otherwise `await_ready` takes the started process."""
    if sys.platform == "linux":
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)


def await_ready(sock: socket.socket, started: int, uid: int, deadline: float) -> ProcessEntry:
    """Return the executor of the account `uid` once it is ready: the process `started`, or a child of that.

    Blocks up to `deadline` (monotonic). `agent_unavailable` if the executor ends, does not become ready, or another
    process answers for it. The caller has called `name_senders`, closes `sock`, and ends the executor if this raises.
    """
    if not _readable(sock, deadline):
        raise HutchError(Reason.AGENT_UNAVAILABLE, "The executor did not come up in time.")
    try:
        ready, ancillary, _, _ = sock.recvmsg(1, socket.CMSG_SPACE(_SENDER.size))
    except OSError:
        ready, ancillary = b"", []
    if ready != b"\n":
        raise HutchError(Reason.AGENT_UNAVAILABLE, "The executor ended before it was ready.")
    pid = started
    for _level, _kind, data in ancillary:  # without a pid of its own, the message has the number 0
        sender, sender_uid, _ = _SENDER.unpack(data[: _SENDER.size])
        pid = sender if sender and sender_uid == uid else started
    process = look_up(pid)
    if process is None or started not in (process.pid, process.parent):
        raise HutchError(Reason.AGENT_UNAVAILABLE, "The executor ended before it was ready.")
    return process


def hand_over(sock: socket.socket, pid: int, uid: int, boot: m.Boot, deadline: float) -> None:
    """Send the executor `pid` of the account `uid`, which is ready, its boot line. Blocks up to `deadline` (monotonic).

    `agent_unavailable` if the executor ends; `isolation_unavailable` if another process could read its memory. The
    caller closes `sock`, and ends the executor if this raises.
    """
    if (why := _why_open(pid, uid)) is not None:
        raise HutchError(Reason.ISOLATION_UNAVAILABLE, f"The executor {why}: it gets no token.")
    sock.settimeout(max(0.1, deadline - time.monotonic()))
    try:
        sock.sendall(msgspec.json.encode(boot) + b"\n")
    except OSError as error:
        raise HutchError(Reason.AGENT_UNAVAILABLE, "The executor ended before it got its boot line.") from error


def _readable(sock: socket.socket, deadline: float) -> bool:
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(max(0.0, deadline - time.monotonic()) * 1000))


def _why_open(pid: int, uid: int) -> str | None:
    """Return the reason why another process of the account could read this one's memory, or None if none can."""
    entry = Path("/proc", str(pid))
    try:
        owner = (entry / "environ").stat().st_uid  # not of `entry` itself, which always belongs to the account
        tracer = _TRACER.search((entry / "status").read_bytes())
    except FileNotFoundError:
        return None if not Path("/proc/self").exists() else "is gone"
    except OSError:
        return "cannot be examined by hutchd"
    if uid != 0 and owner == uid:  # root owns the entries of its own processes anyway
        return "has memory that processes of its account can read"
    if tracer is not None and int(tracer[1]) not in (0, os.getpid()):
        return "is traced by another process"
    return None
