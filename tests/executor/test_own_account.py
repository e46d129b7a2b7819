"""An executor under an account of its own: other processes of the account cannot look inside."""

from __future__ import annotations

import grp
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hutch_executor.events.spool_files import read_spool
from hutch_shared import messages as m
from tests.accounts import Account, account, group, installed
from tests.executor.fake_hutchd import EXECUTOR_ID, FakeHutchd, boot, prompt
from tests.executor.own_account import bash, executor, place, prepare, started
from tests.programs import bubblewrap

pytestmark = pytest.mark.system

THIEF = """
import ctypes, json, os, sys
pid = int(sys.argv[1])
libc = ctypes.CDLL(None, use_errno=True)

def can_open(name):
    try:
        os.close(os.open(f"/proc/{pid}/{name}", os.O_RDONLY))
        return True
    except OSError:
        return False

def call(number, *words):
    whole = [ctypes.c_long(word) if isinstance(word, int) else word for word in words]  # an int fills half a register
    return libc.syscall(ctypes.c_long(number), *whole) >= 0

def trace(how):
    if libc.ptrace(how, pid, 0, 0) < 0:
        return False
    if how == 16:
        os.waitpid(pid, 0)
        libc.ptrace(17, pid, 0, 0)
    return True

buffer = ctypes.create_string_buffer(8)
class Piece(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("size", ctypes.c_size_t)]
here, there = Piece(ctypes.addressof(buffer), 8), Piece(int(sys.argv[2], 16), 8)
found = {name: can_open(name) for name in ("environ", "mem", "maps", "auxv")}
with_pidfd = os.pidfd_open(pid)
found["pidfd_getfd"] = call(438, with_pidfd, 0, 0)
found["process_vm_readv"] = call(310, pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
found["attach"] = trace(16)
found["seize"] = trace(0x4206)
found["fds"] = can_open("fd/0")
print(json.dumps(found))
"""


@pytest.fixture
def open_place() -> Iterator[Path]:
    with place() as made:
        yield made


@pytest.fixture
def who() -> Iterator[Account]:
    with account("a") as made:
        yield made


@pytest.fixture
def spool(open_place: Path, who: Account) -> Path:
    """The account's own folder, below a folder of root's."""
    (open_place / "spool").mkdir(mode=0o711)
    made = open_place / "spool" / str(who.uid)
    made.mkdir(mode=0o700)
    os.chown(made, who.uid, who.gid)
    return made


@pytest.fixture
def hutchd(open_place: Path) -> FakeHutchd:
    return FakeHutchd(open_place / "executor.sock")


def work(who: Account) -> Path:
    made = who.home / "work"
    who.run("mkdir", "-m", "700", made)
    return made


def steal(who: Account, pid: int) -> dict[str, bool]:
    """Try every way into a process from another one of the account; return the ways that are open."""
    address = next(
        (line.split("-")[0] for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if " r" in line), "0"
    )
    done = who.run(installed().python, "-c", THIEF, str(pid), address)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


# ---------------------------------------------------------------- nobody looks inside


def test_it_announces_itself_once_no_other_process_can_look_inside(who: Account) -> None:
    """The executor sends one byte. From then on, other processes of the account cannot look inside."""
    with started(who) as (process, sock):
        said = sock.recv(1)
        owner = Path(f"/proc/{process.pid}/environ").stat().st_uid
        status = Path(f"/proc/{process.pid}/status").read_text()
        ways = steal(who, process.pid)
        sock.sendall(b"no boot line\n")
        rest, code = sock.recv(100), process.wait()
    nothing = subprocess.DEVNULL  # every account may open it
    with subprocess.Popen(["sleep", "60"], stdin=nothing, user=who.uid, group=who.gid, extra_groups=[]) as other:
        open_ways = steal(who, other.pid)
        other.kill()

    assert (said, rest, code) == (b"\n", b"", 2)
    assert owner == 0
    assert "\nTracerPid:\t0\n" in status
    assert not any(ways.values()), ways
    assert all(open_ways.values()), f"the thief is no thief: {open_ways}"


def test_it_ends_if_its_starter_is_gone(who: Account) -> None:
    """The executor ends before it imports the rest."""
    with started(who) as (process, sock):
        sock.close()

        assert process.wait(60) == 2


WATCHER = """
import os, sys, time
own, seen, stolen = os.getuid(), set(), 0
print("ready", flush=True)
sys.stdin.readline()
until = time.monotonic() + 120
while time.monotonic() < until and not os.path.exists(sys.argv[1]):
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) > os.getpid() and name not in seen:
            try:
                if b"hutch_executor" in open(f"/proc/{name}/cmdline", "rb").read():
                    open(f"/proc/{name}/environ", "rb").read()
                    seen.add(name)
                    stolen += 1
            except OSError:
                pass
print(stolen)
"""


