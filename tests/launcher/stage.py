"""A real hutch-launcher with its configuration, and hutchd's side of its socket.

Instead of the interpreter it starts a puppet: a program that reads Python source from its standard input, a socket,
executes it, and sends back each value that the source passes to `say`.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from hutch_launcher.groups import find_groups
from tests.accounts import Account, account, installed, kill_all, need_root

__all__ = ["DONE", "FAILED", "KILL", "MAGIC", "NOBODY", "NOT_YET", "PROBE", "REFUSED", "REQUEST", "START", "SWEEP"]
__all__ += ["Answer", "Caller", "Executor", "Stage", "new_id", "packet", "stage", "wait_until"]

REQUEST: Final = struct.Struct(">8sBxxxI32sQIIII56x")
REPLY: Final = struct.Struct(">8sBxxxIIIIQ476s")
MAGIC: Final = b"hutchL01"
PROBE, START, KILL, SWEEP = 1, 2, 3, 4
DONE, NOT_YET, REFUSED, FAILED = 0, 1, 2, 3
NOBODY: Final = 0xFFFF_FFFF
NO_LIMITS: Final = (0, 0, 0, 0)

_PUPPET: Final = """#!{python} -P
import os, signal, socket, sys, time
stream = socket.socket(fileno=os.dup(0))
def say(what):
    stream.sendall(repr(what).encode() + b"\\0")
lines = stream.makefile("rb")
while source := lines.readline():
    exec(bytes.fromhex(source.decode()).decode())
