"""The start of an executor: it has everything of its account and nothing of the launcher."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest

from hutch_shared.processes import start_time
from tests.accounts import Account, group, installed, join
from tests.launcher.stage import DONE, FAILED, REFUSED, Caller, Stage, new_id

pytestmark = pytest.mark.system

LOOK = """
import resource
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
fds = {}
for name in os.listdir("/proc/self/fd"):
    try:
        fds[int(name)] = os.readlink("/proc/self/fd/" + name)
    except OSError:
        pass
say({
    "argv": open("/proc/self/cmdline").read().split("\\0"),
    "uids": os.getresuid(), "gids": os.getresgid(), "groups": os.getgroups(),
    "caps": {name: int(status["Cap" + name], 16) for name in ("Inh", "Prm", "Eff", "Bnd", "Amb")},
    "no_new_privs": int(status["NoNewPrivs"]),
    "umask": status["Umask"].strip(),
    "environ": dict(os.environ), "cwd": os.getcwd(), "fds": fds,
    "core": resource.getrlimit(resource.RLIMIT_CORE), "files": resource.getrlimit(resource.RLIMIT_NOFILE),
    "session": (os.getsid(0), os.getpgid(0), os.getpid()),
    "cgroup": open("/proc/self/cgroup").read(),
    "ignored": int(status["SigIgn"], 16), "blocked": int(status["SigBlk"], 16),
})
"""


def test_an_executor_has_what_its_account_has_and_nothing_else(shared: Stage, hutchd: Caller, alice: Account) -> None:
    """This covers ids, groups, capabilities, umask, environment, directory, limits and session."""
    one = shared.executor(hutchd, alice.uid)
    seen = one.ask(LOOK)

    assert seen["uids"] == (alice.uid,) * 3
    assert seen["gids"] == (alice.gid,) * 3
    assert sorted(seen["groups"]) == sorted(os.getgrouplist(alice.name, alice.gid))
    assert set(seen["caps"].values()) == {0}
    assert seen["no_new_privs"] == 1
    assert seen["umask"] == "0077"
    assert seen["environ"].pop("LC_CTYPE", "C.UTF-8") == "C.UTF-8"  # Python itself sets this variable
    assert seen["environ"] == {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "HOME": str(alice.home),
        "USER": alice.name,
        "LOGNAME": alice.name,
        "SHELL": "/bin/bash",
        "LANG": "C.UTF-8",
        "HUTCH_EXECUTOR_ID": one.id,
    }
    assert seen["cwd"] == str(alice.home)
    assert seen["core"] == (0, 0)
    assert seen["session"] == (one.pid,) * 3
    assert seen["blocked"] == 0
    assert one.start_time == start_time(one.pid)
    assert hutchd.end(one.id).status == DONE
    assert one.ended()


def test_an_executor_has_three_descriptors(shared: Stage, hutchd: Caller, alice: Account) -> None:
    """They are the connection, and the output twice; none of the launcher's. (3 is the puppet's copy of 0.)"""
    one = shared.executor(hutchd, alice.uid)
    fds = one.ask(LOOK)["fds"]
    assert fds[0].startswith("socket:")
    assert fds[1] == fds[2] == str(shared.output)
    # the puppet's own: its copy of 0, and its script, which the interpreter opens
    others = {what for number, what in fds.items() if number > 2} - {fds[0], str(shared.root / "puppet")}

    assert not others
    one.do("print('said', flush=True)")
    assert one.ask("say(1)") == 1
    assert "said" in shared.output.read_text()
    hutchd.end(one.id)


def test_an_executor_cannot_gain_privileges(shared: Stage, hutchd: Caller, alice: Account) -> None:
    """Neither system calls nor a set-uid program make it root."""
    one = shared.executor(hutchd, alice.uid)
    tried = one.ask(
        "import subprocess\n"
        "def refused(do, *args):\n"
        "    try:\n"
        "        do(*args)\n"
        "    except OSError:\n"
        "        return True\n"
        "    return False\n"
        "say([refused(os.setuid, 0), refused(os.setgid, 0), refused(os.setgroups, [0]),"
        " subprocess.run(['su', '-c', 'id'], capture_output=True, stdin=subprocess.DEVNULL).returncode != 0])"
    )

    assert tried == [True] * 4
    hutchd.end(one.id)


def test_a_new_group_applies_to_the_next_start(shared: Stage, hutchd: Caller, alice: Account) -> None:
    """The launcher looks up groups at each start, so it need not be restarted."""
    with group("late") as name:
        before = shared.executor(hutchd, alice.uid)
        join(alice, name)
        after = shared.executor(hutchd, alice.uid)
        import grp

        gid = grp.getgrnam(name).gr_gid

        assert gid not in before.ask("say(os.getgroups())")
        assert gid in after.ask("say(os.getgroups())")
        for one in (before, after):
            hutchd.end(one.id)


def test_an_executor_whose_home_cannot_be_entered_starts_in_the_root_directory(
    shared: Stage, hutchd: Caller, alice: Account
) -> None:
    """The child enters the home as the account, since root could always enter."""
    os.chown(alice.home, 0, 0)
    try:
        one = shared.executor(hutchd, alice.uid)
        assert one.ask("say(os.getcwd())") == "/"
        assert one.ask("say(os.environ['HOME'])") == str(alice.home)
    finally:
        os.chown(alice.home, alice.uid, alice.gid)
    hutchd.end(one.id)


def test_an_executor_is_created_in_a_cgroup_that_its_account_cannot_leave(
    shared: Stage, hutchd: Caller, alice: Account
) -> None:
    """In each hierarchy the group has the executor's name, and only root may write to it."""
    can = hutchd.probe()
    if not can["cgroup"]:
        pytest.skip("kernel: no cgroup can be made here")
    one = shared.executor(hutchd, alice.uid)
    paths = [line.split(":", 2) for line in one.ask(LOOK)["cgroup"].splitlines()]
    inside = {name for _, names, path in paths for name in names.split(",") if path.endswith(f"/hutch-{one.id}")}

    assert Path(one.cgroup).name == f"hutch-{one.id}"
    assert str(one.pid) in Path(one.cgroup, "cgroup.procs").read_text().split()
    assert set(can["limits"]) <= inside or inside == {""}
    assert one.ask(
        f"try:\n  open({os.path.dirname(one.cgroup)!r} + '/cgroup.procs', 'w').write('0')\n  say(False)\n"
        "except OSError:\n  say(True)"
    )
    hutchd.end(one.id)
    assert not Path(one.cgroup).exists()


