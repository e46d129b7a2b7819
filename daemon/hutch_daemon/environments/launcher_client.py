"""The client of hutch-launcher, the only privileged program: start an executor as another account, kill, sweep.

Each request and each reply is one packet of fixed size. Connections are made on demand, and again after a failure. The
launcher alone decides which program it starts, and as which accounts. Calls block until the launcher answers
(milliseconds), so make them in worker threads.

hutchd reaches the launcher in one of two ways: at the socket of its systemd unit, or by starting it with sudo, with the
connection as its standard input.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import struct
import subprocess
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from hutch_shared.errors import HutchError, Reason

__all__ = [
    "LauncherAbilities",
    "LauncherClient",
    "LauncherReply",
    "LauncherRequest",
    "LauncherStatus",
    "Started",
    "cgroup_dir",
    "read_abilities",
]

_REQUEST: Final = struct.Struct(">8sBxxxI32sQIIII56x")
_REPLY: Final = struct.Struct(">8sBxxxIIIIQ476s")
_MAGIC: Final = b"hutchL01"
_NOBODY: Final = 0xFFFF_FFFF
_NO_BOUNDS: Final = (0, 0, 0, 0, 0)
_WITH_REAPER: Final = 1
_DEADLINE: Final = 10.0
"""Seconds within which the launcher must reply."""
_STARTING: Final = 3
"""The number of connections for starts."""


class LauncherRequest(IntEnum):
    """The kinds of requests, with their numbers in a packet."""

    PROBE = 1
    START = 2
    KILL = 3
    SWEEP = 4


class LauncherStatus(IntEnum):
    """The outcome of a request."""

    DONE = 0
    NOT_YET = 1
    REFUSED = 2
    FAILED = 3


class LauncherAbilities(msgspec.Struct, frozen=True):
    """A launcher's abilities on this host, as it reports them."""

    cgroup: Literal["v2", "v1", ""] = ""
    limits: tuple[str, ...] = ()
    """The resources that it can limit, of memory, pids and cpu."""
    spool: str = ""
    """The directory with the accounts' spool directories, which are named by uid."""
    root: str = ""
    """The directory in which it makes cgroups."""
    reaper: bool = False
    """True if it can start an executor with a reaper."""
    caps: bool = False
    """True if it has the rights to become another account."""
    why: str = ""
    """A sentence about what is missing; "" if nothing is."""


@dataclass(frozen=True, slots=True)
class LauncherReply:
    """The reply to one request."""

    status: LauncherStatus
    pid: int
    left: int
    """The number of processes that are left after a kill or sweep."""
    oom: int
    """The number of processes that the kernel killed because of the memory limit."""
    full: int
    """The number of times that the limit of processes was reached."""
    start_time: int
    text: str


@dataclass(frozen=True, slots=True)
class Started:
    """A started executor. `sock` is the other end of its standard input. The caller closes `sock` and `pidfd`."""

    reply: LauncherReply
    sock: socket.socket
    pidfd: int


class LauncherClient:
    """Connections to the launcher: a few for starts, which may wait for an account's home, and one for the rest.

    Thread-safe. Starts of one account run one at a time, so that an account whose home hangs delays only itself. With
    sudo there is one connection for everything.
    """

    def __init__(self, way: Path | Sequence[str]) -> None:
        """`way` is the launcher's socket, or the sudo command that starts it."""
        self._line = _LauncherConnection(way)
        starting = [_LauncherConnection(way) for _ in range(_STARTING)] if isinstance(way, Path) else [self._line]
        self._lines = (self._line, *starting)
        self._free: queue.SimpleQueue[_LauncherConnection] = queue.SimpleQueue()
        for line in starting:
            self._free.put(line)
        self._starts_of: dict[int, threading.Lock] = {}

    def probe(self, uid: int | None = None) -> LauncherReply:
        """Ask for the launcher's abilities or, with `uid`, whether it accepts that account (`REFUSED` if not)."""
        return self._line.ask(LauncherRequest.PROBE, _NOBODY if uid is None else uid)[0]

    def start(
        self,
        uid: int,
        executor: str,
        output: int,
        *,
        memory: int | None = None,
        pids: int | None = None,
        cpu_weight: int | None = None,
        open_files: int | None = None,
        reaper: bool = False,
    ) -> Started | LauncherReply:
        """Start an executor whose output goes to the descriptor `output`. If it did not start, return the reply.

        `memory` is in bytes; None does not limit. With `reaper` the reply has the pid of the executor's reaper; only a
        launcher with that ability accepts it.
        """
        bounds = (memory or 0, pids or 0, cpu_weight or 0, open_files or 0, _WITH_REAPER if reaper else 0)
        with self._starts_of.setdefault(uid, threading.Lock()):
            line = self._free.get()
            try:
                reply, descriptors = line.ask(LauncherRequest.START, uid, executor, bounds, (output,))
            finally:
                self._free.put(line)
        if reply.status is LauncherStatus.DONE and len(descriptors) == 2:
            return Started(reply, socket.socket(fileno=descriptors[0]), descriptors[1])
        for one in descriptors:
            os.close(one)
        return reply

    def kill(self, uid: int, executor: str) -> LauncherReply:
        """Kill an executor's processes once. The status is `NOT_YET` while some are left: call again."""
        return self._line.ask(LauncherRequest.KILL, uid, executor)[0]

    def sweep(self, uid: int) -> LauncherReply:
        """Kill the remaining processes of a dedicated account once. The status is `NOT_YET` while some are left."""
        return self._line.ask(LauncherRequest.SWEEP, uid)[0]

    def close(self) -> None:
        """Close the connections. Executors keep running."""
        for line in self._lines:
            line.close()


