"""Changes of mode and owner by processes under a real filter: performed in writable places, refused elsewhere."""

from __future__ import annotations

import grp
import logging
import os
import random
import shutil
import stat
import subprocess
import sys
import tarfile
import threading
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from hutch_executor.sandbox.seccomp import native_abi
from hutch_executor.sandbox.supervisor import WATCHED, CallSupervisor
from tests.accounts import account, group, installed
from tests.executor.supervised import Supervised, agent, confined, descriptors, unsupervised

pytestmark = pytest.mark.system

OWN = f"{os.getuid()}, {os.getgid()}"
FOREIGN = os.getuid() + 4321
DEADLINE = 60.0
"""Seconds after which a test gives up."""

CALLS = {
    "chmod": "call('chmod', {path}, 0o640)",
    "fchmodat": "call('fchmodat', CWD, {path}, 0o640)",
    "fchmodat2": "call('fchmodat2', CWD, {path}, 0o640, 0)",
    "fchmod": "with_fd('fchmod', {path}, 0o640)",
    "chown": f"call('chown', {{path}}, {OWN})",
    "lchown": f"call('lchown', {{path}}, {OWN})",
    "fchownat": f"call('fchownat', CWD, {{path}}, {OWN}, 0)",
    "fchown": f"with_fd('fchown', {{path}}, {OWN})",
    "truncate": "call('truncate', {path}, 3)",
}
"""Each call, as the agent makes it for a path."""

WITH_FD = """
def with_fd(name, path, *rest):
    fd = os.open(path, os.O_RDONLY)
    try:
        return call(name, fd, *rest)
    finally:
        os.close(fd)
"""


class Tree(NamedTuple):
    """A writable folder, and what lies beside it; each has a file of mode 0600 and a folder."""

    work: Path
    beside: Path


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    for folder in ("work", "beside"):
        (tmp_path / folder / "d").mkdir(parents=True)
        for name in ("f", "d/g"):
            (tmp_path / folder / name).write_bytes(b"content")
            (tmp_path / folder / name).chmod(0o600)
    return Tree(tmp_path / "work", tmp_path / "beside")


@pytest.fixture
def confined_agent(tree: Tree) -> Iterator[Supervised]:
    with agent(tree.work) as made:
        made(WITH_FD)
        yield made


