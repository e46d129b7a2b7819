"""The accounts that the launcher accepts: each rule of its configuration and its allow-list."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.accounts import Account, account, group
from tests.launcher.stage import DONE, PROBE, REFUSED, Answer, Caller, Stage, stage, wait_until

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def alice() -> Iterator[Account]:
    with account("alice", shell="/bin/bash") as made:
        yield made


@pytest.fixture(scope="module")
def shared() -> Iterator[Stage]:
    with stage() as made:
        yield made


@contextmanager
def settings(on: Stage, **changed: Any) -> Iterator[None]:
    """Change settings inside the block."""
    before = dict(on.settings)
    on.write(**changed)
    try:
        yield
    finally:
        on.settings = before
        on.write()


def ask(on: Stage, uid: int, **changed: Any) -> Answer:
    """Return the reply to a probe of `uid` with these settings. A start must get the same status and text."""
    caller = on.connect()
    with settings(on, **changed):
        probed = caller.ask(PROBE, uid)
        started = on.try_start(caller, uid)
    if started.status == DONE:
        for fd in started.descriptors:
            os.close(fd)
        for executor in on.known:
            assert caller.end(executor).status == DONE
    caller.close()
    assert (probed.status, "" if probed.status == DONE else probed.text) == (
        started.status,
        "" if started.status == DONE else started.text,
    )
    return probed


def test_a_listed_user_is_allowed(shared: Stage, alice: Account) -> None:
    """A name in `users` is enough."""
    assert ask(shared, alice.uid, users=[alice.name]).status == DONE


def test_no_account_is_allowed_by_default(shared: Stage, alice: Account) -> None:
    """An empty allow-list allows nothing."""
    answer = ask(shared, alice.uid)
    assert answer.status == REFUSED
    assert "neither among the users nor in one of the groups" in answer.text


def test_a_member_of_a_listed_group_is_allowed(shared: Stage, alice: Account) -> None:
    """The primary group counts like the others, as they are at this request. A missing group has no members."""
    with group("agents") as name:
        assert ask(shared, alice.uid, groups=[name]).status == REFUSED
        subprocess.run(["usermod", "-aG", name, alice.name], check=True)
        assert ask(shared, alice.uid, groups=["no-such-group", name]).status == DONE
        subprocess.run(["gpasswd", "-d", alice.name, name], check=True, capture_output=True)
    assert ask(shared, alice.uid, groups=[alice.name]).status == DONE


@pytest.mark.parametrize("uid", [0, 0xFFFF_FFFE, 64_999, 2**31])
def test_root_and_a_uid_without_an_account_are_refused(shared: Stage, uid: int) -> None:
    """They are refused even if the list allows every uid."""
    assert ask(shared, uid, users=["root"], uid_min=0, uid_max=2**32).status == REFUSED


def test_the_served_account_is_refused(shared: Stage) -> None:
    """An executor with hutchd's uid could read hutchd's files."""
    answer = ask(shared, shared.served.uid, users=[shared.served.name])
    assert answer.status == REFUSED
    assert "never" in answer.text


def test_uids_outside_the_range_are_refused(shared: Stage, alice: Account) -> None:
    """uid_min and uid_max belong to the range."""
    named = {"users": [alice.name]}
    assert ask(shared, alice.uid, uid_min=alice.uid, uid_max=alice.uid, **named).status == DONE
    assert ask(shared, alice.uid, uid_min=alice.uid + 1, **named).status == REFUSED
    assert ask(shared, alice.uid, uid_max=alice.uid - 1, **named).status == REFUSED


def test_a_denied_account_is_refused(shared: Stage, alice: Account) -> None:
    """This holds even if another setting allows it, and if `deny` names the same uid differently."""
    assert ask(shared, alice.uid, users=[alice.name], deny=[alice.name]).status == REFUSED
    other = f"{alice.name}x"
    subprocess.run(["useradd", "--non-unique", "--uid", str(alice.uid), "-M", other], check=True, capture_output=True)
    try:
        assert ask(shared, alice.uid, users=[alice.name], deny=[other]).status == REFUSED
    finally:
        subprocess.run(["userdel", "--force", other], check=True, capture_output=True)


@pytest.mark.parametrize("shell", ["/usr/sbin/nologin", "/bin/false"])
def test_an_account_without_a_login_shell_must_be_dedicated(shared: Stage, shell: str) -> None:
    """A dedicated account needs no login shell, but must be allowed like any other."""
    with account("robot", shell=shell) as robot:
        assert ask(shared, robot.uid, users=[robot.name]).status == REFUSED
        assert ask(shared, robot.uid, users=[robot.name], dedicated=[robot.name]).status == DONE
        assert ask(shared, robot.uid, dedicated=[robot.name]).status == REFUSED


def test_an_expired_account_is_refused(shared: Stage, alice: Account) -> None:
    """It expires at the beginning of the day in shadow(5). A locked password does not expire the account."""
    today = int(time.time() // 86_400)
    for day, status in ((0, REFUSED), (today, REFUSED), (today + 2, DONE), (-1, DONE)):
        subprocess.run(["chage", "-E", str(day), alice.name], check=True)
        assert ask(shared, alice.uid, users=[alice.name]).status == status, day
    subprocess.run(["usermod", "--lock", alice.name], check=True, capture_output=True)
    assert ask(shared, alice.uid, users=[alice.name]).status == DONE


def test_a_changed_list_applies_to_the_next_request(shared: Stage, alice: Account) -> None:
    """It applies on open connections too."""
    caller = shared.connect()
    with settings(shared, users=[alice.name]):
        assert caller.ask(PROBE, alice.uid).status == DONE
    assert caller.ask(PROBE, alice.uid).status == REFUSED
    caller.close()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("users = ['x'", "cannot be used"),
        ("user = ['x']", "'user' is not a setting"),
        ("users = 'x'", "'users' has a value of another type"),
        ("users = [1]", "'users' has a value of another type"),
        ("uid_min = -1", "'uid_min' has a value of another type"),
        ("uid_min = true", "'uid_min' has a value of another type"),
        ("spool = 'relative'", "'spool' must be an absolute path"),
        ("interpreter = 'python'", "'interpreter' must be an absolute path"),
        ("interpreter = '/no/such/python'", "No such file"),
        ("serve = 'no-such-account'", "serves the account 'no-such-account', which does not exist"),
        ("#" + "x" * 70_000, "too large"),
    ],
)
def test_an_invalid_configuration_is_refused(text: str, says: str) -> None:
    """A starting launcher exits with one sentence; a running one refuses to start executors."""
    with stage(start=False) as host:
        host.config.write_text(text)
        assert says in refusal(host)
        host.write()
        host.start()
        caller = host.connect()
        host.config.write_text(text)
        answer = caller.ask(PROBE, 4242)

        assert answer.status == REFUSED
        assert answer.text
        caller.close()


def test_a_number_may_be_zero(shared: Stage, alice: Account) -> None:
    """`gone_after = 0` sweeps a directory as soon as its executor is gone."""
    caller = shared.connect()
    with settings(shared, users=[alice.name], gone_after=0):
        assert caller.ask(PROBE, alice.uid).status == DONE
    caller.close()


def test_a_configuration_that_others_can_change_is_refused(alice: Account) -> None:
    """Root must own the file and every directory above it; only root may write them; none may be a link."""
    with stage(start=False) as host:
        host.config.chmod(0o664)
        assert "only root can write" in refusal(host)
        host.config.chmod(0o646)
        assert "only root can write" in refusal(host)
        host.config.chmod(0o644)
        os.chown(host.config, alice.uid, 0)
        assert "only root can write" in refusal(host)
        os.chown(host.config, 0, 0)
        for place in (host.config.parent, host.root):
            place.chmod(0o775)
            assert f"Root must own {place}" in refusal(host)
            place.chmod(0o755)
            os.chown(place, alice.uid, 0)
            assert f"Root must own {place}" in refusal(host)
            os.chown(place, 0, 0)
        kept = host.config.rename(host.root / "kept.toml")
        host.config.symlink_to(kept)
        assert "symbolic link" in refusal(host)
        host.config.unlink()
        os.mkfifo(host.config, 0o600)
        assert "must be a file" in refusal(host)
        host.config.unlink()
        assert "cannot be read" in refusal(host)
        (host.root / "link").symlink_to(host.config.parent)
        assert "symbolic links" in refusal(host, host.root / "link" / "launcher.toml")
        kept.rename(host.config)
        host.start()


def test_an_interpreter_that_others_can_change_is_refused(alice: Account) -> None:
    """The account that can change it would decide which code runs as every account."""
    with stage(start=False) as host:
        program = Path(host.settings["interpreter"])
        program.chmod(0o775)
        assert "root must own the interpreter" in refusal(host)
        program.chmod(0o755)
        os.chown(program, alice.uid, 0)
        assert "root must own the interpreter" in refusal(host)


def test_an_interpreter_below_a_directory_that_others_can_change_is_refused(alice: Account) -> None:
    """Each directory on the way is checked, also for links: a pyvenv.cfg in it changes the imports."""
    with stage(start=False) as host:
        base, venv = host.root / "base" / "bin", host.root / "venv" / "bin"
        for place in (base, venv):
            place.mkdir(parents=True)
        Path(host.settings["interpreter"]).rename(base / "python3")
        (base / "python").symlink_to("python3")
        (venv / "python").symlink_to("../../base/bin/python")
        (host.root / "current").symlink_to(venv.parent)
        host.write(interpreter=str(host.root / "current" / "bin" / "python"))
        for place in (base, base.parent, venv, venv.parent):
            for mode in (0o775, 0o1777):
                place.chmod(mode)
                assert "and only root may write it" in refusal(host), place
            place.chmod(0o755)
            os.chown(place, alice.uid, 0)
            assert "and only root may write it" in refusal(host), place
            os.chown(place, 0, 0)
        host.start()


def refusal(on: Stage, config: Path | None = None) -> str:
    """Start the launcher, and return the one sentence with which it exits."""
    command = [*on.command(), "--config", str(config or on.config), "--listen", str(on.socket)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30, stdin=subprocess.DEVNULL)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr
    return done.stderr


def test_only_the_served_account_is_answered(shared: Stage, alice: Account) -> None:
    """Every other account is refused, even root, although it could connect to the socket."""
    shared.socket.chmod(0o666)
    shared.root.chmod(0o755)
    try:
        for uid in (alice.uid, 65534, 0):
            caller = shared.connect(uid)
            answer = caller.receive()
            assert (answer.status, answer.text) == (REFUSED, f"Only {shared.served.name} may ask.")
            with pytest.raises((EOFError, OSError)):
                caller.ask(PROBE)
            caller.close()
    finally:
        shared.socket.chmod(0o600)


def test_a_ninth_connection_is_refused(shared: Stage) -> None:
    """The refusal has the reason. A closed connection makes room for another."""
    callers = [shared.connect() for _ in range(8)]
    for caller in callers:
        caller.probe()
    ninth = shared.connect()
    answer = ninth.receive()
    callers.pop().close()

    assert answer.status == REFUSED
    assert "8 connections" in answer.text
    wait_until(lambda: _probes(shared))
    for caller in callers:
        caller.leave()  # so that the next test has room
    for caller in (*callers, ninth):
        caller.close()


def _probes(on: Stage) -> bool:
    caller = on.connect()
    try:
        return caller.ask(PROBE).status == DONE
    except (EOFError, OSError):
        return False
    finally:
        caller.close()


def test_check_prints_what_the_launcher_would_do(shared: Stage, alice: Account) -> None:
    """It prints the accounts with the reasons for refusals, the program, and the cgroups."""
    with settings(shared, users=[alice.name, shared.served.name, "no-such-account"]):
        command = [*shared.command(), "--config", str(shared.config), "--check"]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)

    assert f"only {shared.served.name} (uid {shared.served.uid}) may ask" in done.stdout
    assert f"account        {alice.name}: yes" in done.stdout
    assert f"account        {shared.served.name}: no. Agents never run as" in done.stdout
    assert "account        no-such-account: no. It does not exist." in done.stdout
    assert "cgroups" in done.stdout


def test_help_and_a_start_without_a_socket(shared: Stage) -> None:
    """Without a socket the error says how to start the launcher."""
    helped = subprocess.run([*shared.command(), "--help"], capture_output=True, text=True, check=True)
    bare = subprocess.run(
        [*shared.command(), "--config", str(shared.config)],
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
        timeout=30,
    )

    assert "--listen PATH" in helped.stdout
    assert bare.returncode == 2
    assert "started by systemd" in bare.stderr


def test_a_probe_returns_what_the_launcher_can_do(shared: Stage) -> None:
    """hutchd derives the isolation levels that it promises from this."""
    caller: Caller = shared.connect()
    said = caller.probe()
    caller.close()

    assert said["v"] == 1
    assert said["caps"] is True
    assert said["spool"] == str(shared.spool)
    assert said["cgroup"] in ("v2", "v1", "")
    assert set(said["limits"]) <= {"memory", "pids", "cpu"}
    assert bool(said["root"]) is bool(said["cgroup"])