class _LauncherConnection:
    """One connection, made on demand, and again after a failure."""

    def __init__(self, way: Path | Sequence[str]) -> None:
        self._way = way if isinstance(way, Path) else tuple(way)
        self._lock = threading.Lock()
        self._sock: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def close(self) -> None:
        with self._lock:
            self._drop()

    def ask(
        self,
        request: LauncherRequest,
        uid: int,
        executor: str = "",
        bounds: tuple[int, int, int, int, int] = _NO_BOUNDS,
        descriptors: tuple[int, ...] = (),
    ) -> tuple[LauncherReply, list[int]]:
        """Send a request; return the reply and its descriptors.

        If an existing connection fails, retry on a new one. A START is not retried once it was sent.
        """
        packet = _REQUEST.pack(_MAGIC, request, uid, executor.encode("ascii"), *bounds)
        with self._lock:
            for last in (False, True):
                fresh = self._sock is None
                try:
                    sock = self._connected()
                    socket.send_fds(sock, [packet], list(descriptors))
                except OSError as error:
                    self._drop()
                    if fresh or last:
                        raise self._unreachable(error) from error
                    continue
                try:
                    return self._answer(sock)
                except OSError as error:
                    self._drop()
                    # the launcher may have started the executor before the connection failed, so do not retry a START
                    if last or fresh or request is LauncherRequest.START:
                        raise self._unreachable(error) from error
        raise AssertionError("the second try returns or raises")

    def _answer(self, sock: socket.socket) -> tuple[LauncherReply, list[int]]:
        data, descriptors, flags, _ = socket.recv_fds(sock, _REPLY.size, 2)
        for one in descriptors:
            os.set_inheritable(one, False)
        if len(data) != _REPLY.size or flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC) or not data.startswith(_MAGIC):
            for one in descriptors:
                os.close(one)
            raise OSError("it closed the connection" if not data else "it speaks another protocol")
        _, status, pid, left, oom, full, start_time, text = _REPLY.unpack(data)
        message = text.rstrip(b"\0").decode(errors="replace")
        return LauncherReply(
            LauncherStatus(min(status, LauncherStatus.FAILED)), pid, left, oom, full, start_time, message
        ), descriptors

    def _connected(self) -> socket.socket:
        if self._sock is None:
            self._sock = self._dial(self._way) if isinstance(self._way, Path) else self._sudo(self._way)
            self._sock.settimeout(_DEADLINE)
        return self._sock

    def _dial(self, path: Path) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            sock.settimeout(_DEADLINE)
            sock.connect(os.fspath(path))
        except BaseException:
            sock.close()
            raise
        return sock

    def _sudo(self, command: Sequence[str]) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            # in a new session, because a signal to hutchd's process group must not end the launcher during a start
            self._process = subprocess.Popen(
                command,
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                start_new_session=True,
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        return ours

    def _drop(self) -> None:
        if self._sock is not None:
            self._sock.close()
            self._sock = None
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(1.0)  # the launcher, and with it sudo, ends when its connection is closed
            self._process = None

    def _unreachable(self, error: OSError) -> HutchError:
        why = error.strerror or str(error) or type(error).__name__
        if isinstance(self._way, Path):
            text = f"hutch-launcher cannot be reached at {self._way} ({why}). `hutch doctor` says what to do."
        else:
            text = (
                f"`{' '.join(self._way)}` did not start hutch-launcher ({why}). `hutch doctor --sudo` shows the rule."
            )
        return HutchError(Reason.ISOLATION_UNAVAILABLE, text)


def read_abilities(text: str) -> LauncherAbilities:
    """Return the abilities in the reply to a probe. If the reply cannot be read, the launcher has none."""
    try:
        return msgspec.json.decode(text, type=LauncherAbilities)
    except msgspec.DecodeError:
        return LauncherAbilities(why=text or "The launcher does not report its abilities.")


def cgroup_dir(reply: LauncherReply) -> str | None:
    """Return the directory of a started executor's cgroup, or None."""
    try:
        found: Any = msgspec.json.decode(reply.text)
    except msgspec.DecodeError:
        return None
    path = found.get("cgroup") if isinstance(found, dict) else None
    return path if isinstance(path, str) and path else None