def snapshot(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return all that a change of mode, owner or length changes, also if it changes nothing: the time of the change."""
    found: dict[str, tuple[int, ...]] = {}
    for path in (folder, *folder.rglob("*")):
        one = path.lstat()
        found[str(path)] = (one.st_mode, one.st_uid, one.st_gid, one.st_size, one.st_ctime_ns)
    return found


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def native(*names: str) -> list[str]:
    """Return the calls that this machine's ABI has."""
    abi = native_abi()
    assert abi is not None
    return [name for name in names if abi.number(name) is not None]


# ---------------------------------------------------------------- where


def test_each_call_is_performed_in_a_writable_place(tree: Tree, confined_agent: Supervised) -> None:
    """A call for a file below the place has the effect that the kernel gives it, and succeeds."""
    got, before = {}, snapshot(tree.work)
    for name in native(*CALLS):
        got[name] = confined_agent(CALLS[name].format(path="b'd/g'"))

    assert set(got.values()) == {"ok"}, got
    assert mode(tree.work / "d/g") == 0o640
    assert (tree.work / "d/g").stat().st_size == 3
    assert {path for path, was in before.items() if snapshot(tree.work)[path] != was} == {str(tree.work / "d/g")}


def owner_and_mode(path: Path) -> tuple[int, int, int]:
    """Return what must stay of a file that other tests replace when they add accounts."""
    found = path.lstat()
    return found.st_mode, found.st_uid, found.st_gid


@pytest.mark.parametrize(
    "path",
    ["b'../beside/f'", "os.fsencode(os.path.abspath('../beside/f'))", "b'leads_out/f'", "b'link'", "b'/etc/passwd'"],
)
def test_each_call_is_refused_elsewhere(tree: Tree, confined_agent: Supervised, path: str) -> None:
    """Whatever way leads there, the call fails with EPERM, and the file's status is as it was."""
    (tree.work / "leads_out").symlink_to("../beside")
    (tree.work / "link").symlink_to(tree.beside / "f")
    before, passwd = snapshot(tree.beside), owner_and_mode(Path("/etc/passwd"))

    got = {name: confined_agent(CALLS[name].format(path=path)) for name in native(*CALLS)}

    own_link = got.pop("lchown", "EPERM")
    assert set(got.values()) == {"EPERM"}, got
    assert own_link == ("ok" if path == "b'link'" else "EPERM")
    assert snapshot(tree.beside) == before
    assert owner_and_mode(Path("/etc/passwd")) == passwd


def test_each_way_to_name_a_file_inside_works(tree: Tree, confined_agent: Supervised) -> None:
    """By a link from elsewhere, a descriptor of a folder, an empty path, the agent's own descriptors, after chdir."""
    (tree.beside / "leads_in").symlink_to(tree.work)
    confined_agent("d = os.open('d', os.O_RDONLY); g = os.open('d/g', os.O_RDONLY); named = os.open('d/g', os.O_PATH)")
    ways = {
        "link": "call('fchmodat', CWD, b'../beside/leads_in/d/g', {})",
        "folder": "call('fchmodat', d, b'g', {})",
        "up": "call('fchmodat', d, b'../d/./g', {})",
        "empty": "call('fchmodat2', g, b'', {}, EMPTY)",
        "only named": "call('fchmodat2', named, b'', {}, EMPTY)",
        "own": "call('fchmodat', CWD, b'/proc/self/fd/%d' % g, {})",
        "own, only named": "call('fchmodat', CWD, b'/proc/self/fd/%d' % named, {})",
        "own by number": "call('fchmodat', CWD, b'/proc/%d/fd/%d' % (os.getpid(), g), {})",
        "own thread": "call('fchmodat', CWD, b'/proc/thread-self/fd/%d' % g, {})",
        "own folder": "call('fchmodat', CWD, b'/proc/self/fd/%d/g' % d, {})",
        "own cwd": "call('fchmodat', CWD, b'/proc/self/cwd/d/g', {})",
        "device folder": "call('fchmodat', CWD, b'/dev/fd/%d' % g, {})",
        "nofollow": "call('fchmodat2', CWD, b'd/g', {}, NOFOLLOW)",
        "after chdir": "(os.chdir('d'), call('fchmodat', CWD, b'g', {}))[1]",
        "moved": "(os.rename('../d', '../e'), call('fchmodat', d, b'g', {}))[1]",
    }

    got = {}
    for number, (name, way) in enumerate(ways.items()):
        path = tree.work / ("e" if name == "moved" else "d") / "g"
        got[name] = (confined_agent(way.format(0o600 + number)), mode(path))

    assert got == {name: ("ok", 0o600 + number) for number, name in enumerate(ways)}


def test_a_descriptor_of_a_file_that_is_only_shown_does_not_help(tree: Tree, confined_agent: Supervised) -> None:
    """By itself, as a start, with an empty path, through /proc: refused."""
    before = snapshot(tree.beside)
    confined_agent("f = os.open('../beside/f', os.O_RDONLY); d = os.open('../beside', os.O_RDONLY)")
    tries = [
        *("call('fchmod', f, 0o666)", f"call('fchown', f, {OWN})", "call('fchmod', d, 0o777)"),
        *("call('fchmodat', d, b'f', 0o666)", "call('fchmodat2', f, b'', 0o666, EMPTY)"),
        *("call('fchmodat2', d, b'', 0o777, EMPTY)", f"call('fchownat', f, b'', {OWN}, EMPTY)"),
        "call('fchmodat', CWD, b'/proc/self/fd/%d' % f, 0o666)",
        "call('fchmodat', CWD, b'/proc/self/fd/%d/f' % d, 0o666)",
        "(os.fchdir(d), call('fchmodat', CWD, b'f', 0o666))[1]",
    ]

    got = [confined_agent(one) for one in tries]

    assert got == ["EPERM"] * len(tries)
    assert snapshot(tree.beside) == before


def test_a_place_may_be_a_file_and_the_top_of_a_place_belongs_to_it(tree: Tree) -> None:
    """Its neighbours do not, nor a folder whose name begins like the place's; a missing place holds nothing."""
    shutil.copytree(tree.work, f"{tree.work}-2")
    with agent(tree.work, tree.beside / "f", tree.beside / "missing" / "x") as some:
        got = [
            some(f"call('fchmodat', CWD, b'{path}', 0o700)")
            for path in (
                ".",
                "../work",
                "../beside/f",
                "../beside/d/g",
                "../beside",
                "../work-2/f",
                "../beside/missing/x",
            )
        ]

    assert got == ["ok", "ok", "ok", "EPERM", "EPERM", "EPERM", "ENOENT"]


def test_a_place_that_became_a_link_holds_nothing_behind_it(tree: Tree) -> None:
    """Only the link itself would be writable, as for Landlock."""
    (tree.work / "link").symlink_to(tree.beside)
    with agent(tree.work / "link", cwd=tree.work) as some:
        got = [some(f"call('fchmodat', CWD, b'{path}', 0o700)") for path in ("link/f", "link", "../beside/f", "f")]

    assert got == ["EPERM"] * 4


def test_the_agents_own_descriptors_are_not_the_supervisors(tree: Tree, confined_agent: Supervised) -> None:
    """A path through /proc/self, or a link to there, never leads to a file that the supervisor has open."""
    (tree.work / "self").symlink_to("/proc/self/fd")
    with (tree.work / "f").open() as open_here:
        before, number = snapshot(tree.work), os.dup2(open_here.fileno(), 777)
        paths = (f"/proc/self/fd/{number}", f"/dev/fd/{number}", f"self/{number}", f"/proc/{os.getpid()}/fd/{number}")
        got = [confined_agent(f"call('fchmodat', CWD, b'{path}', 0o666)") for path in paths]
        os.close(number)

    assert got == ["ENOENT", "ENOENT", "ELOOP", "ELOOP"]
    assert snapshot(tree.work) == before


# ---------------------------------------------------------------- what


def test_set_id_bits_are_refused_but_for_folders_of_a_group(tree: Tree, confined_agent: Supervised) -> None:
    """A program with one would run as the account for any user. A folder's set-group-id bit only names a group."""
    cases = [("f", 0o4755), ("f", 0o2755), ("f", 0o6755), ("d", 0o4755), ("d", 0o2775), ("d", 0o1777), ("f", 0o1600)]

    got = [confined_agent(f"call('fchmodat', CWD, b'{name}', {bits})") for name, bits in cases]

    assert got == ["EPERM"] * 4 + ["ok"] * 3
    assert (mode(tree.work / "d"), mode(tree.work / "f")) == (0o1777, 0o1600)


def test_an_owner_may_be_named_but_not_changed(tree: Tree, confined_agent: Supervised) -> None:
    """The owner and -1 are accepted, as tar and cp use them; another owner or group is refused, with any privilege."""
    owners = ["SAME, SAME", OWN, f"{os.getuid()}, SAME", f"SAME, {os.getgid()}"]
    others = [f"{FOREIGN}, SAME", f"SAME, {FOREIGN}", f"{FOREIGN}, {FOREIGN}"]

    got = [confined_agent(f"call('fchownat', CWD, b'f', {one}, 0)") for one in owners + others]

    assert got == ["ok"] * 4 + ["EPERM"] * 3


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make a file of another account")
def test_a_file_of_another_account_stays_as_it_is(tree: Tree, confined_agent: Supervised) -> None:
    """An executor with privileges does not lend them: its thread has none."""
    os.chown(tree.work / "f", FOREIGN, FOREIGN)
    (tree.work / "closed").mkdir()
    (tree.work / "closed" / "f").touch()
    os.chown(tree.work / "closed", FOREIGN, FOREIGN)
    (tree.work / "closed").chmod(0o700)
    before = snapshot(tree.work)

    got = [
        confined_agent(f"call('fchmodat', CWD, b'{path}', 0o666)") for path in ("f", "closed", "closed/f", "closed/x")
    ]

    assert got == ["EPERM", "EPERM", "EACCES", "EACCES"]
    assert confined_agent("call('truncate', b'f', 0)") == "EACCES"
    assert snapshot(tree.work) == before


def test_files_without_a_name(tree: Tree, confined_agent: Supervised) -> None:
    """Those of a writable place and those in memory are changed, others are not; nor is a mere name that ends so."""
    (tree.work / "x (deleted)").touch(0o600)
    confined_agent("""
def opened(path, flags=os.O_RDONLY):
    fd = os.open(path, flags)
    os.unlink(path)
    return fd
gone = opened('f')
os.mkdir('e'); e = os.open('e', os.O_RDONLY); os.rmdir('e')
memory = os.memfd_create('x')
unnamed = os.open('.', os.O_TMPFILE | os.O_RDWR, 0o600)
os.link('d/g', 'd/h'); linked = opened('d/g')
outside = opened('../beside/f')
r, w = os.pipe()
null = os.open('/dev/null', os.O_RDWR)
""")
    cases = ["gone", "e", "memory", "unnamed", "linked", "outside", "r", "null", "0"]

    got = {one: confined_agent(f"call('fchmod', {one}, {0o666 if one == 'null' else 0o640})") for one in cases}
    modes = [confined_agent(f"os.fstat({one}).st_mode & 0o7777") for one in ("gone", "e", "memory", "unnamed")]
    by_name = confined_agent("call('fchmodat', CWD, b'x (deleted)', 0o640)")

    fine = dict.fromkeys(("gone", "e", "memory", "unnamed"), "ok")
    assert got == fine | dict.fromkeys(("linked", "outside", "r", "null", "0"), "EPERM")
    assert modes == [0o640] * 4
    assert (by_name, mode(tree.work / "x (deleted)")) == ("ok", 0o640)


def test_special_files_with_a_name(tree: Tree) -> None:
    """A FIFO and a socket of the place are changed without being opened; a device is not, even if it is a place.

    The mode is one that the device has: a supervisor that changes it leaves the machine as it was.
    """
    os.mkfifo(tree.work / "fifo", 0o600)
    with agent(tree.work, Path("/dev/null")) as some:
        some("import socket; s = socket.socket(socket.AF_UNIX); s.bind('s')")
        got = [some(f"call('fchmodat', CWD, b'{path}', 0o666)") for path in ("fifo", "s", "/dev/null")]

    assert got == ["ok", "ok", "EPERM"]
    assert (mode(tree.work / "fifo"), mode(tree.work / "s")) == (0o666, 0o666)


def test_a_length_is_bounded_by_the_agents_own_limit(tree: Tree, confined_agent: Supervised) -> None:
    """An agent with a limit of its own cannot make longer files through the supervisor."""
    confined_agent("resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))")

    got = [confined_agent(f"call('truncate', b'f', {length})") for length in (1000, 1001, -1)]

    assert got == ["ok", "EFBIG", "EINVAL"]
    assert (tree.work / "f").stat().st_size == 1000


IN_AN_ACCOUNT = """
import json, os, socket, subprocess, sys
from hutch_executor.sandbox import confine
from hutch_executor.sandbox.supervisor import WATCHED, CallSupervisor
from hutch_executor.sandbox.seccomp import assemble, native_abi, watch_rules
from hutch_shared.hardening import forbid_dumps

forbid_dumps()
ours, theirs = socket.socketpair()
front = [sys.executable, "-I", "-S", confine.PROGRAM, "-", assemble(watch_rules(WATCHED), native_abi()).hex()]
process = subprocess.Popen([*front, str(theirs.fileno()), "sh"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                           stderr=subprocess.DEVNULL, pass_fds=[theirs.fileno()], text=True)
supervisor = CallSupervisor(socket.recv_fds(ours, 1, 1)[1][0], sys.argv[1:2])
print(process.communicate("".join(f"({one}) && echo ok || echo no; " for one in sys.argv[2:]))[0], end="")
"""


def test_an_account_may_do_what_it_may_without_a_sandbox() -> None:
    """A file goes to a group of the account and to no other; another's file stays; the executor is not dumpable."""
    with group("g") as shared, group("h") as other, account("a", groups=[shared]) as who:
        who.run("mkdir", "work")
        who.run("sh", "-c", "cd work; mkdir d e; touch f foreign; chmod 644 f")
        os.chown(who.home / "work/foreign", 0, who.gid)
        os.chown(who.home / "work/e", -1, grp.getgrnam(other).gr_gid)
        cases = {
            "chmod 600 f": "ok",
            f"chgrp {shared} f d": "ok",
            f"chgrp {other} f": "no",
            "chown 0 f": "no",
            f"chown {who.name}:{who.gid} f": "ok",
            "chmod g+s d": "ok",
            "chmod g+s e": "ok",
            "chmod u+s f": "no",
            "chmod 666 foreign": "no",
            "chmod 700 ..": "no",
            "exec 5<f; chmod 640 /proc/self/fd/5": "ok",
        }
        done = who.run(installed().python, "-c", IN_AN_ACCOUNT, str(who.home / "work"), *cases, cwd=who.home / "work")
        modes = [stat.S_IMODE((who.home / "work" / name).stat().st_mode) for name in ("f", "d", "e", "foreign")]

    assert done.returncode == 0, done.stderr
    assert dict(zip(cases, done.stdout.split(), strict=True)) == cases
    assert modes[0] == 0o640
    assert modes[1] & stat.S_ISGID
    assert not modes[2] & stat.S_ISGID, "the kernel drops the bit for a group that is not the account's"


# ---------------------------------------------------------------- errors, as the kernel gives them

ODD = [
    "call('fchmodat', CWD, b'missing', 0o600)",
    "call('fchmodat', CWD, b'', 0o600)",
    "call('fchmodat', CWD, b'f/', 0o600)",
    "call('fchmodat', CWD, b'f/x', 0o600)",
    "call('fchmodat', CWD, b'd/', 0o711)",
    "call('fchmodat', CWD, b'loop', 0o600)",
    "call('fchmodat', CWD, b'n' * 256, 0o600)",
    "call('fchmodat', CWD, b'./' * 2046 + b'f', 0o601)",
    "call('fchmodat', CWD, b'./' * 2047 + b'f', 0o602)",
    "call('fchmodat', CWD, b'./' * 2048 + b'f', 0o603)",
    "call('fchmodat', CWD, b'./' * 9999 + b'f', 0o604)",
    "call('fchmodat', CWD, 0, 0o600)",
    "call('fchmodat', CWD, 1, 0o600)",
    "call('fchmodat', CWD, -1, 0o600)",
    "call('fchmodat', CWD, -2**63, 0o600)",
    "call('fchmodat', CWD, at_end(b'f'), 0o605)",
    "call('fchmodat', CWD, at_end(b'f\\\\0'), 0o606)",
    "call('fchmodat', CWD, across(b'./' * 1000 + b'f\\\\0'), 0o607)",
    "call('fchmodat', 99, b'f', 0o600)",
    "call('fchmodat', 99, os.fsencode(os.path.abspath('f')), 0o610)",
    "call('fchmodat', -1, b'f', 0o600)",
    "call('fchmodat', f, b'f', 0o600)",
    "call('fchmodat', f, b'', 0o600)",
    "call('fchmodat', CWD + 2**32, b'f', 0o611)",
    "call('fchmodat', CWD, b'f', 0o612 | 0o200000)",
    "call('fchmodat2', CWD, b'f', 0o600, 0x8000)",
    "call('fchmodat2', CWD, b'missing', 0o600, 0x1)",
    "call('fchmodat2', CWD, b'link', 0o600, NOFOLLOW)",
    "call('fchmodat2', CWD, b'', 0o700, EMPTY)",
    "call('fchmodat2', CWD, b'f', 0o613, EMPTY)",
    "call('fchmodat2', 99, b'', 0o600, EMPTY)",
    "call('fchmod', 99, 0o600)",
    "call('fchmod', -1, 0o600)",
    "call('fchmod', CWD, 0o600)",
    "call('fchmod', only_named, 0o600)",
    "call('fchmod', f + 2**32, 0o614)",
    "call('fchown', only_named, SAME, SAME)",
    "call('fchownat', CWD, b'f', SAME, SAME, 0x8000)",
    "call('fchownat', CWD, b'dangling', SAME, SAME, 0)",
    "call('fchownat', CWD, b'dangling', SAME, SAME, NOFOLLOW)",
    "call('fchownat', only_named, b'', SAME, SAME, EMPTY)",
    "call('fchownat', CWD, b'f', -1, -1, 0)",
    "call('truncate', b'd', 0)",
    "call('truncate', b'f', -1)",
    "call('truncate', b'f', 12345)",
    "call('truncate', b'missing', 0)",
    "call('truncate', b'fifo', 0)",
    "call('fchmodat', CWD, b'\\\\xff\\\\n\\\\x80 odd', 0o615)",
    "call('fchmodat', CWD, b'closed/f', 0o600)",
    "call('fchmodat', CWD, b'link/x', 0o600)",
    "call('fchmodat', CWD, b'dir_link/g', 0o616)",
    "call('fchmodat', CWD, b'//' + os.fsencode(os.path.abspath('f')), 0o617)",
    "call('fchmodat2', CWD, b'dir_link', 0o700, NOFOLLOW)",
    "call('fchmodat2', CWD, b'dir_link/', 0o701, NOFOLLOW)",
]
SET_UP = """
f = os.open('f', os.O_RDONLY)
only_named = os.open('f', os.O_PATH)
os.symlink('loop', 'loop'); os.symlink('f', 'link'); os.symlink('d', 'dir_link'); os.symlink('none', 'dangling')
os.mkfifo('fifo')
os.close(os.open(b'\\xff\\n\\x80 odd', os.O_CREAT))
os.mkdir('closed'); os.close(os.open('closed/f', os.O_CREAT)); call('fchmodat', CWD, b'closed', 0)

pages = mmap.mmap(-1, 3 * 4096)
first = ctypes.addressof(ctypes.c_char.from_buffer(pages))
libc.mprotect(ctypes.c_void_p(first + 2 * 4096), 4096, 0)
libc.munmap(ctypes.c_void_p(first + 2 * 4096), 4096)

def at_end(text):
    ctypes.memmove(first + 2 * 4096 - len(text), text, len(text))
    return first + 2 * 4096 - len(text)

def across(text):
    ctypes.memmove(first + 4096 - len(text) // 2, text, len(text))
    return first + 4096 - len(text) // 2
"""


def outcome(folder: Path) -> dict[str, tuple[int, ...]]:
    return {path.removeprefix(str(folder)): what[:4] for path, what in snapshot(folder).items()}


def test_outcomes_are_those_of_the_kernel(tree: Tree, confined_agent: Supervised) -> None:
    """Odd paths, descriptors, addresses, flags and numbers have the same outcome as without a filter."""
    shutil.copytree(tree.work, tree.beside.with_name("copy"))
    with unsupervised(tree.beside.with_name("copy")) as plain:
        plain(SET_UP)
        by_kernel = [plain(one.encode().decode("unicode_escape")) for one in ODD]
    confined_agent(SET_UP)
    by_supervisor = [confined_agent(one.encode().decode("unicode_escape")) for one in ODD]

    different = {one: both for one, *both in zip(ODD, by_kernel, by_supervisor, strict=True) if both[0] != both[1]}
    assert different == {}
    assert set(by_kernel) >= {"ok", "ENOENT", "ENOTDIR", "ELOOP", "ENAMETOOLONG", "EFAULT", "EBADF", "EINVAL"}
    assert outcome(tree.work) == outcome(tree.beside.with_name("copy"))


def test_random_calls_have_the_kernels_outcomes(tree: Tree, confined_agent: Supervised) -> None:
    """A seeded walk of calls on a tree with links leaves the same tree and the same errors as without a filter."""
    seed = random.randrange(2**32)
    dice = random.Random(seed)
    shutil.copytree(tree.work, tree.beside.with_name("copy"))
    setup = "os.symlink('d', 's'); os.symlink('../f', 'd/t'); os.symlink('x', 'd/n'); d = os.open('d', os.O_RDONLY)"
    got = []
    with unsupervised(tree.beside.with_name("copy")) as plain:
        plain(setup)
        confined_agent(setup)
        for _ in range(400):
            path = "/".join(dice.choices([".", "..", "d", "s", "f", "g", "t", "n", ""], k=dice.randint(1, 4)))
            path = path if dice.random() < 0.9 else "/" + path
            start, flags = dice.choice(["CWD", "d"]), dice.choice([0, 0x100, 0x1000])
            at = repr(path.encode())
            bits = dice.choice([0o777, 0o711, 0o755, 0o700, 0o1755])
            text = dice.choice(
                [
                    f"call('fchmodat2', {start}, {at}, {bits}, {flags})",
                    f"call('fchownat', {start}, {at}, {OWN}, {flags})",
                    f"call('truncate', {at}, {dice.randrange(100)})",
                ]
            )
            top = os.path.realpath(tree.work / ("d" if "d, b" in text else "") / path)
            if Path(top).is_relative_to(tree.work):  # elsewhere the outcomes differ on purpose
                got.append((text, plain(text), confined_agent(text)))

    assert [one for one in got if one[1] != one[2]] == [], f"seed {seed}"
    assert {"ok", "ENOENT", "ENOTDIR"} <= {one[2] for one in got}
    assert outcome(tree.work) == outcome(tree.beside.with_name("copy")), f"seed {seed}"


def test_a_deep_folder_is_changed_while_its_name_fits(tree: Tree, confined_agent: Supervised) -> None:
    """Where the whole name is longer than the kernel can tell, the call is refused."""
    confined_agent("""
def deepen(steps):
    for _ in range(steps):
        os.mkdir('n' * 250); os.chdir('n' * 250)
    os.close(os.open('f', os.O_CREAT))
""")
    confined_agent("deepen(12)")
    fits = confined_agent("call('fchmodat', CWD, b'f', 0o640)"), confined_agent("os.stat('f').st_mode & 0o777")
    confined_agent("deepen(12)")

    assert fits == ("ok", 0o640)
    assert confined_agent("call('fchmodat', CWD, b'f', 0o640)") == "EPERM"


def test_another_root_or_user_namespace_gets_no_change_of_owner(tree: Tree, confined_agent: Supervised) -> None:
    """There, paths and numbers mean other things: a path under another root, and an owner by number, are refused."""
    confined_agent("""
def in_namespace(*steps):
    r, w = os.pipe()
    if os.fork() == 0:
        try:
            if libc.unshare(0x10000000) != 0:  # CLONE_NEWUSER
                os.write(w, b'["closed"]'); os._exit(0)
            libc.prctl(4, 1, 0, 0, 0)  # dumpable, as after an exec
            os.write(w, json.dumps([eval(step) for step in steps]).encode())
        finally:
            os._exit(0)
    os.close(w); os.wait()
    return json.loads(os.read(r, 4096))
""")
    got = confined_agent(f"""in_namespace(
        "call('fchmodat', CWD, b'f', 0o640)", "call('fchownat', CWD, b'f', {OWN}, 0)",
        "call('fchownat', CWD, b'f', SAME, SAME, 0)", "libc.chroot(b'.')", "call('fchmodat', CWD, b'd', 0o755)")""")
    if got == ["closed"]:
        pytest.skip("kernel: no user namespaces")

    assert got == ["ok", "EPERM", "ok", 0, "EPERM"]


def test_a_mount_of_the_agents_own_does_not_lend_a_file_its_name(tree: Tree, confined_agent: Supervised) -> None:
    """In a detached copy of a mount the kernel names a file from the copy's top, as if it were in a place."""
    twin = tree.beside / str(tree.work).lstrip("/") / "f"
    twin.parent.mkdir(parents=True)
    twin.touch(0o600)
    got = confined_agent(f"""
def attack():
    r, w = os.pipe()
    if os.fork() == 0:
        said = 'closed'
        if libc.unshare(0x10020000) == 0:  # CLONE_NEWUSER | CLONE_NEWNS
            libc.prctl(4, 1, 0, 0, 0)
            top = libc.syscall(428, CWD, b'{tree.beside}', 1 | 0o2000000)  # open_tree, OPEN_TREE_CLONE
            fd = os.open('{str(tree.work)[1:]}/f', os.O_RDONLY, dir_fd=top)
            said = os.readlink('/proc/self/fd/%d' % fd) + ' ' + call('fchmod', fd, 0o666)
        os.write(w, said.encode()); os._exit(0)
    os.close(w); os.wait()
    return os.read(r, 4096).decode()
""")
    got = confined_agent("attack()")
    if got == "closed":
        pytest.skip("kernel: no user namespaces")

    assert got == f"{tree.work}/f EPERM", "the attack did not name the file as meant"
    assert mode(twin) == 0o600


def test_a_process_that_cannot_be_read_is_refused(tree: Tree, confined_agent: Supervised) -> None:
    """The supervisor performs only what it can read itself."""
    confined_agent("libc.prctl(4, 0, 0, 0, 0)")  # not dumpable

    got = confined_agent("call('fchmodat', CWD, b'f', 0o640)")

    assert got == "EPERM"


# ---------------------------------------------------------------- at once, and ends


def test_races_change_nothing_elsewhere(tree: Tree, confined_agent: Supervised) -> None:
    """A path, a folder or a descriptor that changes while it is judged never leads a change out of the place."""
    before = snapshot(tree.beside)
    rounds = 500
    done = confined_agent(f"""
os.mkdir('a'); os.close(os.open('a/f', os.O_CREAT)); os.symlink('../beside', 'out'); os.symlink('../beside/f', 'l')
os.close(os.open('p', os.O_CREAT))
stop, made = [], []
text = mmap.mmap(-1, 4096)
at = ctypes.addressof(ctypes.c_char.from_buffer(text))
inside, outside = os.open('f', os.O_RDONLY), os.open('../beside/f', os.O_RDONLY)

def swap(pairs):
    while not stop:
        for first, second in pairs:
            libc.renameat2(CWD, first, CWD, second, 2)  # exchanged in one step

def rewrite():
    while not stop:
        text[:32] = b'../beside/f'.ljust(32, b'\\0')
        text[:32] = b'a/f'.ljust(32, b'\\0')

def replace():
    while not stop:
        os.dup2(inside, 99); os.dup2(outside, 99)

workers = [threading.Thread(target=swap, args=([(b'a', b'out'), (b'p', b'l')],)), threading.Thread(target=rewrite),
           threading.Thread(target=replace)]
for one in workers: one.start()
try:
    for _ in range({rounds}):
        made += [call('fchmodat', CWD, b'a/f', 0o777), call('fchmodat', CWD, b'p', 0o777),
                 call('fchmodat', CWD, at, 0o777), call('fchmod', 99, 0o777), call('truncate', b'p', 0),
                 call('fchownat', CWD, b'a/f', SAME, SAME, 0)]
finally:
    stop.append(1)
    for one in workers: one.join()
""")
    counts = confined_agent("{one: made.count(one) for one in set(made)}")

    print(f"racing calls: {counts}")
    assert done == "ok"
    assert snapshot(tree.beside) == before
    assert counts["ok"] > 0
    assert counts["EPERM"] > 0
    assert set(counts) <= {"ok", "EPERM", "ENOENT", "EBADF"}


def test_threads_are_answered_each(tree: Tree, confined_agent: Supervised) -> None:
    """Many processes and threads may wait at once; each gets the outcome of its own call."""
    confined_agent("""
def work(number):
    name = b't%d' % number
    os.close(os.open(name, os.O_CREAT, 0o600))
    for turn in range(100):
        wanted = 0o600 + (number * 7 + turn) % 64
        ok = call('fchmodat', CWD, name, wanted) == 'ok' and os.stat(name).st_mode & 0o777 == wanted
        missing = call('fchmodat', CWD, b'missing', 0o600) == 'ENOENT'
        results.append(ok and missing)
results = []
threads = [threading.Thread(target=work, args=(one,)) for one in range(16)]
for one in threads: one.start()
for one in threads: one.join()
""")

    assert confined_agent("[len(results), all(results)]") == [1600, True]


def test_a_caller_that_is_killed_holds_up_nobody(tree: Tree, confined_agent: Supervised) -> None:
    """Processes die while they wait for an answer; those that live are answered, and nothing stays open."""
    before = descriptors()
    confined_agent("""
import random, signal, time
def killed():
    children = []
    for _ in range(20):
        child = os.fork()
        if child == 0:
            while True: call('fchmodat', CWD, b'f', 0o600)
        children.append(child)
    for child in children:
        call('fchmodat', CWD, b'd', 0o755)
        os.kill(child, signal.SIGKILL); os.waitpid(child, 0)
""")
    for _ in range(10):
        assert confined_agent("killed()") is None

    assert confined_agent("call('fchmodat', CWD, b'f', 0o640)") == "ok"
    assert mode(tree.work / "f") == 0o640
    assert descriptors() == before


def test_a_caller_that_gets_a_signal_is_answered(tree: Tree, confined_agent: Supervised) -> None:
    """A signal whose handler lets calls restart (SA_RESTART) does not change the outcome."""
    confined_agent("""
import signal
signal.signal(signal.SIGALRM, lambda *_: None)
signal.siginterrupt(signal.SIGALRM, False)
signal.setitimer(signal.ITIMER_REAL, 0.0003, 0.0003)
got = [call('fchmodat', CWD, b'f', 0o600 + turn % 8) for turn in range(3000)]
signal.setitimer(signal.ITIMER_REAL, 0)
""")

    assert confined_agent("sorted(set(got))") == ["ok"]


def test_it_ends_with_the_last_process(tree: Tree) -> None:
    """The thread ends by itself when no process is left under the filter, and then nothing is open."""
    before, threads = descriptors(), threading.active_count()
    with agent(tree.work) as some:
        some("os.chmod('f', 0o640)")
        assert repr(some.supervisor).endswith("running>")
        assert some.process.stdin is not None
        some.process.stdin.close()
        some.process.wait()
        some.supervisor._thread.join(DEADLINE)
        said = repr(some.supervisor)
        some.supervisor.close()

    assert said.endswith("closed>")
    assert threading.active_count() == threads
    assert descriptors() == before


def test_calls_after_the_close_fail(tree: Tree) -> None:
    """The kernel answers ENOSYS: a closed supervisor allows nothing. Closing again does nothing."""
    with agent(tree.work) as some:
        first = some("call('fchmodat', CWD, b'f', 0o640)")
        some.supervisor.close()
        some.supervisor.close()
        later = [some(CALLS["fchmodat"].format(path="b'f'")), some(CALLS["truncate"].format(path="b'f'"))]

    assert (first, later) == ("ok", ["ENOSYS", "ENOSYS"])
    assert (tree.work / "f").stat().st_size == len(b"content")


def test_calls_that_wait_at_the_close_are_answered(tree: Tree) -> None:
    """Each call has succeeded or fails; no process waits for ever."""
    with agent(tree.work) as some:
        assert some.process.stdin is not None
        some("got = []")
        some.process.stdin.write(
            "\"while not got or got[-1] == 'ok': got.append(call('fchmodat', CWD, b'f', 0o600))\"\n"
        )
        some.process.stdin.flush()
        while mode(tree.work / "f") != 0o600:
            time.sleep(0)
        some.supervisor.close()
        assert some._line() == '"ok"\n'

        assert some("sorted(set(got))") in (["ENOSYS", "ok"], ["ENOSYS"])


def test_a_call_that_it_does_not_know_is_refused_and_logged_once(tree: Tree, caplog: pytest.LogCaptureFixture) -> None:
    """An error of the supervisor refuses one call and ends nothing."""
    with caplog.at_level(logging.ERROR), agent(tree.work, watched=(*WATCHED, "setxattr")) as some:
        got = [some("os.setxattr('f', 'user.x', b'1')") for _ in range(3)]
        after = some("call('fchmodat', CWD, b'f', 0o640)")

    assert got == ["EPERM"] * 3
    assert after == "ok"
    assert [record.message for record in caplog.records] == ["a call of an agent was refused"]


def test_a_listener_is_closed_if_there_can_be_no_supervisor(tree: Tree) -> None:
    """Where a place cannot be opened, the error is the caller's, and the filter's calls fail."""
    before = descriptors()
    with confined(["sleep", "60"]) as (_, listener), pytest.raises(OSError, match="too long"):
        CallSupervisor(listener, [str(tree.work), str(tree.work / ("n" * 300))])

    assert descriptors() == before


# ---------------------------------------------------------------- programs


def run(tree: Tree, *argv: str | Path) -> str:
    """Run a program under the filter in the writable place; return its output. It must succeed."""
    with confined(argv, cwd=tree.work, stderr=subprocess.STDOUT, env=ENVIRONMENT | {"TMPDIR": str(tree.work)}) as (
        process,
        listener,
    ):
        supervisor = CallSupervisor(listener, [str(tree.work)])
        try:
            said, _ = process.communicate(timeout=DEADLINE)
        finally:
            supervisor.close()
    assert process.returncode == 0, said
    return said


ENVIRONMENT = {"PATH": os.environ["PATH"], "LC_ALL": "C", "HOME": "/nonexistent", "GIT_CONFIG_GLOBAL": "/dev/null"}

WHEEL = {
    "hello/__init__.py": b"",
    "hello-1.data/scripts/hello": b"#!python\nprint('hello')\n",
    "hello-1.dist-info/METADATA": b"Metadata-Version: 2.1\nName: hello\nVersion: 1\n",
    "hello-1.dist-info/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    "hello-1.dist-info/RECORD": b"",
}


def test_tar_restores_modes(tree: Tree) -> None:
    """Files, folders and links."""
    source = tree.beside / "source"
    (source / "closed").mkdir(parents=True)
    (source / "closed" / "run").touch(0o751)
    (source / "closed" / "run").chmod(0o751)
    (source / "link").symlink_to("closed/run")
    (source / "closed").chmod(0o750)
    with tarfile.open(tree.beside / "a.tar", "w") as archive:
        archive.add(source, "x")

    run(tree, "tar", "xpf", tree.beside / "a.tar")
    assert (mode(tree.work / "x/closed"), mode(tree.work / "x/closed/run")) == (0o750, 0o751)


def test_cp_install_and_make_work(tree: Tree) -> None:
    """Modes are kept or set; what make installs elsewhere is refused."""
    (tree.beside / "f").chmod(0o754)
    (tree.work / "Makefile").write_text(
        "install:\n\tinstall -d -m 750 $(DESTDIR)/bin\n\tinstall -m 755 f $(DESTDIR)/bin/f\n\tchmod -R u+w $(DESTDIR)\n"
    )
    run(tree, "cp", "-p", "../beside/f", "copied")
    run(tree, "cp", "-a", "../beside", "all")
    run(tree, "install", "-m", "755", "f", "installed")
    run(tree, "make", "install", "DESTDIR=root")

    assert mode(tree.work / "copied") == mode(tree.work / "all/f") == 0o754
    assert mode(tree.work / "installed") == mode(tree.work / "root/bin/f") == 0o755
    assert mode(tree.work / "root/bin") == 0o750
    with pytest.raises(AssertionError, match="Operation not permitted"):
        run(tree, "chmod", "-R", "g+w", "../beside")


def test_git_clones(tree: Tree) -> None:
    """A local repository is cloned, and a commit made in the clone."""
    source = tree.beside / "repository"
    git = ["git", "-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "safe.directory=*"]
    subprocess.run([*git, "init", "-q", source], check=True, env=ENVIRONMENT)
    (source / "run").touch(0o755)
    subprocess.run([*git, "-C", source, "add", "run"], check=True, env=ENVIRONMENT)
    subprocess.run([*git, "-C", source, "commit", "-qm", "first"], check=True, env=ENVIRONMENT)

    run(tree, *git, "clone", "-q", "--no-hardlinks", "../beside/repository", "clone")
    run(tree, *git, "-C", "clone", "config", "core.sharedRepository", "group")
    run(tree, *git, "-C", "clone", "commit", "-q", "--allow-empty", "-m", "second")
    said = run(tree, *git, "-C", "clone", "log", "--oneline")

    assert len(said.splitlines()) == 2
    assert os.access(tree.work / "clone" / "run", os.X_OK)


def test_pip_installs_a_wheel(tree: Tree) -> None:
    """Its scripts can be executed."""
    wheel = tree.beside / "hello-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, content in WHEEL.items():
            entry = zipfile.ZipInfo(name)
            entry.external_attr = (0o100755 if "scripts" in name else 0o100644) << 16
            archive.writestr(entry, content)

    pip = [sys.executable, "-m", "pip", "--isolated", "--no-cache-dir", "--disable-pip-version-check"]
    run(tree, *pip, "install", "-q", "--no-index", "--no-deps", "--target", "packages", wheel)

    assert os.access(tree.work / "packages" / "bin" / "hello", os.X_OK)


def test_ten_thousand_changes_are_not_slow(tree: Tree, confined_agent: Supervised) -> None:
    """A call costs a few hundred microseconds at most; the measured cost is printed."""
    confined_agent("import time; began = time.perf_counter()")
    confined_agent("got = {call('fchmodat', CWD, b'd/g', 0o600 + turn % 8) for turn in range(10000)}")
    each = confined_agent("(time.perf_counter() - began) / 10000")

    print(f"a change of mode under supervision: {each * 1e6:.0f} us")
    assert confined_agent("sorted(got)") == ["ok"]
