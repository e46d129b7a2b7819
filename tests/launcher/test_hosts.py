"""The launcher on other hosts: fewer cgroup hierarchies or none, a service manager, capabilities instead of root."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.accounts import Account, account, processes_of
from tests.launcher.stage import DONE, REFUSED, Caller, Stage, stage, wait_until
from tests.launcher.test_end import DOUBLE_FORK, STOPPED
from tests.programs import required_program

pytestmark = pytest.mark.system

WITHOUT = 'mount --make-rprivate / && {} && shift 0 && exec "$@"'
ONE = "for place in $(awk '$3 == \"cgroup2\" {print $2}' /proc/mounts); do umount -l $place; done"
ALL = "for place in $(awk '$3 ~ /^cgroup/ {print $2}' /proc/mounts); do umount -l $place; done"


@pytest.fixture(scope="module")
def alice() -> Iterator[Account]:
    with account("alice") as made:
        yield made


def in_a_view(what: str) -> list[str]:
    """Return the words that start a command in a mount namespace without some cgroup hierarchies."""
    words = ["unshare", "--mount", "sh", "-c", WITHOUT.format(what), "sh"]
    if subprocess.run([*words, "true"], capture_output=True, check=False).returncode:
        pytest.skip("kernel: no mount namespace can be made here")
    return words


def test_version_1_freezes_and_kills(alice: Account) -> None:
    """On a host without version 2, limits and counters come from version 1."""
    words = in_a_view(ONE)
    with stage(start=False, users=[alice.name]) as host:
        host.start(*words)
        caller = host.connect()
        can = caller.probe()
        if not can["cgroup"]:
            pytest.skip("kernel: no version 1 hierarchy that freezes")
        assert can["cgroup"] == "v1"
        for trick in (DOUBLE_FORK, STOPPED):
            one = host.executor(caller, alice.uid, (1 << 28, 90, 20, 0))
            one.ask(trick)
            assert Path(one.cgroup, "freezer.state").read_text() == "THAWED\n"

            assert caller.end(one.id).status == DONE
            assert processes_of(alice.uid) == []
            assert not Path(one.cgroup).exists()
        caller.close()


def test_without_cgroups_the_descendants_are_killed(alice: Account) -> None:
    """The probe reports this.

    Limits then hold per process. A restarted launcher still ends an executor and its descendants.
    """
    words = in_a_view(ALL)
    with stage(start=False, users=[alice.name]) as host:
        host.start(*words)
        caller = host.connect()
        can = caller.probe()
        assert (can["cgroup"], can["limits"], can["root"]) == ("", [], "")
        assert "no cgroup" in can["why"]

        one = host.executor(caller, alice.uid, (1 << 30, 200, 0, 0))
        assert one.cgroup == ""
        limits = one.ask("from resource import *\nsay([getrlimit(RLIMIT_DATA), getrlimit(RLIMIT_NPROC)])")
        assert limits == [(1 << 30, 1 << 30), (200, 200)]
        one.ask("import ctypes; ctypes.CDLL(None).prctl(36, 1, 0, 0, 0); say(0)")  # a subreaper, as executors are
        one.ask(DOUBLE_FORK)
        other = host.executor(caller, alice.uid)
        host.stop(signal.SIGKILL)
        caller.close()
        host.start(*words)
        caller = host.connect()
        assert host.try_start(caller, alice.uid, one.id).status == REFUSED
        assert caller.end(one.id).status == DONE
        assert processes_of(alice.uid) == [other.pid]
        assert caller.end(other.id).status == DONE
        assert processes_of(alice.uid) == []
        caller.close()


def test_an_account_with_four_capabilities_can_run_the_launcher(alice: Account) -> None:
    """It runs instead of root. It is in the group `shadow`, and its spool exists beforehand."""
    required_program("setpriv")
    with account("keeper") as keeper, stage(start=False, users=[alice.name, keeper.name]) as host:
        host.spool.mkdir()
        host.spool.chmod(0o711)
        os.chown(host.spool, keeper.uid, keeper.gid)
        (host.spool / str(alice.uid)).mkdir(mode=0o700)
        os.chown(host.spool / str(alice.uid), alice.uid, alice.gid)
        caps = "+setuid,+setgid,+kill,+setpcap"
        ids = ["--reuid", keeper.name, "--regid", keeper.name, "--groups", "shadow"]
        held = ["--inh-caps", f"-all,{caps}", "--ambient-caps", f"-all,{caps}", "--bounding-set", f"-all,{caps}"]
        listener = listening(host)
        host.process = under_a_manager(host, listener, "setpriv", *ids, *held)
        caller = host.connect()
        can = caller.probe()
        one = host.executor(caller, alice.uid)
        status = one.ask("say(dict(line.split(':', 1) for line in open('/proc/self/status')))")

        assert can["caps"] is True
        assert {int(status[f"Cap{name}"], 16) for name in ("Inh", "Prm", "Eff", "Bnd", "Amb")} == {0}
        assert status["Uid"].split() == [str(alice.uid)] * 4
        assert one.ask("say(os.getgroups())") == [alice.gid]
        assert one.ask("try:\n  os.setuid(0)\n  say(False)\nexcept OSError:\n  say(True)")
        assert host.try_start(caller, keeper.uid).status == REFUSED  # never the launcher's own account
        assert caller.end(one.id).status == DONE
        assert processes_of(alice.uid) == []
        caller.close()
        listener.close()


def test_a_service_manager_passes_the_socket_and_is_notified(alice: Account) -> None:
    """It does so by LISTEN_FDS and NOTIFY_SOCKET. The socket's file remains when the launcher exits."""
    with stage(start=False, users=[alice.name]) as host, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ear:
        ear.bind(str(host.root / "notify.sock"))
        ear.settimeout(30)
        listener = listening(host)
        host.process = under_a_manager(host, listener)
        assert ear.recv(100) == b"READY=1"

        caller = host.connect()
        one = host.executor(caller, alice.uid)
        said = one.ask("say([name for name in os.environ if name.startswith(('LISTEN', 'NOTIFY'))])")
        assert said == []
        assert caller.end(one.id).status == DONE
        caller.close()
        assert host.stop() == 0
        assert host.socket.exists()
        listener.close()


