"""`hutch-launcher`: starts executors as the accounts that root's configuration names, and ends them. See the README.

Order: the start of an executor, its end, sweeping, the loop that serves hutchd, the command line.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import json
import os
import pwd
import resource
import select
import signal
import socket
import stat
import struct
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, NoReturn

from hutch_launcher.groups import Groups, Left, enter, find_groups, fork_into, kill, kill_family, processes
from hutch_launcher.rules import (
    CONFIG,
    KILL,
    MAGIC,
    NOBODY,
    PROBE,
    REQUEST,
    START,
    Config,
    Refused,
    Request,
    check_account,
    check_output,
    read_config,
    read_request,
)

__all__ = ["main"]

DONE, NOT_YET, REFUSED, FAILED = 0, 1, 2, 3
_REPLY: Final = struct.Struct(">8sBxxxIIIIQ476s")
_TEXT: Final = 476
_CONNECTIONS: Final = 8
_START_DEADLINE: Final = 5.0
_KILL_DEADLINE: Final = 10.0
_SWEEP_DEADLINE: Final = 5.0
_SWEPT_FOR: Final = 1.0  # seconds for which the result of a sweep answers
_ROUND: Final = 0.02
_CAPS: Final = {"CAP_KILL": 5, "CAP_SETGID": 6, "CAP_SETUID": 7}
_SWEPT: Final = ("/tmp", "/var/tmp", "/dev/shm", "/dev/mqueue")  # noqa: S108
_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_NONE: Final = Left(0)


@dataclass(frozen=True)
class Reply:
    """What is answered."""

    status: int
    text: str = ""
    pid: int = 0
    left: Left = _NONE
    start_time: int = 0

    def packed(self) -> bytes:
        """Return it as it is sent; a text that is too long loses its end."""
        text = self.text.encode()[:_TEXT].decode(errors="ignore").encode()
        left = min(self.left.left, NOBODY), min(self.left.oom, NOBODY), min(self.left.full, NOBODY)
        return _REPLY.pack(MAGIC, self.status, self.pid, *left, self.start_time, text)


@dataclass(frozen=True)
class Child:
    """An executor that this launcher started; `start` is in clock ticks since boot."""

    pid: int
    pidfd: int
    uid: int
    start: int


@dataclass
class Sweeper:
    """A process that cleans up, killed at `deadline`. It has a `code` once it has ended, which counts until then."""

    pid: int
    pidfd: int
    deadline: float
    code: int | None = None


def _interpreter() -> str:
    """Return `hutch-python` where it lies beside our own interpreter: a copy that nobody may read, and so look into."""
    closed = os.path.join(os.path.dirname(sys.executable), "hutch-python")
    return closed if os.path.exists(closed) else sys.executable


# ---------------------------------------------------------------- start: in the child


def _become(account: pwd.struct_passwd, groups: list[int], request: Request, limits: Groups) -> None:
    """Give up, in this process, all that the account does not have. OSError when that fails."""
    os.umask(0o077)
    with suppress(OSError):  # when memory runs out a session goes first; the executor itself may not say so any more
        Path("/proc/self/oom_score_adj").write_text("500")
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_NOFILE, request.open_files)
    if request.memory and "memory" not in limits.limits:
        _limit(resource.RLIMIT_DATA, request.memory)
    if request.pids and "pids" not in limits.limits:  # the kernel counts all that the account has
        _limit(resource.RLIMIT_NPROC, request.pids + sum(request.uid in one.uids for one in processes()))
    _drop_bounding_set()
    os.setgroups(groups)
    os.setresgid(account.pw_gid, account.pw_gid, account.pw_gid)
    os.setresuid(account.pw_uid, account.pw_uid, account.pw_uid)
    _drop_capabilities()
    if os.getresuid() != (account.pw_uid,) * 3 or os.getresgid() != (account.pw_gid,) * 3 or account.pw_uid == 0:
        raise PermissionError("it did not become the account")


def _limit(what: int, value: int) -> None:
    hard = resource.getrlimit(what)[1]
    if hard != resource.RLIM_INFINITY:
        value = min(value, hard)
    if value or what == resource.RLIMIT_CORE:
        resource.setrlimit(what, (value, value))
    elif what == resource.RLIMIT_NOFILE:
        resource.setrlimit(what, (min(1024, hard) if hard > 0 else 1024, hard))


def _drop_bounding_set() -> None:
    """Without CAP_SETPCAP it stays, and no_new_privs keeps it from ever counting."""
    for capability in range(64):
        _LIBC.prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP


def _drop_capabilities() -> None:
    _LIBC.prctl(47, 4, 0, 0, 0)  # PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL
    header, none = struct.pack("=Ii", 0x2008_0522, 0), bytes(24)  # _LINUX_CAPABILITY_VERSION_3
    if _LIBC.capset(header, none) or _LIBC.prctl(38, 1, 0, 0, 0):  # PR_SET_NO_NEW_PRIVS
        raise OSError(ctypes.get_errno(), "its capabilities could not be dropped")


def _execute(config: Config, account: pwd.struct_passwd, executor: str) -> NoReturn:
    """Become the executor, which is always this one command."""
    env = {"PATH": config.path, "HOME": account.pw_dir, "USER": account.pw_name, "LOGNAME": account.pw_name}
    env |= {"SHELL": account.pw_shell or "/bin/sh", "LANG": "C.UTF-8", "HUTCH_EXECUTOR_ID": executor}
    try:
        os.chdir(account.pw_dir)
    except OSError:
        os.chdir("/")
    # -P, -s: nothing is imported from where it starts, nor from what an agent may have put into the account's home
    os.execve(config.interpreter, [config.interpreter, "-P", "-s", "-m", "hutch_executor"], env)  # noqa: S606


def _fresh_signals() -> None:
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _own_directory(config: Config, account: pwd.struct_passwd) -> None:
    """Make the account's directory in the spool; Refused when another's is there."""
    for place in reversed([Path(config.spool), *Path(config.spool).parents]):
        if not place.exists():
            place.mkdir()
            place.chmod(0o711)
    found = os.lstat(config.spool)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid not in (0, os.geteuid()) or found.st_mode & 0o022:
        raise Refused(f"The spool {config.spool} must be a directory of root's that nobody else may write.")
    mine = os.path.join(config.spool, str(account.pw_uid))
    with suppress(FileExistsError):
        os.mkdir(mine, 0o700)
    found = os.lstat(mine)
    if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid():
        os.chown(mine, account.pw_uid, account.pw_gid)
        found = os.lstat(mine)
    if found.st_uid == account.pw_uid and stat.S_IMODE(found.st_mode) != 0o700:  # it may have done that itself
        with suppress(OSError):
            fd = os.open(mine, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            os.fchmod(fd, 0o700)
            os.close(fd)
        found = os.lstat(mine)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != account.pw_uid or found.st_mode & 0o077:
        raise Refused(f"{mine} must be a directory of {account.pw_name}'s alone (0700). Remove it.")


# ---------------------------------------------------------------- sweep: in the child


def _sweep_as(account: pwd.struct_passwd, groups: list[int], request: Request) -> int:
    """Be the account, and end and remove all that it may: the kernel sees to it that it is nothing else's."""
    os.closerange(3, 1 << 20)
    _become(account, groups, request, Groups())
    with suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)
    mine = [entry.path for place in _SWEPT if os.path.isdir(place) for entry in os.scandir(place) if _is_mine(entry)]
    for path in mine:
        _remove(path)
    for kind in ("shm", "sem", "msg"):
        with suppress(OSError):
            names, *rows = (line.split() for line in Path(f"/proc/sysvipc/{kind}").read_text().splitlines())
            for row in rows:
                if str(account.pw_uid) in (row[names.index("uid")], row[names.index("cuid")]):
                    _remove_ipc(kind, int(row[1]))
    return int(any(os.path.lexists(path) for path in mine))