"""


def new_id() -> str:
    """Return a new executor id."""
    return "x-" + "".join(random.SystemRandom().choices("0123456789abcdefghjkmnpqrstvwxyz", k=16))


def packet(op: int, uid: int = NOBODY, executor: str = "", limits: Sequence[int] = NO_LIMITS, flags: int = 0) -> bytes:
    """Return the packet of a request."""
    return REQUEST.pack(MAGIC, op, uid, executor.encode(), *limits, flags)


def wait_until(true: Callable[[], object], within: float = 30.0) -> None:
    """Wait until `true()` is true; fail after `within` seconds."""
    deadline = time.monotonic() + within
    while not true():
        assert time.monotonic() < deadline, "it did not become true in time"
        time.sleep(0.005)


@dataclass(frozen=True)
class Answer:
    """A reply, and the descriptors that came with it."""

    status: int
    pid: int
    left: int
    oom: int
    full: int
    start_time: int
    text: str
    descriptors: tuple[int, ...]


@dataclass
class Executor:
    """A running puppet."""

    id: str
    uid: int
    pid: int
    pidfd: int
    start_time: int
    cgroup: str
    stream: socket.socket
    lines: Any

    def do(self, source: str) -> None:
        """Make the puppet execute Python source."""
        self.stream.sendall(source.encode().hex().encode() + b"\n")

    def ask(self, source: str) -> Any:
        """Make the puppet execute Python source; return the one value that the source passes to `say`."""
        import ast

        self.do(source)
        said = b""
        while not said.endswith(b"\0"):
            more = self.stream.recv(65536)
            assert more, f"it ended; it had said {said!r}"
            said += more
        return ast.literal_eval(said[:-1].decode())

    def ended(self) -> bool:
        """Return whether the puppet has exited."""
        return bool(select.select([self.pidfd], [], [], 0)[0])

    def close(self) -> None:
        """Close the descriptors that the launcher sent."""
        self.lines.close()
        self.stream.close()
        os.close(self.pidfd)


class Caller:
    """One connection to the launcher."""

    def __init__(self, sock: socket.socket) -> None:
        """Take over a connected socket."""
        self.sock = sock
        sock.settimeout(60)

    def send(self, raw: bytes, descriptors: Sequence[int] = ()) -> None:
        """Send a packet unchanged."""
        socket.send_fds(self.sock, [raw], list(descriptors))

    def receive(self) -> Answer:
        """Return the next reply. EOFError once the launcher has closed the connection."""
        data, descriptors, flags, _ = socket.recv_fds(self.sock, 1024, 8)
        if not data:
            raise EOFError
        assert len(data) == 512
        assert not flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC)
        magic, status, pid, left, oom, full, start, text = REPLY.unpack(data)
        assert magic == MAGIC
        assert data[9:12] == b"\0\0\0"
        return Answer(status, pid, left, oom, full, start, text.rstrip(b"\0").decode(), tuple(descriptors))

    def raw(self, raw: bytes, descriptors: Sequence[int] = ()) -> Answer:
        """Send a packet unchanged; return the reply."""
        self.send(raw, descriptors)
        return self.receive()

    def ask(self, op: int, uid: int = NOBODY, executor: str = "", **more: Any) -> Answer:
        """Make a request, with `descriptors`; return the reply."""
        descriptors = more.pop("descriptors", ())
        return self.raw(packet(op, uid, executor, **more), descriptors)

    def leave(self) -> None:
        """End this side of the connection; return once the launcher has closed its descriptor of it."""
        self.sock.shutdown(socket.SHUT_WR)
        assert self.sock.recv(1) == b""

    def probe(self) -> dict[str, Any]:
        """Return the abilities that the launcher reports."""
        answer = self.ask(PROBE)
        assert answer.status == DONE, answer
        return dict(json.loads(answer.text))

    def end(self, executor: str, within: float = 30.0) -> Answer:
        """Request rounds of killing until nothing is left. The reply has the highest counters of all rounds."""
        deadline, oom, full = time.monotonic() + within, 0, 0
        while True:
            answer = self.ask(KILL, 1, executor)
            oom, full = max(oom, answer.oom), max(full, answer.full)
            if answer.status != NOT_YET:
                return Answer(answer.status, 0, answer.left, oom, full, 0, answer.text, ())
            assert time.monotonic() < deadline, answer
            time.sleep(0.0005)

    def close(self) -> None:
        """Close the connection."""
        self.sock.close()


@dataclass
class Stage:
    """A launcher with its configuration, its socket and its log."""

    root: Path
    served: Account
    settings: dict[str, Any]
    process: subprocess.Popen[bytes] | None = None
    started: list[Executor] = field(default_factory=list)
    known: set[str] = field(default_factory=set)

    @property
    def config(self) -> Path:
        """The configuration file."""
        return self.root / "etc" / "launcher.toml"

    @property
    def socket(self) -> Path:
        """The path of its socket."""
        return self.root / "launcher.sock"

    @property
    def log(self) -> Path:
        """The file with its standard output and error."""
        return self.root / "log"

    @property
    def output(self) -> Path:
        """The file with the output of its executors."""
        return self.root / "output"

    @property
    def spool(self) -> Path:
        """Its spool directory."""
        return self.root / "spool"

    def write(self, **settings: Any) -> None:
        """Change settings, and write the configuration."""
        self.settings |= settings
        self.config.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in self.settings.items()))
        self.config.chmod(0o644)

    def command(self) -> list[str]:
        """The launcher's command."""
        return [str(installed().command("hutch-launcher"))]

    def start(self, *before: str, wait: bool = True, **more: Any) -> None:
        """Start the launcher. The words of `before` go before its command."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*before, *self.command(), "--config", str(self.config), "--listen", str(self.socket)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={"PATH": os.environ["PATH"]},
                cwd="/",
                start_new_session=True,
                **more,
            )
        if wait:
            wait_until(self._listens)

    def _listens(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, self.log.read_text()
        with contextlib.suppress(OSError), contextlib.closing(self.connect()) as caller:
            caller.leave()
            return True
        return False

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Stop the launcher with a signal; return its exit code."""
        assert self.process is not None
        self.process.send_signal(number)
        code = self.process.wait(30)
        self.process = None
        return code

    def connect(self, uid: int | None = None) -> Caller:
        """Connect as the served account, or as `uid`."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        os.seteuid(self.served.uid if uid is None else uid)  # SO_PEERCRED has the uid at connect(2)
        try:
            sock.connect(str(self.socket))
        except BaseException:
            sock.close()
            raise
        finally:
            os.seteuid(0)
        return Caller(sock)

    def try_start(self, to: Caller, uid: int, executor: str | None = None, limits: Sequence[int] = NO_LIMITS) -> Answer:
        """Ask for the start of an executor; return the reply."""
        executor = executor or new_id()
        self.known.add(executor)
        fd = os.open(self.output, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            return to.ask(START, uid, executor, limits=limits, descriptors=[fd])
        finally:
            os.close(fd)

    def executor(self, to: Caller, uid: int, limits: Sequence[int] = NO_LIMITS) -> Executor:
        """Start an executor. Fail unless the reply is `done`."""
        executor = new_id()
        answer = self.try_start(to, uid, executor, limits)
        assert answer.status == DONE, answer
        assert len(answer.descriptors) == 2
        stream = socket.socket(fileno=answer.descriptors[0])
        stream.settimeout(60)
        cgroup = json.loads(answer.text)["cgroup"]
        made = Executor(
            executor, uid, answer.pid, answer.descriptors[1], answer.start_time, cgroup, stream, stream.makefile("rb")
        )
        self.started.append(made)
        return made

    def descriptors(self) -> int:
        """Return the number of the launcher's open descriptors."""
        assert self.process is not None
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def children(self) -> list[int]:
        """Return its child processes, also those not yet reaped."""
        assert self.process is not None
        return [
            int(pid) for pid in Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        ]


@contextmanager
def stage(*, start: bool = True, **settings: Any) -> Iterator[Stage]:
    """Yield a launcher that serves an account of its own. `settings` go into its configuration."""
    need_root()
    made = installed()
    root = Path(tempfile.mkdtemp(prefix="hutch-launcher-", dir="/opt"))
    root.chmod(0o755)
    (root / "etc").mkdir(mode=0o755)
    puppet = root / "puppet"
    puppet.write_text(_PUPPET.format(python=made.python))
    puppet.chmod(0o755)
    try:
        with account("hutchd") as served:
            usual = {"serve": served.name, "spool": str(root / "spool"), "interpreter": str(puppet)}
            this = Stage(root, served, {**usual, **settings})
            this.write()
            try:
                if start:
                    this.start()
                yield this
            finally:
                if this.process is not None:
                    this.stop(signal.SIGKILL)
                _end(this)
    finally:
        shutil.rmtree(root, ignore_errors=True)


def _end(this: Stage) -> None:
    for one in this.started:
        with contextlib.suppress(OSError):
            one.close()
    for uid in {one.uid for one in this.started}:
        kill_all(uid)
    groups = find_groups()
    wait_until(lambda: not sum(groups.kill(executor).left for executor in this.known))
