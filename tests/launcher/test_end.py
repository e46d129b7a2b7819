"""The end of an executor: after the launcher has reported it, nothing of the executor is left."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hutch_launcher.groups import Groups, moved_directories
from tests.accounts import Account, account, kill_all, processes_of
from tests.launcher.stage import DONE, KILL, NOT_YET, REFUSED, SWEEP, Answer, Caller, Stage, new_id, stage, wait_until

pytestmark = pytest.mark.system

DOUBLE_FORK = """
for _ in range(20):
    if os.fork() == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
        for number in range(1, 32):
            try: signal.signal(number, signal.SIG_IGN)
            except (OSError, ValueError): pass
        time.sleep(600)
say(1)
"""
STOPPED = """
child = os.fork()
if child == 0:
    os.setsid()
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(600)
os.waitpid(child, os.WUNTRACED)
say(1)
"""
HOPPER = """
if os.fork() == 0:
    while True:
        if os.fork():
            os._exit(0)
time.sleep(0.3)
say(1)
"""
BOMB = """
if os.fork() == 0:
    while True:
        try: os.fork()
        except OSError: pass
time.sleep(0.3)
say(1)
"""
HOG = """
child = os.fork()
if child == 0:
    held = []
    while True:
        held.append(b"x" * (8 << 20))
