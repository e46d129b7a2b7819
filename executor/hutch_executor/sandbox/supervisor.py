"""Answers the system calls of an agent that Landlock does not cover and that need more than a look at numbers.

It performs changes of mode and owner for the agent, in writable places only. It lets the agent's own process open Unix
sockets, and no process that the agent starts.

A seccomp filter of the agent stops each call in `WATCHED` (and `TRUNCATE`, before Landlock's ABI 3) until the executor
has answered. A thread makes the change itself, as the kernel would have for the agent, and answers with the outcome.
It never lets such a call of the agent go on: another thread of the agent could change the path meanwhile.

Theory. What the agent says (a path, a descriptor) is resolved once, to a held descriptor: that is the file meant. Its
name in /proc/self/fd is only a hint: names change, end in ` (deleted)`, and lie for a mount of the agent's own. So the
decision is a second walk, from the descriptor of a writable place, below it, by that name, through no symbolic link. If
it arrives at the file meant, the file has a name in the place, and the change is made to what the walk opened. What an
agent renames or swaps between the steps makes the walk miss the file, or moves a file among places that it may write:
Landlock lets nothing leave or enter them. A file with a second name in a writable place is writable there too.

A file without any name is changed if its last one was in a writable place, or if it lives in memory (memfd): only a
process that has it open can reach it. The set-user-id bit is refused, and the set-group-id bit of a file: a program
with them would carry the account out of the sandbox.

The thread drops its own capabilities, so that the kernel judges it as it would judge the agent, which has none either:
same account and groups, hence the same owners, permissions on the way, and errors. The agent cannot change its account
or groups. An agent's numbers in a user namespace of its own would mean others here, so such owners are refused.

A Unix socket leads out of the sandbox by its path, and the agent needs one, to reach the broker. What it starts needs
none, whatever starts it: a command, a tool of its own, or a program that a file in its working directory or its home
names, such as git's filters. So a call is the agent's own if its thread belongs to the process that confined itself and
became the agent. A descriptor of that process shows that it has not ended, so that its number means it and no other.

What the kernel would do and this does not: pass through a magic link of /proc other than the caller's own descriptors
and directories (ELOOP); change a file that lost its name while it has another one, a name longer than 4,095 bytes, a
file in a directory that its owner may not search, a device, a pipe or socket without a name (EPERM).

The numbers and structures are the kernel's: linux/seccomp.h, linux/openat2.h, linux/capability.h, seccomp_unotify(2).
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import os
import re
import resource
import select
import signal
import stat
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, Literal, NamedTuple

from hutch_executor.sandbox.confine import checked, drop_capabilities
from hutch_executor.sandbox.seccomp import native_abi, unavailable

__all__ = ["TRUNCATE", "WATCHED", "CallSupervisor"]

WATCHED: Final = ("chmod", "fchmod", "fchmodat", "fchmodat2", "chown", "fchown", "fchownat", "lchown")
"""The calls that change a mode or owner."""
TRUNCATE: Final = ("truncate",)
"""The call that changes a file by its path, which Landlock covers from ABI 3 on."""

_RECV, _SEND, _ID_VALID, _SET_FLAGS = 0xC050_2100, 0xC018_2101, 0x4008_2102, 0x4008_2104
_SYNC_WAKE_UP: Final = 1
_CONTINUE: Final = 1
"""The answer that lets the kernel make the call: its arguments are numbers, which nobody can change meanwhile."""
_SOCKET: Final = "socket"
"""The call that opens a socket. The filter passes on those for Unix sockets only."""
_NOTIFICATION: Final = struct.Struct("=QIIiIQ6Q")
"""id, pid, flags; then the call: number, ABI, instruction, arguments."""
_RESPONSE: Final = struct.Struct("=QqiI")
"""id, value, error, flags."""
_OPENAT2: Final = 437
_RESOLVE_NO_MAGICLINKS, _RESOLVE_NO_SYMLINKS, _RESOLVE_BENEATH = 0x02, 0x04, 0x08
_AT_FDCWD: Final = -100
_AT_SYMLINK_NOFOLLOW: Final = 0x100
_AT_EMPTY_PATH: Final = 0x1000
_O_PATH: Final = 0o10000000
_HOLD: Final = _O_PATH | os.O_CLOEXEC
"""A descriptor that only names a file (O_PATH), closed on exec."""
_PATH_MAX: Final = 4096
_ADDRESS: Final = (1 << 56 if os.uname().machine == "aarch64" else 1 << 64) - 1
"""The bits of an address: on arm64 the uppermost byte may hold a tag."""
_MODE_BITS: Final = 0o7777
_UNCHANGED: Final = 0xFFFF_FFFF
"""An owner or group that stays."""
_TRIES: Final = 8
"""Walks to a file whose name changes meanwhile."""
_DELETED: Final = b" (deleted)"
_MEMORY: Final = b"/memfd:"
_CLOSE_DEADLINE: Final = 2.0

_OWN_LINK: Final = re.compile(
    rb"/+(?:proc/+(self|thread-self|\d+)/+(fd/+\d+|cwd)|dev/+(fd/+\d+))(?:/+(.*))?", re.DOTALL
)
"""A path through the caller's own descriptors: which process, which link, and what follows."""

