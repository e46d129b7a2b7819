"""A hostile agent: attacks another user's files and processes, and records its successes. Standard library only.

    hostile.py TARGETS RESULT [ATTACK …]

TARGETS is the file of `diary.py`, with further places and processes that the test knows. Each attack runs in a process
of its own, for a limited time. RESULT is a JSON object: attack → {"got": [successes], "said": [refusals]}. An attack
that achieved nothing has an empty `got`.
"""
# mypy: disable-error-code="misc"
# mypy cannot infer a lambda that binds its loop's variable, which ruff asks for.

from __future__ import annotations

import array
import contextlib
import ctypes
import errno
import fcntl
import glob
import json
import os
import platform
import resource
import signal
import socket
import stat
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

BOUND = 20
"""Seconds for one attack."""
libc = ctypes.CDLL(None, use_errno=True)
ARM = platform.machine() in ("aarch64", "arm64")
NUMBERS = {
    # system call numbers: of x86_64, of aarch64
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "perf_event_open": (298, 241),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    "pidfd_send_signal": (424, 424),
    "process_madvise": (440, 440),
    "migrate_pages": (256, 238),
    "ioprio_set": (251, 30),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "keyctl": (250, 219),
    "fanotify_init": (300, 262),
    "mount": (165, 40),
    "setns": (308, 268),
    "sched_setaffinity": (203, 122),
    "process_mrelease": (448, 448),
}
IPC_RMID, IPC_STAT, IPC_NOWAIT, GETVAL, SETVAL = 0, 2, 0o4000, 12, 16
PTRACE_ATTACH, PTRACE_DETACH, PTRACE_SEIZE = 16, 17, 0x4206


class Notes:
    """The results of an attack."""

    def __init__(self) -> None:
        self.got: list[str] = []
        self.said: list[str] = []

    def gain(self, what: str) -> None:
        """Record a success."""
        self.got.append(what[:300])

    @contextlib.contextmanager
    def step(self, what: str) -> Iterator[None]:
        """One attempt: an OSError in the block is a refusal."""
        try:
            yield
        except OSError as error:
            self.said.append(f"{what}: {errno.errorcode.get(error.errno or 0, error)}"[:200])

    def achieves(self, what: str, act: Callable[[], object], *, counts: Callable[[Any], bool] = lambda _: True) -> None:
        """Call `act`. It succeeds if it returns a value that `counts` accepts."""
        with self.step(what):
            if counts(found := act()):
                self.gain(f"{what}: {found!r}")
            else:
                self.said.append(f"{what}: nothing")


Attack = Callable[[dict[str, Any], Notes], None]
ATTACKS: dict[str, Attack] = {}


def attack(do: Attack) -> Attack:
    """Register it by its name."""
    ATTACKS[do.__name__] = do
    return do


def syscall(name: str, *arguments: Any) -> int:
    """Make a system call; OSError when it fails."""
    converted = [ctypes.c_long(one) if isinstance(one, int) else one for one in arguments]
    ctypes.set_errno(0)
    returned = int(libc.syscall(ctypes.c_long(NUMBERS[name][ARM]), *converted))
    return checked(returned)


def checked(returned: int) -> int:
    """Raise errno if a call failed."""
    if returned == -1:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return returned


def lines(text: str) -> bool:
    """Return whether a text is not blank."""
    return bool(text.strip())


# ---------------------------------------------------------------- files


@attack
def reads_files(on: dict[str, Any], notes: Notes) -> None:
    """Opens, lists and links files in the victim's home, work directory and spool, also through /proc."""
    for path in on["files"]:
        notes.achieves(f"read {path}", lambda path=path: Path(path).read_bytes()[:80])
        for name, link in (("hard", os.link), ("soft", os.symlink)):
            mine = f"{os.getcwd()}/{name}-{os.getpid()}"
            with notes.step(f"{name} link to {path}"):
                link(path, mine)
                notes.achieves(f"read {path} by a {name} link", lambda mine=mine: Path(mine).read_bytes()[:80])
            with contextlib.suppress(OSError):
                os.unlink(mine)
    for path in on["folders"]:
        notes.achieves(f"list {path}", lambda path=path: os.listdir(path))
        notes.achieves(f"look past {path}", lambda path=path: glob.glob(f"{path}/*/*"), counts=bool)
    for pid in on["pids"].values():
        for way in ("root", "cwd"):
            for path in on["files"]:
                where = f"/proc/{pid}/{way}/{path if way == 'root' else Path(path).name}"
                notes.achieves(f"read {where}", lambda where=where: Path(where).read_bytes()[:80])