say(os.waitpid(child, 0)[1])
"""


def need_cgroup(hutchd: Caller, *limits: str) -> None:
    """Skip the test if the launcher can make no cgroup with these limits."""
    can = hutchd.probe()
    if not can["cgroup"] or not set(limits) <= set(can["limits"]):
        pytest.skip(f"kernel: no cgroup with {limits} can be made here")


@pytest.mark.parametrize("trick", [DOUBLE_FORK, STOPPED, HOPPER, BOMB], ids=["setsid", "stopped", "hopper", "bomb"])
def test_nothing_of_an_ended_executor_is_left(shared: Stage, hutchd: Caller, alice: Account, trick: str) -> None:
    """After the reply `done`, no process of the account lives, and the group is removed."""
    need_cgroup(hutchd, "pids")
    one = shared.executor(hutchd, alice.uid, (0, 100, 0, 0))
    one.ask(trick)
    assert processes_of(alice.uid)

    answer = hutchd.end(one.id)
    assert (answer.status, answer.left) == (DONE, 0)
    assert processes_of(alice.uid) == []
    assert not Path(one.cgroup).exists()
    assert one.ended()
    if trick in (BOMB, DOUBLE_FORK):
        assert (answer.full > 0) is (trick == BOMB)


def test_ending_one_executor_does_not_touch_another(shared: Stage, hutchd: Caller, alice: Account) -> None:
    """Both run as the same account."""
    first, second = shared.executor(hutchd, alice.uid), shared.executor(hutchd, alice.uid)
    first.ask(DOUBLE_FORK)
    hutchd.end(first.id)

    assert second.ask("say(2)") == 2
    hutchd.end(second.id)


def test_only_the_process_that_exceeds_the_memory_limit_is_killed(
    shared: Stage, hutchd: Caller, alice: Account
) -> None:
    """Its parent lives, and the reply to the kill counts it."""
    need_cgroup(hutchd, "memory")
    one = shared.executor(hutchd, alice.uid, (64 << 20, 0, 0, 0))
    assert one.ask(HOG) == signal.SIGKILL
    assert one.ask("say(3)") == 3

    answer = hutchd.end(one.id)
    assert answer.status == DONE
    assert answer.oom == 1
    assert answer.full == 0


def test_limits_and_weights_are_set(shared: Stage, hutchd: Caller, alice: Account) -> None:
    """Each is set in the hierarchy that has its controller."""
    need_cgroup(hutchd, "memory", "pids", "cpu")
    one = shared.executor(hutchd, alice.uid, (256 << 20, 123, 50, 0))
    found: dict[str, str] = {}
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, place, kind, *_ = line.split()
        if kind in ("cgroup", "cgroup2"):
            for path in Path(place).rglob(f"hutch-{one.id}"):
                found |= {file.name: file.read_text().strip() for file in path.iterdir() if file.name in LIMITS}

    assert str(256 << 20) in (found.get("memory.max"), found.get("memory.limit_in_bytes"))
    assert found["pids.max"] == "123"
    assert found.get("cpu.weight") == "50" or found.get("cpu.shares") == "512"
    hutchd.end(one.id)


LIMITS = ("memory.max", "memory.limit_in_bytes", "pids.max", "cpu.weight", "cpu.shares")


def test_ending_an_executor_that_never_existed_is_done(hutchd: Caller) -> None:
    """The first reply is `done`, with zero counters."""
    answer = hutchd.ask(KILL, 1, new_id())
    assert (answer.status, answer.left, answer.oom, answer.full) == (DONE, 0, 0, 0)


def test_a_kill_is_answered_at_once(shared: Stage, hutchd: Caller, alice: Account) -> None:
    """One round reports the processes left, and the launcher serves others between rounds."""
    one = shared.executor(hutchd, alice.uid)
    first = hutchd.ask(KILL, alice.uid, one.id)
    other = shared.connect()

    assert first.status in (DONE, NOT_YET)
    assert (first.left > 0) is (first.status == NOT_YET)
    assert other.probe()["v"] == 1
    assert hutchd.end(one.id).status == DONE
    other.close()


def test_an_executor_that_exits_is_reaped(shared: Stage, hutchd: Caller, alice: Account) -> None:
    """It is no zombie afterwards, and can still be ended."""
    one = shared.executor(hutchd, alice.uid)
    one.do("os._exit(0)")
    wait_until(one.ended)
    wait_until(lambda: not shared.children())
    assert hutchd.end(one.id).status == DONE


def test_a_restarted_launcher_ends_executors_of_the_one_before(alice: Account) -> None:
    """Executors outlive a killed launcher; the next one finds them by the names of their groups."""
    with stage(users=[alice.name]) as host:
        caller = host.connect()
        one = host.executor(caller, alice.uid)
        one.ask(DOUBLE_FORK)
        host.stop(signal.SIGKILL)
        assert one.ask("say(4)") == 4
        with pytest.raises(EOFError):
            caller.receive()
        caller.close()

        host.start()
        caller = host.connect()
        assert host.try_start(caller, alice.uid, one.id).status == REFUSED
        assert one.ask("say(5)") == 5
        assert caller.end(one.id).status == DONE
        assert processes_of(alice.uid) == []
        caller.close()


def test_executors_outlive_a_stopped_launcher(alice: Account) -> None:
    """A service manager stops the launcher in order to start a new one."""
    with stage(users=[alice.name]) as host:
        caller = host.connect()
        one = host.executor(caller, alice.uid)
        assert host.stop() == 0

        assert one.ask("say(6)") == 6
        assert not host.socket.exists()
        host.start()
        again = host.connect()
        again.end(one.id)
        for each in (caller, again):
            each.close()


def test_executors_are_ended_once_hutchd_is_gone_too_long(alice: Account) -> None:
    """They are ended `gone_after` seconds after the last connection, also those of an earlier launcher."""
    with stage(users=[alice.name], gone_after=1) as host:
        caller = host.connect()
        old = host.executor(caller, alice.uid)
        old.ask(DOUBLE_FORK)
        host.stop(signal.SIGKILL)
        host.start()
        again = host.connect()
        new = host.executor(again, alice.uid)
        again.end(new_id())
        time.sleep(1.5)  # hutchd is connected, so nothing is ended
        assert [old.ask("say(7)"), new.ask("say(8)")] == [7, 8]
        for each in (caller, again):
            each.close()

        wait_until(lambda: not processes_of(alice.uid))
        wait_until(lambda: not host.children())
        wait_until(lambda: not Path(old.cgroup).exists() and not Path(new.cgroup).exists())
        assert {word for word in host.log.read_text().split() if word.startswith("x-")} == {old.id, new.id}


def test_an_executor_whose_reply_cannot_be_sent_is_ended(shared: Stage, alice: Account) -> None:
    """hutchd does not know of it and would never request its end. This executor does not exit by itself."""
    stubborn = shared.root / "stubborn"
    stubborn.write_text("#!/bin/sh\nexec sleep 600\n")
    stubborn.chmod(0o755)
    usual = shared.settings["interpreter"]
    shared.write(interpreter=str(stubborn))
    log = os.open(shared.output, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    caller = shared.connect()
    executor = new_id()
    shared.known.add(executor)
    from tests.launcher.stage import START, packet

    assert shared.process is not None
    os.kill(shared.process.pid, signal.SIGSTOP)
    caller.send(packet(START, alice.uid, executor), [log])
    caller.close()
    os.kill(shared.process.pid, signal.SIGCONT)
    os.close(log)

    other = shared.connect()
    other.probe()
    wait_until(lambda: not shared.children() and not processes_of(alice.uid))
    shared.write(interpreter=usual)
    assert other.end(executor).status == DONE
    other.close()


def test_an_account_that_is_not_dedicated_is_never_swept(shared: Stage, hutchd: Caller, alice: Account) -> None:
    """The launcher's own configuration lists the dedicated accounts."""
    outside = alice.run("sh", "-c", "sleep 600 >/dev/null 2>&1 & echo $!").stdout
    answer = hutchd.ask(SWEEP, alice.uid)

    assert answer.status == REFUSED
    assert "not dedicated" in answer.text
    assert processes_of(alice.uid) == [int(outside)]
    kill_all(alice.uid)