_log: Final = logging.getLogger(__name__)


class _Change(NamedTuple):
    """A call, as the agent made it."""

    what: Literal["mode", "owner", "length"]
    start: int
    """The descriptor where the path starts, or `_AT_FDCWD`."""
    path: int | None
    """The path's address; None if the change is for the descriptor `start`."""
    flags: int
    value: int
    """The mode, the owner or the length."""
    group: int = _UNCHANGED


class _Writable(NamedTuple):
    """A writable file, or the top of a writable hierarchy."""

    held: int
    name: bytes


class CallSupervisor:
    """The supervisor of one seccomp filter: its thread answers every call of the processes under it."""

    def __init__(self, listener: int, writable: Sequence[str], agent: int | None = None) -> None:
        """Own the filter's `listener` from now on, also if this fails, and start to answer.

        `writable` are the places, files or directories; one that does not exist holds nothing. `agent` is the process
        that may open Unix sockets; None: none may. OSError; RuntimeError if the process may start no thread, or no
        filter can be made on this platform.
        """
        self._descriptors = [listener]
        self._listener = listener
        self._lock = threading.Lock()
        self._wake: int | None = None
        self._logged = False
        try:
            os.set_inheritable(listener, False)  # passed descriptors are not so by themselves
            self._calls = _native_calls()
            self._own_names = os.readlink("/proc/self/ns/user")
            self._agent = agent
            self._alive = self._open_agent(agent)
            self._places = [place for path in writable if (place := self._hold(path)) is not None]
            self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            self._thread = threading.Thread(target=self._run, name="call-supervisor", daemon=True)
            self._thread.start()
        except BaseException:
            self._release()
            raise

    def __repr__(self) -> str:
        return f"<CallSupervisor {self._listener}, {'running' if self._thread.is_alive() else 'closed'}>"

    def close(self) -> None:
        """End the thread. From any thread; closing again does nothing.

        A call that waits for its answer then fails with ENOSYS, and so does each later one. The thread ends by itself
        with the last process under the filter. If a file system keeps it busy for longer than 2 s, it ends afterwards.
        """
        with self._lock:
            if self._wake is not None:
                os.eventfd_write(self._wake, 1)
        self._thread.join(_CLOSE_DEADLINE)

    def _open_agent(self, agent: int | None) -> int | None:
        """Return a descriptor of the agent's process, which is readable from its end on. None if it has ended."""
        if agent is None:
            return None
        try:
            alive = os.pidfd_open(agent)
        except ProcessLookupError:
            return None
        self._descriptors.append(alive)
        return alive

    def _hold(self, path: str) -> _Writable | None:
        try:
            held = os.open(path, _HOLD | os.O_NOFOLLOW)  # as the rule for Landlock is made
        except (FileNotFoundError, NotADirectoryError):
            return None
        self._descriptors.append(held)
        return _Writable(held, os.readlink(_link_to(held)))

    def _release(self) -> None:
        with self._lock:
            if self._wake is not None:
                os.close(self._wake)
            self._wake = None
        for descriptor in self._descriptors:
            os.close(descriptor)

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            drop_capabilities()
            with suppress(OSError):  # only faster, from Linux 6.6 on
                fcntl.ioctl(self._listener, _SET_FLAGS, _SYNC_WAKE_UP)
            self._serve()
        except Exception:  # noqa: BLE001  # the thread's end
            _log.exception("an agent's changes of mode and its sockets are no longer allowed")
        finally:
            self._release()

    def _serve(self) -> None:
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        assert self._wake is not None
        poll.register(self._wake, select.POLLIN)
        while True:
            ready = dict(poll.poll())
            if self._wake in ready or not ready[self._listener] & select.POLLIN:
                return  # closed, or no process is left under the filter
            notification = bytearray(_NOTIFICATION.size)
            try:
                fcntl.ioctl(self._listener, _RECV, notification, True)
            except OSError as error:
                if error.errno == errno.ENOENT:  # the caller was killed
                    continue
                if error.errno == errno.ENOTCONN:  # so were all others
                    return
                raise
            self._answer(*_NOTIFICATION.unpack(notification))

    def _answer(self, call_id: int, pid: int, _flags: int, number: int, arch: int, _at: int, *arguments: int) -> None:
        error = flags = 0
        try:
            name = self._calls[arch, number]
            if name == _SOCKET:
                self._require_agent(call_id, pid)
                flags = _CONTINUE
            else:
                self._perform(call_id, pid, _parse(name, arguments))
        except OSError as refused:
            error = refused.errno or errno.EPERM
        except Exception:  # noqa: BLE001  # one call must not end the answers to all others
            error = errno.EPERM
            if not self._logged:
                self._logged = True
                _log.exception("a call of an agent was refused")
        with suppress(OSError):  # the caller was killed
            fcntl.ioctl(self._listener, _SEND, _RESPONSE.pack(call_id, 0, -error, flags))

    # ------------------------------------------------------------ one call

    def _require_agent(self, call_id: int, thread: int) -> None:
        """OSError unless the waiting thread is the agent's own."""
        process = _process_of(thread)
        self._require_waiting(call_id)  # so `process` is its process
        if self._alive is None or process != self._agent or _has_ended(self._alive):
            raise _refused()

    def _perform(self, call_id: int, pid: int, change: _Change) -> None:
        """Make the change, or raise OSError with the number that the caller gets."""
        with _Descriptors() as opened:
            caller = opened.add(_open_caller(pid))
            self._require_waiting(call_id)  # so `caller` is its process, whatever the pid means later
            meant = self._open_meant(opened, call_id, pid, caller, change)
            status = os.fstat(meant)
            inside = self._reach(opened, meant, status)
            if change.what == "mode":
                _change_mode(inside, status, change.value)
            elif change.what == "owner":
                self._change_owner(caller, inside, change)
            else:
                _change_length(pid, inside, change.value)

    def _require_waiting(self, call_id: int) -> None:
        fcntl.ioctl(self._listener, _ID_VALID, call_id.to_bytes(8, "little"))

    def _open_meant(self, opened: _Descriptors, call_id: int, pid: int, caller: int, change: _Change) -> int:
        """Open the file that the caller means, wherever it is."""
        if change.path is None:
            if _flags_of(caller, change.start) & _O_PATH:
                raise OSError(errno.EBADF, "the descriptor only names a file")
            return opened.add(_open_start(caller, change.start))
        path = _read_path(caller, change.path)
        self._require_waiting(call_id)  # the memory was the caller's
        if not path and change.flags & _AT_EMPTY_PATH:
            return opened.add(_open_start(caller, change.start))
        nofollow = os.O_NOFOLLOW if change.flags & _AT_SYMLINK_NOFOLLOW else 0
        start = _AT_FDCWD
        if (own := _own_link(caller, pid, path)) is not None:
            link, path = own
            start = opened.add(link)
            if not path:
                if nofollow:
                    raise _refused()  # the link itself
                return start
        elif not path.startswith(b"/"):
            start = opened.add(_open_start(caller, change.start))
        return opened.add(_openat2(start, path, _HOLD | nofollow, _RESOLVE_NO_MAGICLINKS))

    def _reach(self, opened: _Descriptors, meant: int, status: os.stat_result) -> int:
        """Return a descriptor of the same file, reached from a writable place. OSError if it lies in none."""
        if stat.S_ISCHR(status.st_mode) or stat.S_ISBLK(status.st_mode):
            raise _refused()
        for _ in range(_TRIES):
            name = _name_of(meant)
            around = [place for place in self._places if name == place.name or name.startswith(place.name + b"/")]
            for place in around:
                reached = _walk(place, name)
                if reached is not None and os.path.samestat(os.fstat(opened.add(reached)), os.fstat(meant)):
                    return reached
            if (around or name.startswith(_MEMORY)) and name.endswith(_DELETED) and os.fstat(meant).st_nlink == 0:
                return meant
            if not around or name == _name_of(meant):
                break
        raise _refused()

    def _change_owner(self, caller: int, inside: int, change: _Change) -> None:
        named = change.value != _UNCHANGED or change.group != _UNCHANGED
        if named and os.readlink("ns/user", dir_fd=caller) != self._own_names:
            raise _refused()
        checked(_fchownat(inside, b"", change.value, change.group, _AT_EMPTY_PATH))