@attack
def writes_files(on: dict[str, Any], notes: Notes) -> None:
    """Appends to, truncates, removes and renames the same files, changes their mode, and adds a file."""
    for path in on["files"]:
        notes.achieves(f"append {path}", lambda path=path: os.close(os.open(path, os.O_WRONLY | os.O_APPEND)))
        notes.achieves(f"truncate {path}", lambda path=path: os.truncate(path, 0))
        notes.achieves(f"remove {path}", lambda path=path: os.unlink(path))
        notes.achieves(f"rename {path}", lambda path=path: os.rename(path, f"{path}.gone"))
        notes.achieves(f"open up {path}", lambda path=path: os.chmod(path, 0o666))
        notes.achieves(f"touch {path}", lambda path=path: os.utime(path))
        notes.achieves(f"mark {path}", lambda path=path: os.setxattr(path, "user.mallory", b"was here"))
    for path in on["folders"]:
        notes.achieves(f"make a file in {path}", lambda path=path: Path(path, "mallory").write_text("was here"))
        notes.achieves(f"make a link in {path}", lambda path=path: os.symlink("/etc/passwd", f"{path}/mallory-link"))
        notes.achieves(f"open up {path}", lambda path=path: os.chmod(path, 0o777))
        notes.achieves(f"take {path}", lambda path=path: os.chown(path, os.getuid(), -1))


@attack
def reads_hutch(on: dict[str, Any], notes: Notes) -> None:
    """Reads Hutch's record, master key and logs, and the launcher's list of accounts."""
    for path in on["hutch"]["private"]:
        notes.achieves(f"read {path}", lambda path=path: Path(path).read_bytes()[:80])
    for path in on["hutch"]["private_folders"]:
        notes.achieves(f"list {path}", lambda path=path: os.listdir(path))
    others = Path(on["hutch"]["spool"])
    notes.achieves(
        f"list {others}", lambda: [one for one in os.listdir(others) if one != str(os.getuid())], counts=bool
    )
    notes.achieves("list the other's spool", lambda: os.listdir(others / str(on["uid"])))


@attack
def writes_hutch(on: dict[str, Any], notes: Notes) -> None:
    """Puts files, links and sockets in place of Hutch's, and moves Hutch's away."""
    for path in on["hutch"]["places"]:
        notes.achieves(f"make a file in {path}", lambda path=path: Path(path, "x-mallory").write_text("was here"))
        notes.achieves(f"make a link in {path}", lambda path=path: os.symlink(os.getcwd(), f"{path}/x-link"))
        notes.achieves(f"rename {path}", lambda path=path: os.rename(path, f"{path}.old"))
        with notes.step(f"listen in {path}"):
            squat = socket.socket(socket.AF_UNIX)
            squat.bind(f"{path}/mallory.sock")
            notes.gain(f"listens in {path}")
    for path in on["hutch"]["sockets"] + on["hutch"]["public"]:
        notes.achieves(f"remove {path}", lambda path=path: os.unlink(path))
        notes.achieves(f"rename {path}", lambda path=path: os.rename(path, f"{path}.old"))
        notes.achieves(f"open up {path}", lambda path=path: os.chmod(path, 0o777))
        if path in on["hutch"]["public"]:
            notes.achieves(f"write {path}", lambda path=path: os.close(os.open(path, os.O_WRONLY)))
        lock = f"{path}.lock"
        if os.path.exists(lock):
            notes.achieves(f"lock {lock}", lambda lock=lock: fcntl.flock(os.open(lock, os.O_RDONLY), fcntl.LOCK_EX))


@attack
def watches(on: dict[str, Any], notes: Notes) -> None:
    """Watches with inotify and fanotify which files are opened."""
    here = checked(libc.inotify_init1(os.O_CLOEXEC))
    for path in on["files"] + on["hutch"]["private"] + on["hutch"]["private_folders"]:
        name = os.fsencode(path)
        notes.achieves(f"watch {path}", lambda name=name: checked(libc.inotify_add_watch(here, name, 0xFFF)))
    notes.achieves("watch the machine", lambda: syscall("fanotify_init", 0x4, os.O_RDONLY))


