"""The nasty corpus: ways for a process to outlive its session. Each kind is bounded in processes and in time.

    nasty.py KIND FOLDER

Sets the kind up, creates FOLDER/ready, and stays. Standard library only. All processes end after `LIFE` seconds at the
latest, by an alarm or by themselves.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pty
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

LIFE = 90
"""Seconds."""
DEAF = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGPIPE, signal.SIGTSTP)
libc = ctypes.CDLL(None, use_errno=True)
folder = Path(sys.argv[2]) if len(sys.argv) > 2 else Path()
KINDS: dict[str, Callable[[], None]] = {}


def kind(do: Callable[[], None]) -> Callable[[], None]:
    """Register it by its name."""
    KINDS[do.__name__] = do
    return do


def stay() -> None:
    """Sleep until SIGALRM."""
    signal.alarm(LIFE)
    while True:
        signal.pause()


def child(*acts: Callable[[], object]) -> int:
    """Start a process that calls each of `acts`, and then stays."""
    pid = os.fork()
    if pid == 0:
        try:
            for act in acts:
                act()
            stay()
        finally:
            os._exit(0)
    return pid


def deaf() -> None:
    """Ignore every signal that can be ignored."""
    for number in DEAF:
        signal.signal(number, signal.SIG_IGN)


@kind
def double_fork() -> None:
    """Processes forked twice, each in a session of its own, whose parents have ended."""
    for _ in range(5):
        if os.fork() == 0:
            os.setsid()
            if os.fork():
                os._exit(0)
            deaf()
            stay()
        os.wait()


@kind
def hopper() -> None:
    """A process that forks and ends again and again, each time in a new session, so that no pid lives long."""
    deadline = time.monotonic() + LIFE
    if os.fork() == 0:
        while time.monotonic() < deadline:
            if os.fork():
                os._exit(0)
            os.setsid()
        os._exit(0)


@kind
def stopped_tree() -> None:
    """Three levels of stopped processes."""

    def branch(depth: int) -> None:
        pids = [child(lambda: branch(depth - 1)) for _ in range(2 if depth else 0)]
        if depth == 0:
            os.kill(os.getpid(), signal.SIGSTOP)
        for pid in pids:
            os.waitpid(pid, os.WUNTRACED)
        os.kill(os.getpid(), signal.SIGSTOP)

    pid = child(lambda: branch(2))
    os.waitpid(pid, os.WUNTRACED)


@kind
def ignores_signals() -> None:
    """Processes that ignore every signal, each in a process group of its own."""
    for _ in range(4):
        child(deaf, lambda: os.setpgid(0, 0))


@kind
def bomb() -> None:
    """60 processes, each of which starts another when one has ended."""

    def burst() -> None:
        deadline = time.monotonic() + LIFE
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                if os.fork() == 0:
                    os._exit(0)
            time.sleep(0.001)

    started, deadline = 0, time.monotonic() + 10
    while started < 60 and time.monotonic() < deadline:
        with contextlib.suppress(OSError):  # the account may be at its limit of processes for a moment
            child(burst)
            started += 1


@kind
def vfork_parents() -> None:
    """Parents in vfork, whose child hangs before exec; only SIGKILL reaches the parents."""
    fifo = folder / "fifo"
    os.mkfifo(fifo)
    action = [(os.POSIX_SPAWN_OPEN, 0, str(fifo), os.O_RDONLY, 0)]
    pids = [child(lambda: os.posix_spawn("/bin/true", ["true"], {}, file_actions=action)) for _ in range(3)]
    _until(lambda: all(state(pid) == "D" for pid in pids))


@kind
def nohup() -> None:
    """Processes that a user leaves in the background of a shell."""
    subprocess.run(["/bin/sh", "-c", f"nohup sleep {LIFE} >/dev/null 2>&1 & (setsid sleep {LIFE} &) ; :"], check=True)


@kind
def bare_environment() -> None:
    """Three `sleep` processes with empty environments."""
    for _ in range(3):
        child(os.setsid, lambda: os.execve("/bin/sleep", ["sleep", str(LIFE)], {}))


@kind
def false_name() -> None:
    """Processes that call themselves a kernel thread, systemd, or a line of /proc."""
    for name in (b"kworker/0:1", b"systemd", b") S 1 1"):

        def take(name: bytes = name) -> None:
            libc.prctl(15, name, 0, 0, 0)
            if name != b") S 1 1":
                os.execve("/bin/sleep", [f"[{name.decode()}]", str(LIFE)], {})

        child(take)


@kind
def namespaces() -> None:
    """A user and a pid namespace, whose init ignores signals."""
    pids = []
    for _ in range(2):

        def enter() -> None:
            if libc.unshare(0x10000000 | 0x20000000 | 0x20000) != 0:  # user, pid, mount
                os._exit(7)
            child(deaf, os.setsid)

        pids.append(child(enter))
    time.sleep(0.05)
    for pid in pids:
        if os.waitpid(pid, os.WNOHANG)[0]:
            raise OSError("no namespace")


@kind
def memory_file() -> None:
    """A program that has no file on disk."""
    for _ in range(2):
        handle = os.memfd_create("", os.MFD_CLOEXEC)
        os.write(handle, Path("/bin/sleep").read_bytes())
        child(partial(os.execve, handle, ["", str(LIFE)], {}))


@kind
def timetables() -> None:
    """Asks cron, at and systemd to start something later, and writes crontabs directly."""
    line = f"* * * * * /bin/sleep {LIFE}\n"
    for words, given in (
        (["crontab", "-"], line),
        (["at", "now"], f"sleep {LIFE}\n"),
        (["batch"], f"sleep {LIFE}\n"),
        (["systemd-run", "--user", "--scope", "sleep", str(LIFE)], ""),
        (["systemd-run", "--user", "sleep", str(LIFE)], ""),
        (["loginctl", "enable-linger"], ""),
    ):
        if shutil.which(words[0]):
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                subprocess.run(words, input=given, text=True, timeout=5, check=False, capture_output=True)
    name = os.environ.get("USER", "nobody")
    for place in (f"/var/spool/cron/crontabs/{name}", f"/var/spool/cron/{name}", f"/etc/cron.d/{name}"):
        with contextlib.suppress(OSError):
            Path(place).write_text(line)
    child(os.setsid)


@kind
def traced() -> None:
    """Processes stopped by a tracer that ignores signals."""

    def trace() -> None:
        deaf()
        for _ in range(3):
            pid = os.fork()
            if pid == 0:
                libc.ptrace(0, 0, None, None)
                os.kill(os.getpid(), signal.SIGSTOP)
                os._exit(0)
            os.waitpid(pid, os.WUNTRACED)
        (folder / "traced").touch()

    child(trace)
    _until((folder / "traced").exists)


@kind
def zombies() -> None:
    """A parent that ignores signals and does not reap its zombies."""

    def keep() -> None:
        deaf()
        for _ in range(20):
            if os.fork() == 0:
                os._exit(0)

    child(keep)


@kind
def threads() -> None:
    """A process with many threads, each with a little work."""

    def many() -> None:
        for _ in range(30):
            threading.Thread(target=time.sleep, args=(LIFE,), daemon=True).start()

    child(many)


@kind
def watchdogs() -> None:
    """Two processes that restart each other."""

    def guard(depth: int) -> None:
        deadline = time.monotonic() + LIFE
        os.setsid()
        while depth and time.monotonic() < deadline:
            pid = os.fork()
            if pid == 0:
                guard(depth - 1)
                os._exit(0)
            os.waitpid(pid, 0)
            time.sleep(0.005)
        stay()

    child(lambda: guard(4))


@kind
def subreaper() -> None:
    """A subreaper, which adopts orphans before Hutch does."""

    def adopt() -> None:
        libc.prctl(36, 1, 0, 0, 0)
        double_fork()

    child(adopt)


@kind
def terminal() -> None:
    """A process that ignores SIGHUP on its own terminal."""
    pid, _ = pty.fork()
    if pid == 0:
        deaf()
        stay()


@kind
def escapes_its_group() -> None:
    """Tries to move itself into every cgroup, and into a cgroup namespace."""

    def leave() -> None:
        libc.unshare(0x10000000 | 0x02000000)
        for place in Path("/sys/fs/cgroup").glob("**/cgroup.procs"):
            with contextlib.suppress(OSError):
                place.write_text("0")

    child(leave)


@kind
def slow_to_die() -> None:
    """Processes with much memory and the lowest priority."""

    def swell() -> None:
        held = bytearray(32 << 20)
        for at in range(0, len(held), 4096):
            held[at] = 1
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        os.nice(19)
        deadline = time.monotonic() + LIFE
        while time.monotonic() < deadline:
            held[0] = 1

    for _ in range(3):
        child(swell)


@kind
def set_uid_programs() -> None:
    """Tries to start a process of root with sudo, pkexec and sg, which the account could not end."""
    for words in (["sudo", "-n", "sleep", str(LIFE)], ["pkexec", "sleep", str(LIFE)], ["sg", "root", "sleep 60"]):
        if shutil.which(words[0]):
            subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    child(os.setsid)


def state(pid: int) -> str:
    """Return the state letter of a process in /proc."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""


def _until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.005)


def main() -> None:
    """Set one kind up."""
    resource.setrlimit(resource.RLIMIT_CPU, (LIFE, LIFE))
    KINDS[sys.argv[1]]()
    (folder / "ready").touch()
    stay()


if __name__ == "__main__":
    main()