class _Descriptors:
    """The descriptors that one call opened; closed with it."""

    def __init__(self) -> None:
        self._all: list[int] = []

    def __enter__(self) -> _Descriptors:
        return self

    def __exit__(self, *_: object) -> None:
        for one in self._all:
            os.close(one)

    def add(self, descriptor: int) -> int:
        """Close this one too, later; return it."""
        self._all.append(descriptor)
        return descriptor


# ---------------------------------------------------------------- what a call says


def _native_calls() -> dict[tuple[int, int], str]:
    """Return the calls by (ABI, number). RuntimeError if the ABI of this platform is not known."""
    abi = native_abi()
    if abi is None:
        raise RuntimeError(unavailable())
    return {(abi.arch, number): name for name in (*_PARSERS, _SOCKET) if (number := abi.number(name)) is not None}


def _parse(name: str, arguments: Sequence[int]) -> _Change:
    """Return what a call asks for. OSError (EINVAL) if it has unknown flags."""
    change = _PARSERS[name](*arguments)
    if change.flags & ~(_AT_SYMLINK_NOFOLLOW | _AT_EMPTY_PATH):
        raise OSError(errno.EINVAL, "unknown flags")
    return change


def _low(argument: int) -> int:
    return argument & 0xFFFF_FFFF


def _signed(argument: int, bits: int = 32) -> int:
    argument &= (1 << bits) - 1
    return argument - (1 << bits) if argument >> (bits - 1) else argument