def test_a_dedicated_account_is_swept(alice: Account, robot: Account) -> None:
    """Processes outside every group, files, shared memory and queues are removed; those of other accounts stay."""
    with stage(users=[robot.name, alice.name], dedicated=[robot.name]) as host:
        caller = host.connect()
        one = host.executor(caller, robot.uid)
        busy = caller.ask(SWEEP, robot.uid)
        assert (busy.status, "runs" in busy.text) == (REFUSED, True)
        caller.end(one.id)
        leave = (
            "ipcmk -M 4096 >/dev/null; ipcmk -Q >/dev/null; ipcmk -S 1 >/dev/null; "
            "mkdir -p /tmp/$1-dir/deep; echo x >/tmp/$1-dir/deep/file; chmod 0 /tmp/$1-dir/deep /tmp/$1-dir; "
            "echo x >/dev/shm/$1-file; ln -s /etc/passwd /var/tmp/$1-link; "
            "(setsid sleep 600 & setsid sleep 600 &) >/dev/null 2>&1 </dev/null"
        )
        for who in (robot, alice):
            assert who.run("sh", "-c", leave, "sh", who.name).returncode == 0
        hopper = "import os\nif os.fork(): os._exit(0)\nwhile True:\n  if os.fork(): os._exit(0)\n"
        robot.run("sh", "-c", 'python3 -c "$1" >/dev/null 2>&1', "sh", hopper)
        assert len(processes_of(robot.uid)) >= 2

        answer = swept(caller, robot.uid)
        assert answer.status == DONE, (answer, left_by(robot))
        assert processes_of(robot.uid) == []
        assert left_by(robot) == []
        assert len(left_by(alice)) == 6
        assert len(processes_of(alice.uid)) == 2
        kill_all(alice.uid)
        caller.close()


def swept(caller: Caller, uid: int) -> Answer:
    """Request rounds of a sweep until one is the last."""
    deadline = time.monotonic() + 60
    while (answer := caller.ask(SWEEP, uid)).status == NOT_YET:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return answer


@pytest.fixture(scope="module")
def robot() -> Iterator[Account]:
    with account("robot", shell="/usr/sbin/nologin") as made:
        yield made


@pytest.fixture(scope="module")
def sweeping(robot: Account) -> Iterator[Stage]:
    with stage(users=[robot.name], dedicated=[robot.name]) as made:
        yield made


