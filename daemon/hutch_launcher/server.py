"""The loop that serves hutchd. It waits in poll(2) only, so no slow peer, home directory or process can block it."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from hutch_launcher.executors import LaunchedExecutors, PendingStart
from hutch_launcher.packets import (
    DONE,
    FAILED,
    KILL,
    NO_UID,
    NOT_YET,
    PROBE,
    REFUSED,
    START,
    TEXT_SIZE,
    LaunchReply,
    LaunchRequest,
    Refused,
    read_request,
    receive,
    send,
)
from hutch_launcher.rules import Config, ConfigFile, check_account, check_output
from hutch_launcher.sweep import Sweeps

__all__ = ["CONNECTIONS", "LaunchServer", "log"]

CONNECTIONS: Final = 8
_KILL_INTERVAL: Final = 0.02
_CAPABILITIES: Final = {"CAP_KILL": 5, "CAP_SETGID": 6, "CAP_SETUID": 7}


def log(text: str) -> None:
    """Write a line to standard error."""
    sys.stderr.write(f"hutch-launcher: {text}\n")
    sys.stderr.flush()


@dataclass(eq=False)
class LaunchConnection:
    """A connection from hutchd. While a start runs, the launcher reads no further request from it."""

    sock: socket.socket
    starting: bool = False


class LaunchServer:
    """Serves a listening socket until a signal comes, or a single connection until it ends."""

    def __init__(self, config: ConfigFile) -> None:
        """Prepare; `serve` serves."""
        self._config = config
        self._connections: list[LaunchConnection] = []
        self._starts: dict[PendingStart, LaunchConnection] = {}
        self._executors = LaunchedExecutors(config)
        self._sweeps = Sweeps()
        self._connected = time.monotonic()
        self._stopping = False

    def serve(self, listener: socket.socket | None, connection: socket.socket | None) -> None:
        """Serve until the end. Executors live on, except those whose start hutchd has not learnt of."""
        if connection is not None:
            self._admit(connection)
        wake, woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(woken)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        while not self._stopping and (listener or self._connections or self._starts or self._executors.ending):
            handlers: dict[int, Callable[[], object]] = {wake: lambda: None}
            if listener is not None:
                handlers[listener.fileno()] = partial(self._accept, listener)
            idle = [connection for connection in self._connections if not connection.starting]
            handlers |= {connection.sock.fileno(): partial(self._serve_one, connection) for connection in idle}
            handlers |= {start.failure: partial(self._finish, start) for start in self._starts}
            children = self._executors.children.items()
            handlers |= {child.pidfd: partial(self._executors.reap, executor) for executor, child in children}
            handlers |= {pidfd: partial(self._sweeps.check, uid) for uid, pidfd in self._sweeps.running().items()}
            poll = select.poll()
            for fd in handlers:
                poll.register(fd, select.POLLIN)
            for fd, _ in poll.poll(self._timeout() * 1000):
                handlers[fd]()
            self._do_timed()

    def _stop(self, *_: object) -> None:
        self._stopping = True

    def _timeout(self) -> float:
        """Return the seconds after which `_do_timed` must be called."""
        if self._executors.ending:
            return _KILL_INTERVAL
        return 1.0 if self._starts or self._sweeps else min(60.0, max(0.05, self._config.current.gone_after / 4))

    def _do_timed(self) -> None:
        """Fail late starts, check sweepers, and end executors: those marked, or all if hutchd is away too long."""
        now, gone_after = time.monotonic(), self._config.current.gone_after
        for start in [start for start in self._starts if now >= start.deadline]:
            self._finish(start, "It did not start in time.")
        self._sweeps.check_all()
        if self._connections:
            self._connected = now
        elif now - self._connected > gone_after:
            self._connected = now
            for executor in self._executors.end_all_soon():
                log(f"{executor} is ended: hutchd was not connected for {gone_after:g} s")
        for executor, left in self._executors.end_round().items():
            log(f"{executor} could not be ended: {left} processes are left")

    # ------------------------------------------------------------ connections

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):
            self._admit(listener.accept()[0])

    def _admit(self, sock: socket.socket) -> None:
        """Keep a connection from the served account, which the kernel identifies; refuse every other one."""
        sock.setblocking(False)
        config = self._config.current
        try:
            peer = struct.unpack("iII", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1]
            if peer != config.served_uid:
                raise Refused(f"Only {config.serve} may ask.")
            if len(self._connections) >= CONNECTIONS:
                raise Refused(f"There are {CONNECTIONS} connections already.")
        except (OSError, Refused) as error:
            with suppress(OSError):
                send(sock, LaunchReply(REFUSED, str(error)))
            sock.close()
        else:
            self._connections.append(LaunchConnection(sock))

    def _drop(self, connection: LaunchConnection) -> None:
        if connection in self._connections:
            self._connections.remove(connection)
            connection.sock.close()
            self._connected = time.monotonic()

    def _reply(self, to: LaunchConnection, reply: LaunchReply, descriptors: tuple[int, ...] = ()) -> bool:
        """Send a reply and return True; if that fails, drop the connection and return False."""
        try:
            send(to.sock, reply, descriptors)
        except OSError:
            self._drop(to)
            return False
        return True

    # ------------------------------------------------------------ requests

    def _serve_one(self, connection: LaunchConnection) -> None:
        """Read one packet and reply to it. A start gets its reply from `_finish`."""
        if connection not in self._connections:
            return
        descriptors: list[int] = []
        try:
            packet, descriptors, truncated = receive(connection.sock)
            if not packet and not descriptors:
                self._drop(connection)
                return
            request = read_request(packet, -1 if truncated else len(descriptors))
            if request.op == START:
                self._start(connection, request, descriptors[0])
                return
            reply = self._answer(request)
        except BlockingIOError:
            return
        except Refused as error:
            reply = LaunchReply(REFUSED, str(error))
        except OSError as error:
            reply = LaunchReply(FAILED, f"It failed: {error}.")
        finally:
            for fd in descriptors:
                os.close(fd)
        self._reply(connection, reply)

    def _answer(self, request: LaunchRequest) -> LaunchReply:
        if request.op == KILL:  # needs no configuration: an executor can always be ended
            killed = self._executors.end(request.executor)
            status, text = (NOT_YET, "Some are left.") if killed.left else (DONE, "")
            return LaunchReply(status, text, killed=killed)
        config = self._config.read()
        if request.op == PROBE:
            if request.uid != NO_UID:
                check_account(request.uid, config)
            return LaunchReply(DONE, self._abilities(config))
        account = check_account(request.uid, config)
        if account.name not in config.dedicated:
            raise Refused(f"{account.name} is not dedicated to Hutch: its user may need what it has.")
        if self._executors.runs_as(request.uid):
            raise Refused(f"An executor of {account.name} runs.")
        return self._sweeps.sweep(account, request)

    def _abilities(self, config: Config) -> str:
        """Return what the launcher can do here, as JSON that fits into a reply."""
        groups = self._executors.find_groups_again()
        missing = [name for name, number in _CAPABILITIES.items() if not _effective_capabilities() >> number & 1]
        why = f"The launcher lacks {', '.join(missing)}. " if missing else ""
        found = {"v": 1, "cgroup": groups.version, "limits": list(groups.limits), "spool": config.spool, "reaper": True}
        found |= {"root": str(groups.tree or ""), "caps": not missing, "why": why + groups.why}
        while len(text := json.dumps(found)) > TEXT_SIZE and found["why"]:
            found["why"] = str(found["why"])[:-10]
        return text

    def _start(self, to: LaunchConnection, request: LaunchRequest, output: int) -> None:
        config = self._config.read()
        account = check_account(request.uid, config)
        check_output(output)
        sweeper = self._sweeps.check(request.uid)
        if sweeper is not None and sweeper.code is None:
            raise Refused(f"{account.name} is being swept; try again.")
        self._sweeps.forget(request.uid)
        self._starts[self._executors.start(request, account, config, output)] = to
        to.starting = True

    def _finish(self, start: PendingStart, failure: str = "") -> None:
        """Reply to a start. An executor that failed, or whose reply cannot be sent, is ended."""
        to = self._starts.pop(start, None)
        if to is None:
            return
        to.starting = False
        failure = failure or start.failed()
        if failure:
            self._reply(to, LaunchReply(FAILED, f"The executor cannot be started: {failure}"))
            known = False
        else:
            text = json.dumps({"cgroup": start.cgroup})
            reply = LaunchReply(DONE, text, start.child.pid, start_time=start.child.start)
            known = self._reply(to, reply, (start.stream.fileno(), start.pidfd))
        start.close()
        if not known:
            self._executors.end_soon(start.executor)


def _effective_capabilities() -> int:
    return int(Path("/proc/self/status").read_text().partition("CapEff:")[2].split()[0], 16)
