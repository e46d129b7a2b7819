"""Processes and the peers of sockets, as the kernel reports them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hutch_shared import processes, unix
from hutch_shared.errors import HutchError, Reason

HERE = "import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); s.recv(1)"


@pytest.fixture
def child(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], socket.socket]]:
    """A process that connected to us, and our end of the connection."""
    with unix.listen(tmp_path / "s.sock") as listener:
        listener.socket.setblocking(True)
        process = subprocess.Popen([sys.executable, "-c", HERE, str(tmp_path / "s.sock")])
        sock, _ = listener.socket.accept()
        yield process, sock
        sock.close()
        process.kill()
        process.wait()


def refusal(reason: Reason) -> pytest.RaisesExc[HutchError]:
    return pytest.raises(HutchError, check=lambda error: error.reason is reason)


def test_the_peer_s_account_and_process_come_from_the_kernel(
    child: tuple[subprocess.Popen[bytes], socket.socket],
) -> None:
    """They do not depend on anything that the peer sends."""
    process, sock = child

    assert processes.peer_credentials(sock) == processes.Credentials(os.geteuid(), os.getegid(), process.pid)
    processes.require_live_peer(sock)


def test_a_look_up_that_fails_is_a_refusal() -> None:
    """The kernel knows no peer of a socket of another family."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock, refusal(Reason.NOT_ALLOWED):
        processes.peer_credentials(sock)


def test_a_peer_that_has_gone_is_no_process(child: tuple[subprocess.Popen[bytes], socket.socket]) -> None:
    """Its pid may belong to another process by now."""
    process, sock = child
    process.kill()
    process.wait()

    with refusal(Reason.NOT_ALLOWED):
        processes.require_live_peer(sock)


def test_a_zombie_is_not_alive() -> None:
    """Although it still has its pid, it counts as dead."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    alive = processes.start_time(process.pid)
    process.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    zombie = processes.start_time(process.pid)
    process.communicate()
    gone = processes.start_time(process.pid)

    assert alive is not None
    assert (zombie, gone) == (None, None)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_line_of_parents_is_whole_or_none() -> None:
    """It ends with a process without a parent here. A process that does not exist has no ancestors."""
    ended = subprocess.Popen(["true"])
    ended.wait()

    line = processes.ancestors(os.getpid())
    assert line[:2] == [os.getpid(), os.getppid()]
    assert processes.ancestors(line[-1]) == line[-1:]
    assert processes.ancestors(ended.pid) == []


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_variable_is_that_of_the_start() -> None:
    """The whole name of a variable must match. A process that does not exist has no variables."""
    environment = {"NAME": "a=b", "NAMES": "c", "PATH": os.defpath}
    with subprocess.Popen(
        ["cat"], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"x")
        assert process.stdout.read(1) == b"x"  # the kernel sets the environment after Popen has returned
        alive = [processes.variable_of(process.pid, name) for name in ("NAME", "NAM", "NAMES")]
        process.kill()

    assert alive == ["a=b", None, "c"]
    assert processes.variable_of(process.pid, "NAME") is None


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_parts_of_a_cgroup_are_its_folders() -> None:
    """The result has the components of all hierarchies, and none for a process that does not exist."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    paths = [line.split(":", 2)[2] for line in Path("/proc/self/cgroup").read_text().splitlines()]

    assert set("/".join(paths).split("/")) == set(processes.cgroup_parts(os.getpid()))
    assert processes.cgroup_parts(ended.pid) == ()