@pytest.mark.parametrize("then", ["late", "started"])
def test_an_old_result_does_not_answer_a_new_sweep(sweeping: Stage, robot: Account, then: str) -> None:
    """A result that was not fetched is dropped after a second, and when an executor is started."""
    caller = sweeping.connect()
    assert caller.ask(SWEEP, robot.uid).status == NOT_YET
    wait_until(lambda: not sweeping.children())
    if then == "late":
        time.sleep(1.1)
    else:
        caller.end(sweeping.executor(caller, robot.uid).id)
    assert robot.run("touch", f"/tmp/{robot.name}-file").returncode == 0
    assert caller.ask(SWEEP, robot.uid).status == NOT_YET

    assert swept(caller, robot.uid).status == DONE
    assert left_by(robot) == []
    caller.close()


def test_no_executor_starts_during_a_sweep_of_its_account(sweeping: Stage, robot: Account) -> None:
    """The sweep would end the executor."""
    work = "mkdir /tmp/$1-work; cd /tmp/$1-work; seq 10000 | xargs touch"  # keeps the sweep busy until the start
    assert robot.run("sh", "-c", work, "sh", robot.name).returncode == 0
    caller = sweeping.connect()
    assert caller.ask(SWEEP, robot.uid).status == NOT_YET
    for pid in sweeping.children():
        os.kill(pid, signal.SIGSTOP)
        answer = sweeping.try_start(caller, robot.uid)
        os.kill(pid, signal.SIGCONT)

    assert (answer.status, "being swept; try again" in answer.text) == (REFUSED, True)
    assert swept(caller, robot.uid).status == DONE
    caller.end(sweeping.executor(caller, robot.uid).id)
    caller.close()


def test_a_sweep_removes_deep_trees_and_follows_no_link(sweeping: Stage, robot: Account) -> None:
    """The tree is deeper than the longest path and has directories of mode 0. The targets of links remain."""
    grow = (
        "import os, sys\nos.chdir('/tmp')\n"
        "for name in [sys.argv[1] + '-deep', *['d' * 9] * 3000]:\n"
        "  os.mkdir(name); os.chdir(name); open('file', 'w').close(); os.symlink(sys.argv[2], 'link')\n"
        "  os.mkdir('closed', 0)\nos.chmod('../' + 'd' * 9, 0)"
    )
    home = robot.home / "kept"
    assert robot.run("mkdir", str(home)).returncode == 0
    assert robot.run("touch", str(home / "file")).returncode == 0
    assert robot.run("python3", "-c", grow, robot.name, str(home)).returncode == 0
    caller = sweeping.connect()

    assert swept(caller, robot.uid).status == DONE
    assert left_by(robot) == []
    assert os.listdir(home) == ["file"]
    caller.close()


def left_by(who: Account) -> list[str]:
    """Return an account's files in world-writable places, and its IPC objects."""
    places = [entry for place in ("/tmp", "/var/tmp", "/dev/shm") for entry in os.scandir(place)]
    found = [entry.path for entry in places if who.name in entry.name]
    for kind in ("shm", "sem", "msg"):
        names, *rows = (line.split() for line in Path(f"/proc/sysvipc/{kind}").read_text().splitlines())
        found += [f"{kind} {row[1]}" for row in rows if row[names.index("uid")] == str(who.uid)]
    return found


def test_groups_that_cannot_be_made_leave_nothing_behind(tmp_path: Path) -> None:
    """Directories can be created here, but a limit cannot be written."""
    groups = Groups("v2", tmp_path, {"memory": tmp_path / "missing"})
    with pytest.raises(OSError, match="missing"):
        groups.make("x-0000000000000000", 1, 0, 0)

    assert list(tmp_path.iterdir()) == []


def test_a_group_outside_our_view_of_the_tree_is_not_ended(tmp_path: Path) -> None:
    """The kernel writes the path of such a group with `..`; below our mount that would be another directory."""
    name = "x-0000000000000000"
    for path, found in ((f"/a/hutch-{name}/b", [tmp_path / "a" / f"hutch-{name}"]), (f"/../hutch-{name}", [])):
        assert moved_directories(name, [{"": path}], {"": ("/", str(tmp_path))}) == found