_PARSERS: Final[Mapping[str, Callable[..., _Change]]] = {
    "chmod": lambda path, mode, *_: _Change("mode", _AT_FDCWD, path, 0, mode & _MODE_BITS),
    "fchmod": lambda fd, mode, *_: _Change("mode", _signed(fd), None, 0, mode & _MODE_BITS),
    "fchmodat": lambda start, path, mode, *_: _Change("mode", _signed(start), path, 0, mode & _MODE_BITS),
    "fchmodat2": lambda start, path, mode, flags, *_: _Change(
        "mode", _signed(start), path, _low(flags), mode & _MODE_BITS
    ),
    "chown": lambda path, owner, group, *_: _Change("owner", _AT_FDCWD, path, 0, _low(owner), _low(group)),
    "lchown": lambda path, owner, group, *_: _Change(
        "owner", _AT_FDCWD, path, _AT_SYMLINK_NOFOLLOW, _low(owner), _low(group)
    ),
    "fchown": lambda fd, owner, group, *_: _Change("owner", _signed(fd), None, 0, _low(owner), _low(group)),
    "fchownat": lambda start, path, owner, group, flags, _: _Change(
        "owner", _signed(start), path, _low(flags), _low(owner), _low(group)
    ),
    "truncate": lambda path, length, *_: _Change("length", _AT_FDCWD, path, 0, _signed(length, 64)),
}
"""How each call's arguments read: 32-bit values, but addresses and lengths; of a mode, the permission bits."""

# ---------------------------------------------------------------- the caller, in /proc


def _has_ended(process: int) -> bool:
    """Return whether the process that this descriptor names has ended."""
    poll = select.poll()
    poll.register(process, select.POLLIN)
    return bool(poll.poll(0))


def _process_of(thread: int) -> int:
    """Return the process that a thread belongs to. OSError if there is no such thread."""
    status = Path(f"/proc/{thread}/status").read_bytes()
    return int(status.partition(b"\nTgid:")[2].split(None, 1)[0])


def _open_caller(pid: int) -> int:
    """Open the directory of a process in /proc. OSError if it is of another account, or its root is not ours."""
    try:
        caller = os.open(f"/proc/{pid}", _HOLD)
    except OSError:
        raise _refused() from None
    try:
        if os.fstat(caller).st_uid == os.geteuid() and os.readlink("root", dir_fd=caller) == "/":
            return caller
    except OSError:  # not dumpable
        pass
    os.close(caller)
    raise _refused()