def _remove_ipc(kind: str, number: int) -> None:
    if kind == "sem":
        _LIBC.semctl(number, 0, 0)  # IPC_RMID
    else:
        getattr(_LIBC, f"{kind}ctl")(number, 0, None)


def _remove(path: str) -> None:
    """Remove a file or a tree, however deep: what lies below is moved up, so that nothing grows with the depth."""
    if _unlink(path):
        return
    stuck: set[str] = set()
    with suppress(OSError), _opened(path) as top:
        while names := set(os.listdir(top)) - stuck:
            for name in names:
                try:
                    if not _unlink(name, top):
                        _empty_into(top, name)
                        os.rmdir(name, dir_fd=top)
                except OSError:
                    stuck.add(name)
    with suppress(OSError):
        os.rmdir(path)


def _empty_into(top: int, name: str) -> None:
    """Remove the files in a directory of `top`, and move its directories to `top`."""
    with _opened(name, top) as inner:
        if os.fstat(inner).st_dev != os.fstat(top).st_dev:  # mounted there
            return
        for below in os.listdir(inner):
            if not _unlink(below, inner):
                with suppress(OSError), _opened(below, inner):
                    os.rename(below, f"hutch-{os.urandom(16).hex()}", src_dir_fd=inner, dst_dir_fd=top)