def thefts(who: Account, python: Path, starts: int, done: Path) -> int:
    """Start this number of executors; return the number into which another process of the account could look."""
    watcher = subprocess.Popen(
        [installed().python, "-c", WATCHER, done],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        user=who.uid,
        group=who.gid,
        extra_groups=[],
        env=who.env,
    )
    with watcher:
        assert watcher.stdin is not None
        assert watcher.stdout is not None
        watcher.stdout.readline()
        watcher.stdin.write(b"\n")
        watcher.stdin.flush()
        for _ in range(starts):
            with started(who, python) as (_process, sock):
                assert sock.recv(1) == b"\n"
        done.touch()
        return int(watcher.stdout.readline())


def unreadable_python(open_place: Path) -> Path:
    """Make the copy that the README describes: an interpreter that may be executed and not read, with its packages."""
    real = installed().python.resolve()
    made = open_place / "bin" / "hutch-python"
    made.parent.mkdir()
    shutil.copy(real, made)
    made.chmod(0o711)
    shutil.copy(installed().root / "pyvenv.cfg", open_place)
    (open_place / "lib").mkdir()
    for entry in (installed().root / "lib").iterdir():
        (open_place / "lib" / entry.name).symlink_to(entry)
    return made


def test_an_interpreter_that_cannot_be_read_leaves_no_moment_to_look(who: Account, open_place: Path) -> None:
    """The kernel makes its process unreadable from the start. With an ordinary one, there is a moment for an attack."""
    hidden, plain = open_place / "hidden", open_place / "plain"

    of_unreadable = thefts(who, unreadable_python(open_place), 40, hidden)
    of_ordinary = thefts(who, installed().python, 10, plain)

    print(f"looked into: {of_unreadable} of 40 unreadable ones, {of_ordinary} of 10 ordinary ones")
    assert of_unreadable == 0
    assert of_ordinary > 0, "the watcher is too slow to show anything"


async def test_an_executor_serves_with_an_interpreter_that_cannot_be_read(
    hutchd: FakeHutchd, who: Account, spool: Path, open_place: Path
) -> None:
    """The commands of its agents are ordinary processes."""
    with started(who, unreadable_python(open_place)) as (_process, sock):
        assert sock.recv(1) == b"\n"
        sock.sendall(msgspec.json.encode(boot(hutchd.path)) + b"\n")
        async with hutchd.up():
            hutchd.path.chmod(0o666)
            await hutchd.call("prepare_session", prepare(who, work(who), spool))
            await hutchd.call("execute_prompt", prompt(bash("cat /proc/self/environ | tr '\\0' '\\n'")))
            await hutchd.ended()

    assert f"HOME={who.home}" in hutchd.of_kind("tool_result")[0]["text"]


# ---------------------------------------------------------------- the account's set-up


async def said(hutchd: FakeHutchd, who: Account, spool: Path, cwd: Path, *commands: str, **changes: Any) -> list[str]:
    """Run commands as the account's agent does, in a session in `cwd`; return the output of each."""
    hutchd.events.clear()
    async with hutchd.up():
        hutchd.path.chmod(0o666)
        async with executor(hutchd, who):
            await hutchd.call("prepare_session", prepare(who, cwd, spool, **changes))
            await hutchd.call("execute_prompt", prompt(bash(*commands)))
            await hutchd.ended()
    return [result["text"] for result in hutchd.of_kind("tool_result")]


async def test_an_agent_has_its_accounts_login_path_and_no_more_of_the_login(
    hutchd: FakeHutchd, who: Account, spool: Path
) -> None:
    """The agent finds programs that the account installed, and gets none of the login's sockets."""
    tool = who.home / ".local" / "bin" / "mytool"
    who.run("mkdir", "-p", tool.parent)
    who.run("sh", "-c", f"printf '#!/bin/sh\\necho mine\\n' > {tool}; chmod +x {tool}")
    profile = 'echo welcome; PATH="$HOME/.local/bin:$PATH"; export SSH_AUTH_SOCK=/run/agent.sock GPG_AGENT_INFO=x'
    who.run("tee", who.home / ".profile", input=profile + "\n")

    found, env, umask = await said(hutchd, who, spool, work(who), "mytool", "env", "umask")

    assert found == "mine\n"
    assert f"PATH={who.home}/.local/bin:" in env
    assert "SSH_AUTH_SOCK" not in env
    assert "GPG_AGENT" not in env
    assert umask.strip() == "0022"


async def test_with_a_fixed_path_no_file_of_the_account_is_run(hutchd: FakeHutchd, who: Account, spool: Path) -> None:
    """The agent has the executor's PATH and the configured umask."""
    who.run("tee", who.home / ".profile", input=f"touch {who.home}/ran\n")
    setup = m.AccountSetup(path="fixed", umask="027")

    path, umask = await said(hutchd, who, spool, work(who), "echo $PATH", "umask", setup=setup)

    assert path.strip() == who.env["PATH"]
    assert umask.strip() == "0027"
    assert not (who.home / "ran").exists()