def _read_path(caller: int, address: int) -> bytes:
    """Return the path at an address of the caller's memory. OSError as the kernel would give it."""
    try:
        memory = os.open("mem", os.O_RDONLY | os.O_CLOEXEC, dir_fd=caller)
    except OSError:
        raise _refused() from None  # not dumpable, or another security module forbids it
    try:
        found = os.pread(memory, _PATH_MAX, address & _ADDRESS)
    except (OSError, OverflowError):
        found = b""
    finally:
        os.close(memory)
    path, end, _ = found.partition(b"\0")
    if not end:
        raise OSError(errno.ENAMETOOLONG if len(found) == _PATH_MAX else errno.EFAULT, "no path")
    return path


def _open_start(caller: int, start: int) -> int:
    """Open the caller's working directory, or what its descriptor `start` is open at."""
    if start == _AT_FDCWD:
        return os.open("cwd", _HOLD, dir_fd=caller)
    try:
        return os.open(f"fd/{start}", _HOLD, dir_fd=caller)
    except FileNotFoundError:
        raise OSError(errno.EBADF, "no such descriptor") from None


def _flags_of(caller: int, descriptor: int) -> int:
    """Return the flags with which the caller opened a descriptor."""
    try:
        info = os.open(f"fdinfo/{descriptor}", os.O_RDONLY | os.O_CLOEXEC, dir_fd=caller)
    except FileNotFoundError:
        raise OSError(errno.EBADF, "no such descriptor") from None
    try:
        return int(os.read(info, 256).partition(b"flags:")[2].split(None, 1)[0], 8)
    finally:
        os.close(info)


def _own_link(caller: int, pid: int, path: bytes) -> tuple[int, bytes] | None:
    """If a path leads through a descriptor of the caller, open that; return it with the rest of the path.

    /proc/self is another directory for every reader. Old C libraries change a mode through it (fchmodat(3)).
    """
    found = _OWN_LINK.fullmatch(path)
    if found is None:
        return None
    whose, link, in_dev, rest = found.groups()
    if whose is not None and whose.isdigit() and int(whose) != pid:
        return None
    opened = os.open(in_dev or link, _HOLD, dir_fd=caller)
    return opened, rest if rest is not None or not path.endswith(b"/") else b"."


# ---------------------------------------------------------------- the file, here


def _walk(place: _Writable, name: bytes) -> int | None:
    """Open a file by its name from a place around it, through no symbolic link; None if there is none."""
    if name == place.name:
        return os.dup(place.held)
    try:
        beneath = _RESOLVE_BENEATH | _RESOLVE_NO_SYMLINKS
        return _openat2(place.held, name[len(place.name) + 1 :], _HOLD | os.O_NOFOLLOW, beneath)
    except OSError:
        return None


def _change_mode(inside: int, status: os.stat_result, mode: int) -> None:
    if stat.S_ISLNK(status.st_mode):
        raise OSError(errno.EOPNOTSUPP, "a symbolic link has no mode")
    if mode & stat.S_ISUID or (mode & stat.S_ISGID and not stat.S_ISDIR(status.st_mode)):
        raise _refused()
    os.chmod(_link_to(inside), mode)


def _change_length(pid: int, inside: int, length: int) -> None:
    most = resource.prlimit(pid, resource.RLIMIT_FSIZE)[0]
    if most != resource.RLIM_INFINITY and length > most:
        raise OSError(errno.EFBIG, "over the caller's limit")
    os.truncate(_link_to(inside), length)


def _link_to(descriptor: int) -> bytes:
    """Return a path that leads to the very file of a descriptor of this process."""
    return b"/proc/self/fd/%d" % descriptor


def _name_of(descriptor: int) -> bytes:
    try:
        return os.readlink(_link_to(descriptor))
    except OSError:  # longer than the kernel can tell
        return b""


def _refused() -> OSError:
    return OSError(errno.EPERM, "not in a writable place, or not for an agent")


# ---------------------------------------------------------------- the kernel

_libc: Final = ctypes.CDLL(None, use_errno=True)
_syscall = _libc["syscall"]
_syscall.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t)
_syscall.restype = ctypes.c_long
_fchownat = _libc["fchownat"]
_fchownat.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_uint32, ctypes.c_uint32, ctypes.c_int)


def _openat2(start: int, path: bytes, flags: int, resolve: int) -> int:
    how = struct.pack("=3Q", flags, 0, resolve)
    return checked(_syscall(_OPENAT2, start, path, how, len(how)))