def _unlink(name: str, at: int | None = None) -> bool:
    with suppress(OSError):
        os.unlink(name, dir_fd=at)
        return True
    return False


@contextmanager
def _opened(name: str, at: int | None = None) -> Iterator[int]:
    """Open a directory, no link, with the rights that the account may have taken from itself."""
    handle = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=at)
    try:
        with suppress(OSError):
            os.chmod(f"/proc/self/fd/{handle}", 0o700)
        fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY, dir_fd=handle)
    finally:
        os.close(handle)
    try:
        yield fd
    finally:
        os.close(fd)


def _is_mine(entry: os.DirEntry[str]) -> bool:
    with suppress(OSError):
        return entry.stat(follow_symlinks=False).st_uid == os.getuid()
    return False


# ---------------------------------------------------------------- serving


@dataclass(eq=False)
class Connection:
    """hutchd, connected. While it waits for a start nothing more is read from it."""

    sock: socket.socket
    waits: bool = False


@dataclass(eq=False)
class Starting:
    """An executor that has not become its program yet; `told` says when it did, or what went wrong."""

    to: Connection
    executor: str
    child: Child
    stream: socket.socket
    pidfd: int
    told: int
    cgroup: str
    deadline: float


class Launcher:
    """The one loop. It waits for descriptors alone, never for a peer, an account's home or a process."""

    def __init__(self, config_path: str) -> None:
        """Raises Refused when the configuration cannot be used."""
        self._config_path = config_path
        self.config = self._read_config()
        self._groups = find_groups()
        self._connections: list[Connection] = []
        self._children: dict[str, Child] = {}
        self._starting: list[Starting] = []
        self._sweeps: dict[int, Sweeper] = {}
        self._doomed: dict[str, float] = {}
        self._seen = time.monotonic()
        self._stopping = False

    def _read_config(self) -> Config:
        self.config = read_config(self._config_path, _interpreter())
        return self.config

    def serve(self, listener: socket.socket | None, connection: socket.socket | None) -> None:
        """Serve a listening socket until a signal comes, or one connection until it ends."""
        if connection is not None:
            self._admit(connection)
        wake, woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(woken)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        while not self._stopping and (listener or self._connections or self._starting or self._doomed):
            handlers: dict[int, Callable[[], object]] = {wake: lambda: None}
            if listener is not None:
                handlers[listener.fileno()] = partial(self._accept, listener)
            handlers |= {one.sock.fileno(): partial(self._read, one) for one in self._connections if not one.waits}
            handlers |= {one.told: partial(self._started, one) for one in self._starting}
            handlers |= {one.pidfd: partial(self._reap, name) for name, one in self._children.items()}
            handlers |= {one.pidfd: partial(self._swept, uid) for uid, one in self._sweeps.items() if one.code is None}
            poll = select.poll()
            for fd in handlers:
                poll.register(fd, select.POLLIN)
            for fd, _ in poll.poll(self._pause() * 1000):
                handlers[fd]()
            self._look_around()

    def _stop(self, *_: object) -> None:
        self._stopping = True

    def _pause(self) -> float:
        """Return for how long nothing but messages need be heeded."""
        if self._doomed:
            return _ROUND
        return 1.0 if self._starting or self._sweeps else min(60.0, max(0.05, self.config.gone_after / 4))

    def _look_around(self) -> None:
        """Do what no peer asks for: late starts, executors that must go, and all of them when hutchd is gone."""
        now = time.monotonic()
        for one in [one for one in self._starting if now >= one.deadline]:
            self._started(one, "It did not start in time.")
        for uid in list(self._sweeps):
            self._swept(uid)
        if self._connections:
            self._seen = now
        elif now - self._seen > self.config.gone_after:
            self._seen = now
            for executor in self._recorded():
                _say(f"{executor} is ended: hutchd was not here for {self.config.gone_after:g} s")
                self._doomed[executor] = now + _KILL_DEADLINE
        for executor, deadline in list(self._doomed.items()):
            left = self._end(executor)
            if not left.left or now >= deadline:
                del self._doomed[executor]
                if left.left:
                    _say(f"{executor} could not be ended: {left.left} processes are left")

    # ------------------------------------------------------------ connections

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):
            self._admit(listener.accept()[0])

    def _admit(self, sock: socket.socket) -> None:
        """Let hutchd in, and nobody else; the kernel says who it is."""
        sock.setblocking(False)
        try:
            peer = struct.unpack("iII", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1]
            if peer != self.config.served:
                raise Refused(f"Only {self.config.serve} may ask.")
            if len(self._connections) >= _CONNECTIONS:
                raise Refused(f"There are {_CONNECTIONS} connections already.")
        except (OSError, Refused) as error:
            with suppress(OSError):
                sock.send(Reply(REFUSED, str(error)).packed())
            sock.close()
        else:
            self._connections.append(Connection(sock))

    def _drop(self, connection: Connection) -> None:
        if connection in self._connections:
            self._connections.remove(connection)
            connection.sock.close()
            self._seen = time.monotonic()

    def _send(self, connection: Connection, reply: Reply, descriptors: tuple[int, ...] = ()) -> bool:
        """Answer, or drop who does not take its answers."""
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack(f"{len(descriptors)}i", *descriptors))]
        try:
            connection.sock.sendmsg([reply.packed()], rights if descriptors else [])
        except OSError:
            self._drop(connection)
            return False
        return True

    def _read(self, connection: Connection) -> None:
        """Take one message, whatever it is, and answer it; a start is answered when it is done."""
        if connection not in self._connections:
            return
        descriptors: list[int] = []
        try:
            packet, more, flags, _ = connection.sock.recvmsg(
                REQUEST.size + 1, socket.CMSG_SPACE(16), socket.MSG_CMSG_CLOEXEC
            )
            for level, kind, data in more:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    descriptors += struct.unpack(f"{len(data) // 4}i", data[: len(data) // 4 * 4])
            if not packet and not descriptors:
                self._drop(connection)
                return
            reply = self._answer(connection, packet, descriptors, bool(flags & socket.MSG_CTRUNC))
        except BlockingIOError:
            return
        except Refused as error:
            reply = Reply(REFUSED, str(error))
        except OSError as error:
            reply = Reply(FAILED, f"It failed: {error}.")
        finally:
            for fd in descriptors:
                os.close(fd)
        if reply is not None:
            self._send(connection, reply)

    def _answer(self, to: Connection, packet: bytes, descriptors: list[int], cut: bool) -> Reply | None:
        request = read_request(packet, -1 if cut else len(descriptors))
        if request.op == KILL:  # whoever was allowed to start once
            left = self._end(request.executor)
            return Reply(NOT_YET if left.left else DONE, "Some are left." if left.left else "", left=left)
        config = self._read_config()
        if request.op == START:
            self._start(to, request, descriptors[0], config)
            return None
        if request.op == PROBE:
            if request.uid != NOBODY:
                check_account(request.uid, config)
            return Reply(DONE, self._abilities(config))
        return self._sweep(request, config)

    def _abilities(self, config: Config) -> str:
        if self._groups.tree is None:
            self._groups = find_groups()
        groups = self._groups
        missing = [name for name, number in _CAPS.items() if not _capabilities() >> number & 1]
        why = f"The launcher lacks {', '.join(missing)}. " if missing else ""
        found = {"v": 1, "cgroup": groups.version, "limits": list(groups.limits), "spool": config.spool}
        found |= {"root": str(groups.tree or ""), "caps": not missing, "why": why + groups.why}
        while len(text := json.dumps(found)) > _TEXT and found["why"]:
            found["why"] = str(found["why"])[:-10]
        return text

    # ------------------------------------------------------------ start

    def _start(self, to: Connection, request: Request, output: int, config: Config) -> None:
        executor = request.executor
        account, groups = check_account(request.uid, config)
        check_output(output)
        sweeper = self._swept(request.uid)
        if sweeper is not None and sweeper.code is None:
            raise Refused(f"{account.pw_name} is being swept; try again.")
        self._sweeps.pop(request.uid, None)  # what it found is true no more
        _own_directory(config, account)
        try:
            self._record(executor, "")
            try:
                places = self._groups.make(executor, request.memory, request.pids, request.cpu_weight)
            except OSError:
                self._forget(executor)
                raise
        except FileExistsError:
            raise Refused(f"There is an executor {executor} already.") from None
        deadline = time.monotonic() + _START_DEADLINE
        self._doomed[executor] = deadline  # unless all of this succeeds
        ours, theirs = socket.socketpair()
        told, tell = os.pipe()
        try:
            pid, born_in = fork_into(self._groups, places)
            if pid == 0:
                places = [place for place in places if place != born_in]
                self._be_executor(request, account, groups, config, places, (theirs.fileno(), output, output), tell)
            child = Child(pid, os.pidfd_open(pid), request.uid, _start_time(pid))
            self._children[executor] = child
            self._record(executor, f"{pid} {child.start} {child.uid}", "w")
            cgroup, pidfd = str(places[0]) if places else "", os.dup(child.pidfd)
        except OSError:
            os.close(told)
            raise
        finally:
            theirs.close()
            os.close(tell)
        self._starting.append(Starting(to, executor, child, ours, pidfd, told, cgroup, deadline))
        to.waits = True
        del self._doomed[executor]

    def _be_executor(
        self,
        request: Request,
        account: pwd.struct_passwd,
        groups: list[int],
        config: Config,
        places: list[Path],
        descriptors: tuple[int, int, int],
        tell: int,
    ) -> NoReturn:
        """Become an executor, in the child; what keeps it from that is written to `tell`, which closes otherwise."""
        try:
            os.setsid()
            for place in places:
                enter(place)
            _fresh_signals()
            for number, fd in enumerate(descriptors):
                os.dup2(fd, number)
            os.closerange(3, tell)
            os.closerange(tell + 1, 1 << 20)
            _become(account, groups, request, self._groups)
            _execute(config, account, request.executor)
        except BaseException as error:  # noqa: BLE001 - whatever it is, this process must not go on
            os.write(tell, str(error).encode()[:_TEXT] or b"?")
        finally:
            os._exit(127)

    def _started(self, one: Starting, why: str = "") -> None:
        """Answer a start: its program runs, or did not come to that, and then nothing stays."""
        if one not in self._starting:
            return
        why = why or os.read(one.told, _TEXT).decode(errors="replace")
        self._starting.remove(one)
        os.close(one.told)
        one.to.waits = False
        if why:
            self._send(one.to, Reply(FAILED, f"The executor cannot be started: {why}"))
            told = False
        else:
            reply = Reply(DONE, json.dumps({"cgroup": one.cgroup}), one.child.pid, start_time=one.child.start)
            told = self._send(one.to, reply, (one.stream.fileno(), one.pidfd))
        one.stream.close()
        os.close(one.pidfd)
        if not told:  # nobody will ask for its end
            self._doomed[one.executor] = time.monotonic() + _KILL_DEADLINE

    # ------------------------------------------------------------ end

    def _end(self, executor: str) -> Left:
        """Do one round of ending an executor and all that it started."""
        child = self._children.get(executor)
        recorded = (child.pid, child.start, child.uid) if child else self._read_record(executor)
        if self._groups.tree is None and recorded is not None:
            left = Left(kill_family(*recorded))
        else:
            if child is not None:
                signal.pidfd_send_signal(child.pidfd, signal.SIGKILL)
            left = self._groups.kill(executor)
        self._reap(executor)
        if executor in self._children:
            left = Left(max(left.left, 1), left.oom, left.full)
        if not left.left:
            self._forget(executor)
        return left

    def _reap(self, executor: str) -> None:
        child = self._children.get(executor)
        if child is not None and os.waitpid(child.pid, os.WNOHANG)[0]:
            os.close(child.pidfd)
            del self._children[executor]

    # a note of each executor, which outlives the launcher: whom it has started, and without a cgroup, which it is

    def _records(self, executor: str = "") -> Path:
        return Path(self.config.spool, ".executors", executor)

    def _record(self, executor: str, text: str, mode: str = "x") -> None:
        self._records().mkdir(mode=0o700, exist_ok=True)
        with self._records(executor).open(mode) as file:
            file.write(text)

    def _forget(self, executor: str) -> None:
        with suppress(OSError):
            self._records(executor).unlink()

    def _read_record(self, executor: str) -> tuple[int, int, int] | None:
        with suppress(OSError, ValueError):
            pid, start, uid = map(int, self._records(executor).read_text().split())
            return pid, start, uid
        return None

    def _recorded(self) -> set[str]:
        with suppress(OSError):
            return set(os.listdir(self._records()))
        return set()

    # ------------------------------------------------------------ sweep

    def _sweep(self, request: Request, config: Config) -> Reply:
        """Do one round: a process that is the account cleans up, and this one makes sure that nothing hinders it."""
        account, groups = check_account(request.uid, config)
        if account.pw_name not in config.dedicated:
            raise Refused(f"{account.pw_name} is not dedicated to Hutch: what it has may be its person's.")
        if any(one.uid == request.uid for one in self._children.values()) or self._groups.holds(request.uid):
            raise Refused(f"An executor of {account.pw_name} runs.")
        sweeper = self._swept(request.uid)
        left = [one.pid for one in processes() if request.uid in one.uids and (not sweeper or one.pid != sweeper.pid)]
        for pid in left:
            kill(pid)
        going_on = Reply(NOT_YET, "Cleaning up goes on.", left=Left(len(left)))
        if sweeper is not None:
            if sweeper.code is None:
                return going_on
            del self._sweeps[request.uid]
            if sweeper.code >= 0 and not left:  # else it was killed
                failed = Reply(FAILED, f"Not all that {account.pw_name} has could be removed.")
                return failed if sweeper.code else Reply(DONE)
        pid = os.fork()
        if pid == 0:
            try:
                _fresh_signals()
                os._exit(_sweep_as(account, groups, request))
            finally:
                os._exit(2)
        self._sweeps[request.uid] = Sweeper(pid, os.pidfd_open(pid), time.monotonic() + _SWEEP_DEADLINE)
        return going_on

    def _swept(self, uid: int) -> Sweeper | None:
        """Bury an account's sweeper that has ended, end one that is late, forget one that ended too long ago."""
        one, now = self._sweeps.get(uid), time.monotonic()
        if one is None:
            return None
        if one.code is None:
            done, status = os.waitpid(one.pid, os.WNOHANG)
            if done:
                os.close(one.pidfd)
                one.code, one.deadline = os.waitstatus_to_exitcode(status), now + _SWEPT_FOR
            elif now > one.deadline:
                kill(one.pid)
        elif now > one.deadline:
            del self._sweeps[uid]
            return None
        return one


def _start_time(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19])


def _capabilities() -> int:
    return int(Path("/proc/self/status").read_text().partition("CapEff:")[2].split()[0], 16)


# ---------------------------------------------------------------- command line


def _say(text: str) -> None:
    sys.stderr.write(f"hutch-launcher: {text}\n")
    sys.stderr.flush()


def _given_connection() -> socket.socket | None:
    """Return standard input, when that is a connection: sudo started us."""
    try:
        sock = socket.socket(fileno=os.dup(0))
    except OSError:
        return None
    if sock.family == socket.AF_UNIX and sock.type == socket.SOCK_SEQPACKET:
        with suppress(OSError):
            sock.getpeername()
            os.dup2(os.open(os.devnull, os.O_RDWR), 0)
            return sock
    sock.close()
    return None


def _passed_listener() -> socket.socket | None:
    """Return the socket that systemd passed, when it did. (sd_listen_fds(3))"""
    if os.environ.get("LISTEN_PID") != str(os.getpid()) or os.environ.get("LISTEN_FDS") != "1":
        return None
    sock = socket.socket(fileno=3)
    sock.set_inheritable(False)
    if sock.type != socket.SOCK_SEQPACKET or not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        raise Refused("The socket that was passed is none that listens for packets (ListenSequentialPacket=).")
    sock.listen(_CONNECTIONS)
    return sock


def _listen(path: str, uid: int) -> socket.socket:
    """Listen on a path of our own, for one account; a lock says that it is taken."""
    lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # kept until the end
    except BlockingIOError:
        raise Refused(f"Another launcher listens on {path}.") from None
    with suppress(FileNotFoundError):
        os.unlink(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.bind(path)
    os.chown(path, uid, -1)
    sock.listen(_CONNECTIONS)
    return sock


def _notify_ready() -> None:
    """Tell systemd, if it asked. (sd_notify(3))"""
    if name := os.environ.get("NOTIFY_SOCKET"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock, suppress(OSError):
            sock.connect(f"\0{name[1:]}" if name.startswith("@") else name)
            sock.send(b"READY=1")


def _check(path: str) -> str:
    """Return what would be done."""
    config = read_config(path, _interpreter())
    lines = [f"configuration  {path}: only {config.serve} (uid {config.served}) may ask"]
    lines += [f"starts         {config.interpreter} -P -s -m hutch_executor"]
    for name in dict.fromkeys((*config.users, *config.dedicated)):
        try:
            check_account(pwd.getpwnam(name).pw_uid, config)
            lines += [f"account        {name}: yes"]
        except (KeyError, Refused) as error:
            lines += [f"account        {name}: no. {error if isinstance(error, Refused) else 'There is none.'}"]
    groups = find_groups()
    lines += [f"groups         {', '.join(config.groups) or 'none'}"]
    lines += [f"cgroups        {groups.version or 'none'} {groups.tree or ''} {groups.why}"]
    lines += [f"limits         {', '.join(groups.limits) or 'none'}"]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Serve; return the exit code: 0 it was told to end, 2 it cannot serve."""
    os.umask(0o077)
    while os.open(os.devnull, os.O_RDWR) <= 2:
        pass  # 0, 1 and 2 are taken from here on
    connection = None if sys.argv[1:] else _given_connection()
    parser = argparse.ArgumentParser("hutch-launcher", description=__doc__.partition("\n")[0])
    parser.add_argument("--config", default=CONFIG, help="the configuration, root's alone (default: %(default)s)")
    parser.add_argument("--listen", metavar="PATH", help="listen there (default: the socket that systemd passes)")
    parser.add_argument("--check", action="store_true", help="say what would be done, and end")
    options = parser.parse_args()
    try:
        if options.check:
            sys.stdout.write(_check(options.config))
            return 0
        launcher = Launcher(options.config)
        listener = None
        if connection is None:
            listener = _listen(options.listen, launcher.config.served) if options.listen else _passed_listener()
            if listener is None:
                raise Refused("It is started by systemd, by sudo, or with --listen PATH; see --help.")
            _notify_ready()
        launcher.serve(listener, connection)
        if options.listen:
            os.unlink(options.listen)
    except (Refused, OSError) as error:
        _say(str(error))
        if connection is not None:
            with suppress(OSError):
                connection.send(Reply(FAILED, str(error)).packed(), socket.MSG_DONTWAIT)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