async def test_a_directory_shared_by_a_group_stays_shared(hutchd: FakeHutchd, open_place: Path) -> None:
    """Each account's agent can change files that the other's agent made there, but not elsewhere."""
    with group("g") as name, account("a", groups=[name]) as alice, account("b", groups=[name]) as bob:
        shared, spool = open_place / "shared", open_place / "spool"
        shared.mkdir()
        os.chown(shared, 0, grp.getgrnam(name).gr_gid)
        shared.chmod(0o2775)
        spool.mkdir(mode=0o700)
        os.chown(spool, alice.uid, alice.gid)
        makes = "mkdir d; echo one > d/f; echo x > private; git init -q r"
        await said(hutchd, alice, spool, shared, makes)
        changes = bob.run("sh", "-c", "echo two >> d/f && echo three > d/g && touch r/.git/x && rm private", cwd=shared)
        text = (shared / "d" / "f").read_text()
        folder = (shared / "d").stat()
        spool_left = list(spool.iterdir())
        own = work(alice)
        await said(hutchd, alice, spool, own, "echo x > f; mkdir d")
        modes = [(own / made).stat().st_mode & 0o7777 for made in ("f", "d")]

    assert changes.returncode == 0, changes.stderr
    assert text == "one\ntwo\n"
    assert folder.st_mode & 0o7777 == 0o2775
    assert spool_left == []
    assert modes == [0o644, 0o755]


PLAN = """
import json, sys
from hutch_executor.sandbox.plan import plan_sandbox
from hutch_shared import messages as m
print(json.dumps(plan_sandbox(m.SandboxSpec(program=sys.argv[1]), *sys.argv[2:]).argv()))
"""


def sandbox_of(who: Account, program: str, cwd: Path) -> list[str]:
    """Return the command of a sandbox, planned by the installed copy: others may not read the checkout."""
    done = who.run(installed().python, "-c", PLAN, program, cwd, who.home)
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout))


GIT = "git -C repo status --porcelain && echo fine"


async def test_git_judges_owners_as_it_does_for_the_account(
    hutchd: FakeHutchd, who: Account, spool: Path, open_place: Path
) -> None:
    """In and outside a sandbox, git refuses another account's repository unless the account's settings trust it."""
    program = bubblewrap()
    cwd = work(who)
    (cwd / "repo").mkdir()
    subprocess.run(["git", "init", "-q", cwd / "repo"], check=True)
    subprocess.run(["chmod", "-R", "a+rX", cwd / "repo"], check=True)
    inside = [*sandbox_of(who, program, cwd), "sh", "-c", GIT]

    (refused,) = await said(hutchd, who, spool, cwd, GIT)
    refused_inside = who.run(*inside, cwd=cwd)
    who.run("git", "config", "--global", "--add", "safe.directory", cwd / "repo")
    inside = [*sandbox_of(who, program, cwd), "sh", "-c", GIT]
    (trusted,) = await said(hutchd, who, spool, cwd, GIT)
    trusted_inside = who.run(*inside, cwd=cwd)

    assert "dubious ownership" in refused
    assert "dubious ownership" in refused_inside.stderr
    assert trusted == "fine\n"
    assert trusted_inside.stdout == "fine\n", trusted_inside.stderr


# ---------------------------------------------------------------- its spool


async def test_its_spool_is_made_by_it_and_brought_in_by_the_next(
    hutchd: FakeHutchd, who: Account, spool: Path
) -> None:
    """The directory belongs to the account and is closed.

    A killed executor leaves it; it is removed after it was read.
    """
    steps = [{"text": "a"}, {"wait_file": "go"}, {"text": "b"}, {"wait_file": "never"}]
    cwd, own = work(who), spool / EXECUTOR_ID
    with started(who) as (_process, sock):
        assert sock.recv(1) == b"\n"
        sock.sendall(msgspec.json.encode(boot(hutchd.path)) + b"\n")
        async with hutchd.up():
            hutchd.path.chmod(0o666)
            await hutchd.call("prepare_session", prepare(who, cwd, spool))
            await hutchd.call("execute_prompt", prompt("\n".join(map(json.dumps, steps))))
            await hutchd.until(lambda: hutchd.of_kind("text"))
        made = own.stat()
        (cwd / "go").touch()
        await hutchd.until(lambda: any(b'"b"' in part.read_bytes() for part in own.glob("*.part")))
    kept = [n for n, _ in read_spool(own / f"{EXECUTOR_ID}.spool")[1]]

    acked = hutchd.stored
    hutchd.events.clear()  # the next executor counts from 1
    left = []
    async with hutchd.up():
        hutchd.path.chmod(0o666)
        async with executor(hutchd, who):
            for after in (acked, kept[-1]):
                found = await hutchd.call("take_spool", m.TakeSpool(str(own), after))
                left.append([event.n for event in found.events])

    assert (made.st_uid, made.st_mode & 0o7777) == (who.uid, 0o700)
    assert kept[-1] == 3
    assert left == [[3], []]
    assert list(spool.iterdir()) == []
