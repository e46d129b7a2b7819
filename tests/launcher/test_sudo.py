"""The way for hosts where no unit can be installed: one sudo rule, real sudo, the connection as standard input.

It needs the real `/etc/hutch/launcher.toml`: the launcher is told no other file there. It is seen by what a test
starts alone, in a view of its own.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hutch_daemon.doctor.sudoers import rule
from tests.accounts import Account, account, processes_of
from tests.launcher.stage import DONE, FAILED, REFUSED, Caller, Stage, stage, wait_until

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def sudo() -> str:
    """Where sudo is; installed where that can be done."""
    if shutil.which("sudo") is None and os.geteuid() == 0 and shutil.which("apt-get") is not None:
        for words in (["update"], ["install", "-y", "--no-install-recommends", "sudo"]):
            command = ["apt-get", "-q", "-o", "DPkg::Lock::Timeout=300", *words]
            subprocess.run(command, capture_output=True, check=False)
    program = shutil.which("sudo")
    if program is None:
        pytest.skip("sudo is not installed")
    return program


@pytest.fixture(scope="module")
def alice() -> Iterator[Account]:
    with account("alice") as made:
        yield made


@pytest.fixture(scope="module")
def host(sudo: str, alice: Account) -> Iterator[Stage]:
    """A host whose one rule is the one that Hutch prints, for the served account."""
    with stage(start=False, users=[alice.name]) as made:
        own = Path(f"/etc/sudoers.d/hutch-test-{os.getpid()}")
        own.write_text(rule(made.command()[0], made.served.name))
        own.chmod(0o440)
        try:
            subprocess.run(["visudo", "-c", "-q", "-f", str(own)], check=True)
            yield made
        finally:
            own.unlink()


@contextmanager
def launched(host: Stage, *words: str) -> Iterator[tuple[Caller, subprocess.Popen[bytes]]]:
    """Be hutchd: run sudo as the served account, with one end of a connection that it made."""
    view = (
        "mount --make-rprivate / && mkdir -p /etc/hutch && mount -t tmpfs -o mode=755 none /etc/hutch &&"
        f" cp {host.config} /etc/hutch/launcher.toml && chmod 644 /etc/hutch/launcher.toml &&"
        f' exec setpriv --reuid {host.served.uid} --regid {host.served.gid} --init-groups "$@"'
    )
    os.seteuid(host.served.uid)  # SO_PEERCRED names the maker
    try:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    finally:
        os.seteuid(0)
    command = ["unshare", "--mount", "sh", "-c", view, "sh", "sudo", "-n", *host.command(), *words]
    with host.log.open("ab") as log:
        process = subprocess.Popen(command, stdin=theirs.fileno(), stdout=log, stderr=log, start_new_session=True)
    theirs.close()
    caller = Caller(ours)
    try:
        yield caller, process
    finally:
        caller.close()
        assert process.wait(30) is not None


def test_it_starts_and_ends_executors(host: Stage, alice: Account) -> None:
    """By real sudo, as the rule says; it is done when its connection ends, and executors live on."""
    with launched(host) as (caller, process):
        assert caller.probe()["caps"] is True
        one = host.executor(caller, alice.uid)
        assert one.ask("say(os.getresuid())") == (alice.uid,) * 3
        assert one.ask("say(sorted(os.environ))") == [
            *("HOME", "HUTCH_EXECUTOR_ID", "LANG", "LOGNAME", "PATH", "SHELL", "USER"),
        ]
    assert process.returncode == 0
    assert one.ask("say(9)") == 9

    with launched(host) as (caller, _):
        assert caller.end(one.id).status == DONE
        assert processes_of(alice.uid) == []


def test_no_argument_gets_through(host: Stage) -> None:
    """sudo refuses all but the one command, so that nobody chooses another configuration."""
    for words in (["--config", "/tmp/x"], ["--check"], ["-h"], [""]):
        with launched(host, *words) as (caller, process):
            with pytest.raises((EOFError, OSError)):
                caller.probe()
            assert process.wait(30) == 1


def test_the_environment_has_no_say(host: Stage, alice: Account) -> None:
    """Neither Python's variables nor those of a service manager come through."""
    hostile = host.root / "hostile"
    hostile.mkdir(exist_ok=True)
    (hostile / "sitecustomize.py").write_text(f"open({str(host.root / 'imported')!r}, 'w')")
    os.environ |= {"PYTHONPATH": str(hostile), "LISTEN_FDS": "1", "HUTCH_CONFIG": "/tmp/x"}
    try:
        with launched(host) as (caller, _):
            assert caller.probe()["v"] == 1
    finally:
        for name in ("PYTHONPATH", "LISTEN_FDS", "HUTCH_CONFIG"):
            del os.environ[name]
    assert not (host.root / "imported").exists()


def test_another_s_connection_is_refused(host: Stage, alice: Account) -> None:
    """Who made the pair is asked of the kernel: not who runs sudo."""
    os.seteuid(alice.uid)
    try:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    finally:
        os.seteuid(0)
    view = (
        "mount --make-rprivate / && mkdir -p /etc/hutch && mount -t tmpfs -o mode=755 none /etc/hutch &&"
        f' cp {host.config} /etc/hutch/launcher.toml && chmod 644 /etc/hutch/launcher.toml && exec "$@"'
    )
    command = ["unshare", "--mount", "sh", "-c", view, "sh", *host.command()]
    process = subprocess.Popen(command, stdin=theirs.fileno())
    theirs.close()
    caller = Caller(ours)

    assert caller.receive().status == REFUSED
    assert process.wait(30) == 0
    caller.close()


def test_a_configuration_that_cannot_be_used_is_said_on_the_connection(host: Stage) -> None:
    """Nobody sees its standard error there."""
    kept = host.config.read_text()
    host.config.write_text("what = 1\n")
    try:
        with launched(host) as (caller, process):
            answer = caller.receive()
            assert answer.status == FAILED
            assert "'what' is no setting" in answer.text
            assert process.wait(30) == 2
    finally:
        host.config.write_text(kept)


def test_an_executor_that_was_just_asked_for_does_not_outlive_the_question(host: Stage, alice: Account) -> None:
    """hutchd goes in the middle of a start: the launcher sees to the end of it before it leaves."""
    from tests.launcher.stage import START, new_id, packet

    log = os.open(host.output, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    executor = new_id()
    host.known.add(executor)
    with launched(host) as (caller, process):
        caller.probe()
        caller.send(packet(START, alice.uid, executor), [log])
        caller.close()
        deadline = time.monotonic() + 30
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
    os.close(log)

    wait_until(lambda: processes_of(alice.uid) == [])
