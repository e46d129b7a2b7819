"""The launcher under real sudo with one rule, as on hosts without its unit. Standard input is the connection.

Started so, the launcher reads only `/etc/hutch/launcher.toml`. Each test starts it in a mount namespace of its own that
has this file.
"""

from __future__ import annotations

import os
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
from tests.programs import required_program

pytestmark = pytest.mark.system

OWN_ETC = (
    "mount --make-rprivate / && mount -t tmpfs none /mnt && mkdir -m 755 /mnt/upper /mnt/work &&"
    " mount -t overlay -o lowerdir=/etc,upperdir=/mnt/upper,workdir=/mnt/work overlay /etc &&"
    " mkdir -m 755 -p /etc/hutch"
)
"""Starts a command in a mount namespace whose /etc may be changed; the machine's own /etc stays as it is."""


@pytest.fixture(scope="module")
def sudo() -> str:
    """The path of sudo."""
    return required_program("sudo")


@pytest.fixture(scope="module")
def alice() -> Iterator[Account]:
    with account("alice") as made:
        yield made


@pytest.fixture(scope="module")
def host(sudo: str, alice: Account) -> Iterator[Stage]:
    """A host with the sudo rule that Hutch prints for the served account."""
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
    """Run sudo as the served account, with one end of a connection that this account has made."""
    view = (
        f"{OWN_ETC} && cp {host.config} /etc/hutch/launcher.toml && chmod 644 /etc/hutch/launcher.toml &&"
        f' exec setpriv --reuid {host.served.uid} --regid {host.served.gid} --init-groups "$@"'
    )
    os.seteuid(host.served.uid)  # SO_PEERCRED reports the account that made the pair
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
    """It exits when its connection ends; executors live on, and the next launcher can end them."""
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


def test_sudo_allows_no_argument(host: Stage) -> None:
    """The rule allows the bare command only, so that no caller can choose another configuration."""
    for words in (["--config", "/tmp/x"], ["--check"], ["-h"], [""]):
        with launched(host, *words) as (caller, process):
            with pytest.raises((EOFError, OSError)):
                caller.probe()
            assert process.wait(30) == 1


def test_the_environment_has_no_effect(host: Stage, alice: Account) -> None:
    """sudo passes on neither Python's variables nor those of a service manager."""
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


def test_a_connection_made_by_another_account_is_refused(host: Stage, alice: Account) -> None:
    """The kernel reports the account that made the socket pair; the account that runs sudo does not matter."""
    os.seteuid(alice.uid)
    try:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    finally:
        os.seteuid(0)
    view = f'{OWN_ETC} && cp {host.config} /etc/hutch/launcher.toml && chmod 644 /etc/hutch/launcher.toml && exec "$@"'
    command = ["unshare", "--mount", "sh", "-c", view, "sh", *host.command()]
    process = subprocess.Popen(command, stdin=theirs.fileno())
    theirs.close()
    caller = Caller(ours)

    assert caller.receive().status == REFUSED
    assert process.wait(30) == 0
    caller.close()


def test_an_invalid_configuration_is_reported_on_the_connection(host: Stage) -> None:
    """hutchd does not read the launcher's standard error."""
    kept = host.config.read_text()
    host.config.write_text("what = 1\n")
    try:
        with launched(host) as (caller, process):
            answer = caller.receive()
            assert answer.status == FAILED
            assert "'what' is not a setting" in answer.text
            assert process.wait(30) == 2
    finally:
        host.config.write_text(kept)


def test_an_executor_whose_start_was_not_reported_is_ended_before_the_launcher_exits(
    host: Stage, alice: Account
) -> None:
    """hutchd closes the connection during a start."""
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