def test_a_passed_socket_of_another_type_is_refused() -> None:
    """A stream socket would not preserve the borders of packets."""
    with stage(start=False) as host, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(host.socket))
        listener.listen()
        process = under_a_manager(host, listener)

        assert process.wait(30) == 2
        assert "ListenSequentialPacket" in host.log.read_text()


def test_a_second_launcher_does_not_take_the_socket(alice: Account) -> None:
    """The first launcher holds a lock and goes on serving."""
    with stage(users=[alice.name]) as host:
        command = [*host.command(), "--config", str(host.config), "--listen", str(host.socket)]
        second = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
        caller: Caller = host.connect()

        assert second.returncode == 2
        assert "Another launcher listens" in second.stderr
        assert caller.probe()["v"] == 1
        caller.close()


def listening(on: Stage) -> socket.socket:
    """Return a listening socket as a socket unit makes it."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.bind(str(on.socket))
    os.chown(on.socket, on.served.uid, 0)
    on.socket.chmod(0o600)
    sock.listen(8)
    return sock


def under_a_manager(on: Stage, listener: socket.socket, *before: str) -> subprocess.Popen[bytes]:
    """Start the launcher as systemd would, with the socket as descriptor 3."""
    words = " ".join(before)
    script = f'export LISTEN_PID=$$ LISTEN_FDS=1; exec 3<&{listener.fileno()}; exec {words} "$@"'
    command = ["bash", "-c", script, "bash", *on.command(), "--config", str(on.config)]
    env = {"PATH": os.environ["PATH"], "NOTIFY_SOCKET": str(on.root / "notify.sock")}
    with on.log.open("ab") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=env,
            cwd="/",
            pass_fds=[listener.fileno()],
        )
    wait_until(lambda: process.poll() is not None or b"hutch-launcher" in cmdline(process.pid))
    return process


def cmdline(pid: int) -> bytes:
    """Return a process's command line; empty while it is still bash or setpriv."""
    words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return b"" if words[0] in (b"bash", b"setpriv") else b" ".join(words)