# ---------------------------------------------------------------- processes

READABLE = (
    *("environ", "mem", "maps", "smaps", "numa_maps", "pagemap", "auxv", "stack", "syscall", "io", "personality"),
    *("fdinfo/0", "timers", "task/%d/mem", "task/%d/environ", "attr/keycreate_"),
)
LINKS = ("cwd", "root", "exe", "fd/0", "fd/1", "fd/2", "ns/mnt", "ns/user", "ns/net", "task/%d/cwd", "task/%d/fd/1")
WRITABLE = {
    "oom_score_adj": "1000",
    "mem": "\0",
    "comm": "mallory",
    "clear_refs": "1",
    "coredump_filter": "ff",
    "timerslack_ns": "1",
    "autogroup": "19",
    "uid_map": "0 0 1",
    "setgroups": "allow",
    "attr/current": "mallory",
    "make-it-fail": "1",
}


@attack
def reads_processes(on: dict[str, Any], notes: Notes) -> None:
    """Reads every entry of a process in /proc that is not public, such as environment, memory and descriptors."""
    for name, pid in on["pids"].items():
        for entry in READABLE:
            path = f"/proc/{pid}/{entry % pid if '%' in entry else entry}"
            notes.achieves(f"{name} {path}", lambda path=path: _first(path), counts=bool)
        for entry in LINKS:
            path = f"/proc/{pid}/{entry % pid if '%' in entry else entry}"
            notes.achieves(f"{name} {path}", lambda path=path: os.readlink(path))
            notes.achieves(f"open {name} {path}", lambda path=path: os.open(path, os.O_RDONLY | os.O_NONBLOCK))
        notes.achieves(f"{name} fd", lambda pid=pid: os.listdir(f"/proc/{pid}/fd"))
        notes.achieves(f"{name} map_files", lambda pid=pid: os.listdir(f"/proc/{pid}/map_files"))
    (name, address), *_ = on["memory"].items()
    with notes.step("memory at its place"), open(f"/proc/{on['pids'][name]}/mem", "rb", 0) as memory:
        memory.seek(address)
        notes.gain(f"memory: {memory.read(40)!r}")


def _first(path: str) -> bytes:
    with open(path, "rb", 0) as file:
        return file.read(64) or b""


@attack
def writes_processes(on: dict[str, Any], notes: Notes) -> None:
    """Raises the OOM score of processes, renames them and writes their memory, through /proc."""
    for name, pid in on["pids"].items():
        for entry, value in WRITABLE.items():
            path = f"/proc/{pid}/{entry}"

            def write(path: str = path, value: str = value) -> int:
                handle = os.open(path, os.O_WRONLY)
                return os.write(handle, value.encode())

            notes.achieves(f"{name} {path}", write)


@attack
def reads_what_all_may_read(on: dict[str, Any], notes: Notes) -> None:
    """Searches public command lines, names and states of processes: none may hold a secret."""
    seen = b""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        for entry in ("cmdline", "comm", "status", "cgroup", "stat", "limits", "mountinfo", "mounts", "wchan"):
            with contextlib.suppress(OSError):
                seen += Path(f"/proc/{pid}/{entry}").read_bytes()
    for entry in ("net/unix", "net/tcp", "locks", "keys", "sysvipc/shm", "mounts"):
        with contextlib.suppress(OSError):
            seen += Path(f"/proc/{entry}").read_bytes()
    notes.said.append(f"read {len(seen)} bytes")
    for name, secret in on["secrets"].items():
        if secret.encode() in seen:
            notes.gain(f"{name} stands in what everybody may read")