def test_the_limit_of_open_files_is_set(shared: Stage, hutchd: Caller, alice: Account) -> None:
    """Both the soft and the hard limit are set."""
    one = shared.executor(hutchd, alice.uid, (0, 0, 0, 77))
    assert one.ask(LOOK)["files"] == (77, 77)
    hutchd.end(one.id)


def test_each_account_has_its_own_directory_in_the_spool(shared: Stage, hutchd: Caller, alice: Account) -> None:
    """Others can pass through the spool but not list it; only the account can enter its directory."""
    one = shared.executor(hutchd, alice.uid)
    root, mine = shared.spool.stat(), (shared.spool / str(alice.uid)).stat()

    assert (root.st_uid, stat.S_IMODE(root.st_mode)) == (0, 0o711)
    assert (mine.st_uid, mine.st_gid, stat.S_IMODE(mine.st_mode)) == (alice.uid, alice.gid, 0o700)
    assert one.ask(f"os.mkdir({str(shared.spool / str(alice.uid) / one.id)!r})\nsay(True)")
    hutchd.end(one.id)


def test_a_spool_directory_that_another_account_owns_is_refused(shared: Stage, hutchd: Caller, alice: Account) -> None:
    """A link at its path is refused too."""
    mine = shared.spool / str(alice.uid)
    kept = mine.rename(shared.root / "kept")
    try:
        mine.symlink_to(kept)
        linked = shared.try_start(hutchd, alice.uid)
        mine.unlink()
        mine.mkdir(mode=0o700)
        os.chown(mine, shared.served.uid, 0)
        others = shared.try_start(hutchd, alice.uid)
        mine.rmdir()
    finally:
        kept.rename(mine)

    assert (linked.status, others.status) == (REFUSED, REFUSED)
    assert str(mine) in linked.text