@attack
def reads_memory_by_call(on: dict[str, Any], notes: Notes) -> None:
    """Accesses memory with process_vm_readv and process_vm_writev."""
    for name, address in on["memory"].items():
        room = ctypes.create_string_buffer(40)
        here = (ctypes.c_ulong * 2)(ctypes.addressof(room), 40)
        there = (ctypes.c_ulong * 2)(address, 40)
        for call in ("process_vm_readv", "process_vm_writev"):
            with notes.step(f"{call} {name}"):
                syscall(call, on["pids"][name], ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
                notes.gain(f"{call} {name}: {room.raw!r}")


@attack
def traces(on: dict[str, Any], notes: Notes) -> None:
    """Attaches to processes and seizes them with ptrace; tries kcmp and perf, which need the same right."""
    for name, pid in on["pids"].items():
        for how, request in (("attach", PTRACE_ATTACH), ("seize", PTRACE_SEIZE)):
            with notes.step(f"{how} {name}"):
                checked(libc.ptrace(request, pid, None, None))
                notes.gain(f"{how} {name}")
                os.kill(pid, signal.SIGCONT)
                libc.ptrace(PTRACE_DETACH, pid, None, None)
        notes.achieves(f"kcmp {name}", lambda pid=pid: syscall("kcmp", pid, os.getpid(), 1, 0, 0))
        event = ctypes.create_string_buffer(struct.pack("IIQQQQ", 1, 128, 9, 0, 0, 0).ljust(128, b"\0"))
        notes.achieves(f"perf {name}", lambda pid=pid, event=event: syscall("perf_event_open", event, pid, -1, -1, 0))


@attack
def takes_descriptors(on: dict[str, Any], notes: Notes) -> None:
    """Takes descriptors with pidfd_getfd, and a namespace with setns."""
    for name, pid in on["pids"].items():
        with notes.step(f"pidfd of {name}"):
            handle = syscall("pidfd_open", pid, 0)
            for fd in range(16):
                notes.achieves(f"fd {fd} of {name}", lambda fd=fd, handle=handle: syscall("pidfd_getfd", handle, fd, 0))
            notes.achieves(f"namespace of {name}", lambda handle=handle: syscall("setns", handle, 0x20000))


@attack
def signals(on: dict[str, Any], notes: Notes) -> None:
    """Sends signals to processes, threads and process groups, and through pidfds."""
    for name, pid in on["pids"].items():
        for number in (0, signal.SIGUSR1, signal.SIGSTOP, signal.SIGTERM, signal.SIGKILL):
            notes.achieves(f"kill {name} {int(number)}", lambda pid=pid, number=number: os.kill(pid, number))
            notes.achieves(f"tgkill {name} {int(number)}", lambda p=pid, n=number: syscall("tgkill", p, p, int(n)))
        notes.achieves(f"killpg {name}", lambda pid=pid: os.killpg(os.getpgid(pid), signal.SIGUSR1))
        with notes.step(f"pidfd of {name}"):
            handle = syscall("pidfd_open", pid, 0)
            notes.achieves(f"by pidfd {name}", lambda h=handle: syscall("pidfd_send_signal", h, 10, None, 0))
            notes.achieves(f"reap {name}", lambda h=handle: syscall("process_mrelease", h, 0))


@attack
def steers(on: dict[str, Any], notes: Notes) -> None:
    """Changes the priority, processors and limits of other processes."""
    for name, pid in on["pids"].items():
        cpus = array.array("L", [1])
        mask = ctypes.create_string_buffer(cpus.tobytes())
        notes.achieves(f"setpriority {name}", lambda pid=pid: checked(libc.setpriority(0, pid, 19)))
        notes.achieves(f"affinity {name}", lambda p=pid, k=mask: syscall("sched_setaffinity", p, 8, k))
        notes.achieves(f"scheduler {name}", lambda pid=pid: os.sched_setscheduler(pid, 5, os.sched_param(0)))
        notes.achieves(f"prlimit {name}", lambda pid=pid: resource.prlimit(pid, resource.RLIMIT_CORE, (0, 0)))
        notes.achieves(f"limits of {name}", lambda pid=pid: resource.prlimit(pid, resource.RLIMIT_NOFILE))
        notes.achieves(f"ioprio {name}", lambda pid=pid: syscall("ioprio_set", 1, pid, 3 << 13))
        notes.achieves(f"setpgid {name}", lambda pid=pid: os.setpgid(pid, 0))
    notes.achieves("priority of all", lambda: checked(libc.setpriority(2, on["uid"], 19)))


@attack
def steers_groups(on: dict[str, Any], notes: Notes) -> None:
    """Raises the limits of its own cgroup, moves the victim there, and freezes, kills or joins the victim's cgroup."""
    mine = _groups(os.getpid())
    theirs = _groups(on["pids"].get("executor", 1))
    values = {"pids.max": "max", "memory.max": "max", "memory.limit_in_bytes": "-1", "cpu.weight": "10000"}
    values |= {"cpu.shares": "262144", "cgroup.subtree_control": "-pids", "notify_on_release": "1"}
    harm = {"cgroup.kill": "1", "cgroup.freeze": "1", "freezer.state": "FROZEN", "pids.max": "1"}
    harm |= {"memory.max": "1", "memory.limit_in_bytes": "1", "cpu.weight": "1", "cpu.shares": "2"}
    for place in mine:
        for name, value in values.items():
            if os.path.exists(f"{place}/{name}"):
                notes.achieves(f"{place}/{name}", lambda p=place, n=name, v=value: Path(p, n).write_text(v))
        notes.achieves(f"make a group in {place}", lambda place=place: os.mkdir(f"{place}/mine"))
        for pid in on["pids"].values():
            notes.achieves(f"move {pid} to {place}", lambda p=place, i=pid: Path(p, "cgroup.procs").write_text(str(i)))
    for place in {*theirs, *(str(Path(one).parent) for one in mine)}:
        for name, value in harm.items():
            if os.path.exists(f"{place}/{name}"):
                notes.achieves(f"{place}/{name}", lambda p=place, n=name, v=value: Path(p, n).write_text(v))
        for entry in ("cgroup.procs", "cgroup.threads", "tasks"):
            if os.path.exists(f"{place}/{entry}"):
                notes.achieves(f"go to {place}", lambda p=place, e=entry: Path(p, e).write_text(str(os.getpid())))
        notes.achieves(f"remove {place}", lambda place=place: os.rmdir(place))


def _groups(pid: int) -> set[str]:
    """Return the directories of the groups of a process."""
    found = set()
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            for mount in ("/sys/fs/cgroup", "/sys/fs/cgroup/unified", f"/sys/fs/cgroup/{controllers}"):
                if os.path.exists(f"{mount}{group}/cgroup.procs"):
                    found.add(f"{mount}{group}".rstrip("/"))
    return found


@attack
def looks_into_its_own_executor(on: dict[str, Any], notes: Notes) -> None:
    """The executor has the same account, but its memory and descriptors are closed to the attack."""
    own = _executor()
    if own is None:
        notes.said.append("it cannot be seen")
        return
    reads_processes({"pids": {"own": own}, "memory": {"own": 0x1000}}, notes)
    traces({"pids": {"own": own}}, notes)
    takes_descriptors({"pids": {"own": own}}, notes)
    reads_memory_by_call({"pids": {"own": own}, "memory": {"own": 0x1000}}, notes)


def _executor() -> int | None:
    """Return the executor among the processes of this account, if it is visible."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if b"hutch_executor\0" in Path(f"/proc/{pid}/cmdline").read_bytes():
                status = Path(f"/proc/{pid}/status").read_text()
                if f"Uid:\t{os.getuid()}\t" in status and int(pid) in _ancestors():
                    return int(pid)
    return None


def _ancestors() -> set[int]:
    found, pid = set(), os.getpid()
    with contextlib.suppress(OSError, ValueError):
        while pid > 1:
            found.add(pid)
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return found


@attack
def finds_descriptors_of_hutch(on: dict[str, Any], notes: Notes) -> None:
    """Examines inherited descriptors: none may be the executor's connection, log or standard input."""
    allowed = (
        os.getcwd(),
        "/dev/null",
        "pipe:",
        "/proc/",
        "anon_inode:",
        "/tmp/claude",
        on["here"],
    )
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            where = os.readlink(f"/proc/self/fd/{fd}")
            if int(fd) in on["own_descriptors"]:
                continue
            if where.startswith("socket:"):
                kind = socket.socket(fileno=os.dup(int(fd)))
                with contextlib.suppress(OSError):
                    where = f"{where} to {kind.getpeername()!r}"
                if on["here"] not in where and "claude" not in where:
                    notes.gain(f"{fd} is {where}")
            elif not where.startswith(allowed) and "/hutch-scratch/" not in where:
                notes.gain(f"{fd} is {where}")


# ---------------------------------------------------------------- between processes


@attack
def takes_shared_memory(on: dict[str, Any], notes: Notes) -> None:
    """Opens shared memory, semaphores and queues of System V and POSIX, and files in /dev/shm."""
    libc.shmat.restype = ctypes.c_void_p
    shm, sem, msg = on["ipc"]["shm"], on["ipc"]["sem"], on["ipc"]["msg"]
    with notes.step("attach"):
        address = libc.shmat(shm, None, 0)
        if address in (None, ctypes.c_void_p(-1).value):
            checked(-1)
        if ctypes.string_at(address, len(on["secrets"]["shm"])).decode(errors="replace") == on["secrets"]["shm"]:
            notes.gain("attached the shared memory")
    room = ctypes.create_string_buffer(512)
    notes.achieves("look at the memory", lambda: checked(libc.shmctl(shm, IPC_STAT, room)))
    notes.achieves("read the semaphore", lambda: checked(libc.semctl(sem, 0, GETVAL)), counts=lambda n: n == 7)
    notes.achieves("set the semaphore", lambda: checked(libc.semctl(sem, 0, SETVAL, 99)))
    notes.achieves("take a message", lambda: checked(libc.msgrcv(msg, room, 100, 0, IPC_NOWAIT)))
    word = struct.pack("l", 1) + b"mallory"
    notes.achieves("leave a message", lambda: checked(libc.msgsnd(msg, word, 7, IPC_NOWAIT)))
    for name, remove in (
        ("memory", lambda: libc.shmctl(shm, IPC_RMID, None)),
        ("semaphore", lambda: libc.semctl(sem, 0, IPC_RMID)),
        ("queue", lambda: libc.msgctl(msg, IPC_RMID, None)),
    ):
        notes.achieves(f"remove the {name}", lambda remove=remove: checked(remove()))
    if on["ipc"].get("mq"):
        queue = on["ipc"]["mq"].encode()
        notes.achieves("open the queue", lambda: checked(libc.mq_open(queue, os.O_RDWR)))
        notes.achieves("remove the queue by name", lambda: checked(libc.mq_unlink(queue)))
    path = on["ipc"]["dev_shm"]
    notes.achieves("read /dev/shm", lambda: Path(path).read_bytes())
    notes.achieves("remove /dev/shm", lambda: os.unlink(path))
    notes.achieves("rename /dev/shm", lambda: os.rename(path, f"{path}.old"))


@attack
def dials_their_sockets(on: dict[str, Any], notes: Notes) -> None:
    """Dials the sockets in the victim's folders and Hutch's private folders, and all abstract sockets."""
    for path in on["sockets"]:
        for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET, socket.SOCK_DGRAM):
            with notes.step(f"dial {path}"):
                line = socket.socket(socket.AF_UNIX, kind)
                line.settimeout(5)
                line.connect(path)
                notes.gain(f"dialled {path}")
    for row in Path("/proc/net/unix").read_text().splitlines()[1:]:
        name = row.split(" ", 7)[-1] if " @" in row else ""
        if "@" not in name:
            continue
        with notes.step(f"dial {name}"):
            there = socket.socket(socket.AF_UNIX)
            there.settimeout(2)
            there.connect("\0" + name[name.index("@") + 1 :])
            uid = struct.unpack("iII", there.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1]
            if uid in (on["uid"], on["hutch"]["uid"]):
                notes.gain(f"dialled {name} of uid {uid}")


@attack
def asks_the_launcher(on: dict[str, Any], notes: Notes) -> None:
    """The launcher's socket is for hutchd only: a packet from another account gets no answer, and nothing starts."""
    packet = struct.pack(">8sBxxxI32sQIIII56x", b"hutchL01", 2, on["uid"], b"x-0123456789abcdef", 0, 0, 0, 0, 0)
    for op in (1, 2, 3, 4):
        with notes.step(f"ask for {op}"):
            line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            line.settimeout(5)
            line.connect(on["hutch"]["launcher"])
            asked = packet[:8] + bytes([op]) + packet[9:]
            socket.send_fds(line, [asked], [os.open("/dev/null", os.O_WRONLY)] if op == 2 else [])
            answer, handed, _, _ = socket.recv_fds(line, 512, 4)
            if answer and answer[8] in (0, 1):
                notes.gain(f"{op} is answered: {answer[:60]!r} {handed}")
            notes.said.append(f"{op}: {answer[40:120]!r}")


@attack
def asks_the_kernel_for_keys(on: dict[str, Any], notes: Notes) -> None:
    """Asks for the keyrings of the victim's account."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/keys").read_text().splitlines():
            key, *_, uid = line.split()[0], line.split()[5]
            if uid == str(on["uid"]):
                notes.achieves(f"read key {key}", lambda key=key: syscall("keyctl", 11, int(key, 16), None, 0))


# ---------------------------------------------------------------- rights


@attack
def gains_rights(on: dict[str, Any], notes: Notes) -> None:
    """Tries to gain capabilities, privileges, uids and groups by calls, set-uid programs and user namespaces."""
    status = dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":\t" in line)
    for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
        if int(status[name], 16):
            notes.gain(f"{name} is {status[name]}")
    if status["NoNewPrivs"] != "1":
        notes.gain("it may gain privileges")
    for name, act in {
        "setuid root": lambda: os.setuid(0),
        "setuid": lambda: os.setuid(on["uid"]),
        "setresuid hutch": lambda: os.setresuid(-1, on["hutch"]["uid"], -1),
        "setgid": lambda: os.setgid(on["gid"]),
        "setgroups": lambda: os.setgroups([on["gid"], 0]),
    }.items():
        notes.achieves(name, act)
    for words in (["sudo", "-n", "id"], ["mount", "-t", "tmpfs", "none", "/mnt"]):
        with notes.step(words[0]):
            done = subprocess.run(words, capture_output=True, text=True, timeout=10, stdin=subprocess.DEVNULL)
            if done.returncode == 0:
                notes.gain(f"{words}: {done.stdout}")


@attack
def reads_as_root_of_a_namespace(on: dict[str, Any], notes: Notes) -> None:
    """Reads as root of a user namespace, which has no rights outside of it."""
    with notes.step("a namespace of its own"):
        uid = os.getuid()
        checked(libc.unshare(0x10000000 | 0x20000))
        Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
    reads_files(on, notes)
    reads_hutch(on, notes)
    for name, pid in on["pids"].items():
        notes.achieves(f"kill {name}", lambda pid=pid: os.kill(pid, 0))
    takes_descriptors(on, notes)


@attack
def opens_the_machine(on: dict[str, Any], notes: Notes) -> None:
    """Opens devices, kernel memory and kernel settings."""
    for path in ("/dev/mem", "/dev/port", "/proc/kcore", "/dev/kmsg", "/dev/vda", "/dev/sda", "/dev/nvme0n1"):
        notes.achieves(f"open {path}", lambda path=path: os.open(path, os.O_RDONLY | os.O_NONBLOCK))
    for path in ("/proc/sysrq-trigger", "/proc/sys/kernel/core_pattern", "/proc/sys/kernel/modprobe", "/etc/passwd"):
        notes.achieves(f"open {path} to write", lambda path=path: os.open(path, os.O_WRONLY))
    for path in ("/etc/shadow", "/etc/sudoers", "/root"):
        notes.achieves(f"open {path}", lambda path=path: os.open(path, os.O_RDONLY))
    notes.achieves("make a device", lambda: os.mknod(f"{os.getcwd()}/disk", stat.S_IFBLK | 0o600, os.makedev(254, 0)))


# ---------------------------------------------------------------- running


def play(do: Attack, on: dict[str, Any]) -> dict[str, list[str]]:
    """Run one attack in a process of its own; return its notes."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        notes = Notes()
        signal.alarm(BOUND)
        try:
            do(on, notes)
        except BaseException as error:  # noqa: BLE001 - the notes count, whichever error ended the attack
            notes.said.append(f"stopped: {error!r}")
        with os.fdopen(writing, "w") as out:
            json.dump({"got": notes.got, "said": notes.said}, out)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as told:
        text = told.read()
    os.waitpid(child, 0)
    found: dict[str, list[str]] = json.loads(text) if text else {"got": [], "said": ["ended without a word"]}
    return found


def main() -> None:
    """Run the named attacks, or all."""
    targets, result, *names = sys.argv[1:]
    on = json.loads(Path(targets).read_text())
    on["here"] = str(Path(result).parent)
    on["own_descriptors"] = []
    found = {name: play(ATTACKS[name], on) for name in names or ATTACKS}
    part = Path(f"{result}.part")
    part.write_text(json.dumps(found))
    part.rename(result)
    print("played", len(found), time.strftime("%X"))


if __name__ == "__main__":
    main()