def test_a_spool_directory_whose_mode_was_changed_gets_its_mode_back(
    shared: Stage, hutchd: Caller, alice: Account
) -> None:
    """An agent that changes the mode does not lock its account out."""
    mine = shared.spool / str(alice.uid)
    hutchd.end(shared.executor(hutchd, alice.uid).id)
    for mode in ("0755", "0"):
        assert alice.run("chmod", mode, str(mine)).returncode == 0
        one = shared.executor(hutchd, alice.uid)

        assert stat.S_IMODE(mine.stat().st_mode) == 0o700
        hutchd.end(one.id)


def test_a_program_that_cannot_be_executed_is_reported(shared: Stage, hutchd: Caller, alice: Account) -> None:
    """The reply says that the account may not execute the interpreter. No process and no group remains."""
    closed = shared.root / "closed"
    closed.mkdir(mode=0o700)
    program = closed / "python"
    program.symlink_to(installed().python)
    usual = shared.settings["interpreter"]
    shared.write(interpreter=str(program))
    try:
        executor = new_id()
        answer = shared.try_start(hutchd, alice.uid, executor)
    finally:
        shared.write(interpreter=usual)

    assert answer.status == FAILED
    assert "Permission denied" in answer.text
    assert hutchd.end(executor).status == DONE
    assert not shared.children()


def test_an_executor_is_not_started_twice(shared: Stage, hutchd: Caller, alice: Account) -> None:
    """Its name can be used again after it was ended."""
    one = shared.executor(hutchd, alice.uid)
    again = shared.try_start(hutchd, alice.uid, one.id)

    assert again.status == REFUSED
    assert not one.ended()
    hutchd.end(one.id)
    assert shared.try_start(hutchd, alice.uid, one.id).status == DONE
    hutchd.end(one.id)


def test_the_real_executor_starts(shared: Stage, hutchd: Caller, alice: Account) -> None:
    """The launcher starts the copy beside its interpreter. It reports ready, and its account cannot inspect it."""
    usual = shared.settings.pop("interpreter")
    shared.write()
    try:
        one = shared.executor(hutchd, alice.uid)
    finally:
        shared.write(interpreter=usual)
    assert one.stream.recv(1) == b"\n"

    assert Path(f"/proc/{one.pid}/environ").stat().st_uid == 0
    command = Path(f"/proc/{one.pid}/cmdline").read_bytes().split(b"\0")
    assert command == [str(installed().command("hutch-python")).encode(), b"-P", b"-s", b"-m", b"hutch_executor", b""]
    assert hutchd.end(one.id).status == DONE


def test_the_output_may_be_a_pipe(shared: Stage, hutchd: Caller, alice: Account) -> None:
    """The descriptor must be the write end."""
    from tests.launcher.stage import START

    reading, writing = os.pipe()
    try:
        wrong = hutchd.ask(START, alice.uid, new_id(), descriptors=[reading])
        executor = new_id()
        shared.known.add(executor)
        right = hutchd.ask(START, alice.uid, executor, descriptors=[writing])
    finally:
        os.close(writing)
    stream = socket.socket(fileno=right.descriptors[0])
    stream.sendall(b"print('through the pipe', flush=True)".hex().encode() + b"\n")

    assert wrong.status == REFUSED
    assert os.read(reading, 100) == b"through the pipe\n"
    os.close(reading)
    stream.close()
    os.close(right.descriptors[1])
    hutchd.end(executor)


def test_packages_in_the_home_are_not_imported(shared: Stage, hutchd: Caller, alice: Account) -> None:
    """An agent could install packages where Python looks for those of the user."""
    version = f"python{installed().packages.parent.name.removeprefix('python')}"
    place = alice.home / ".local" / "lib" / version / "site-packages"
    alice.run("mkdir", "-p", place)
    (place / "usercustomize.py").write_text(f"open('{alice.home}/imported', 'w')")
    usual = shared.settings.pop("interpreter")
    shared.write()
    try:
        one = shared.executor(hutchd, alice.uid)
    finally:
        shared.write(interpreter=usual)
    assert one.stream.recv(1) == b"\n"

    assert not (alice.home / "imported").exists()
    hutchd.end(one.id)
