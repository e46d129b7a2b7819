"""What an agent under Landlock can change of a file that is only shown: nothing, by Landlock, filter and supervisor."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import pytest

from hutch_executor.sandbox.enforcement import abi_of, enforce
from hutch_executor.sandbox.plan import plan_sandbox
from hutch_executor.sandbox.programs import PROGRAMS
from hutch_shared import messages as m

pytestmark = pytest.mark.system

ATTEMPT = """
import array, ctypes, errno, fcntl, json, os, stat, sys, threading
shown, second = sys.argv[1:]
found = {}

def attempt(name, function, *arguments):
    try:
        function(*arguments)
        found[name] = "ok"
    except OSError as error:
        found[name] = errno.errorcode[error.errno]

def by_descriptor(function, *arguments):
    with open(f"{shown}/f") as file:
        function(file.fileno(), *arguments)
"""
TRIES = """
shown_file = f"{shown}/f"
libc = ctypes.CDLL(None, use_errno=True)

def openat2(path, flags, mode):
    how = (ctypes.c_uint64 * 3)(flags, mode, 0)
    if libc.syscall(437, -100, os.fsencode(path), how, 24) < 0:
        raise OSError(ctypes.get_errno(), "")

attempt("chmod", os.chmod, shown_file, 0o666)
attempt("chmod folder", os.chmod, shown, 0o777)
attempt("fchmod", by_descriptor, os.fchmod, 0o666)
attempt("chown", os.chown, shown_file, -1, -1)
attempt("truncate", os.truncate, shown_file, 0)
attempt("open, truncating", os.open, shown_file, os.O_RDONLY | os.O_TRUNC)
attempt("open, truncating, without access", os.open, shown_file, os.O_ACCMODE | os.O_TRUNC)
attempt("open to write", os.open, shown_file, os.O_WRONLY | os.O_TRUNC)
attempt("openat2, truncating", openat2, shown_file, os.O_RDONLY | os.O_TRUNC, 0)
attempt("link", os.link, shown_file, "linked")
attempt("move out", os.rename, shown_file, "moved")
attempt("move in", os.rename, "f", f"{shown}/moved")
found["exchange"] = "refused" if libc.renameat2(-100, b"f", -100, os.fsencode(shown_file), 2) else "ok"
for name, request in (("flags", 0x40086602), ("version", 0x40087602), ("attributes", 0x401C5820)):
    attempt(name, by_descriptor, fcntl.ioctl, request, bytearray(32))
attempt("set-uid by open", os.open, "u1", os.O_CREAT | os.O_WRONLY, 0o4755)
attempt("set-gid by open", os.open, "u2", os.O_CREAT | os.O_WRONLY, 0o2755)
attempt("set-uid by mknod", os.mknod, "u3", 0o4755 | stat.S_IFREG)
attempt("set-uid by openat2", openat2, "u4", os.O_CREAT | os.O_WRONLY, 0o4755)
attempt("set-uid, unnamed", os.open, ".", os.O_TMPFILE | os.O_WRONLY, 0o4755)
attempt("set-uid by chmod", os.chmod, "f", 0o4755)
print(json.dumps(found))
"""
WORK = """
os.mkdir("d", 0o700)
attempt("create", os.open, "d/f", os.O_CREAT | os.O_RDWR | os.O_TRUNC, 0o600)
attempt("open without a mode", os.open, "d/f", os.O_RDONLY)
attempt("open to write", os.open, "d/f", os.O_WRONLY | os.O_TRUNC)
attempt("unnamed", os.open, ".", os.O_TMPFILE | os.O_RDWR, 0o600)
attempt("chmod", os.chmod, "d/f", 0o755)
attempt("chmod folder", os.chmod, "d", 0o2775)
attempt("chown", os.chown, "d/f", os.getuid(), os.getgid())
attempt("truncate", os.truncate, "d/f", 5)
attempt("second place", os.chmod, f"{second}/f", 0o640)
if %d >= 2:
    attempt("move between places", os.rename, "d/f", f"{second}/g")
    attempt("chmod there", os.chmod, f"{second}/g", 0o600)
thread = threading.Thread(target=attempt, args=("thread", os.chmod, "f", 0o600)); thread.start(); thread.join()
if os.fork() == 0:
    attempt("child", os.chmod, "f", 0o611)
    os._exit(found["child"] != "ok")
found["child"] = "ok" if os.wait()[1] == 0 else "refused"
print(json.dumps(found))
"""


class Places(NamedTuple):
    """Folders with a file each: two writable ones and a shown one."""

    work: Path
    second: Path
    shown: Path


@pytest.fixture
def places(tmp_path: Path) -> Places:
    for name in Places._fields:
        (tmp_path / name).mkdir()
        (tmp_path / name / "f").write_bytes(b"content")
        (tmp_path / name / "f").chmod(0o600)
    return Places(*(tmp_path / name for name in Places._fields))


def inside(places: Places, code: str, abi: int) -> dict[str, str]:
    """Run code in a session's sandbox with this ABI of Landlock; return what its attempts found."""
    home = places.work.parent / "home"
    spec = m.SandboxSpec("", kind="landlock", show=(str(places.shown), *PROGRAMS), write=(str(places.second),))
    plan = plan_sandbox(spec, str(places.work), str(home))
    with closing(enforce(plan, sockets=False, abi=abi)) as made:
        made.ready()
        argv = [*made.argv, sys.executable, "-I", "-c", ATTEMPT + code, str(places.shown), str(places.second)]
        done = subprocess.run(
            argv, pass_fds=made.descriptors, cwd=made.cwd, capture_output=True, text=True, check=False, timeout=60
        )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def abis() -> list[int]:
    """Return the ABIs to test: those that lack something of files, and the kernel's."""
    return sorted({abi for abi in (1, 2, 3, abi_of()) if abi <= abi_of()}) or [0]


@pytest.mark.parametrize("abi", abis())
def test_a_shown_file_cannot_be_changed(places: Places, abi: int) -> None:
    """By any ABI: its mode, owner, length, attributes and content stay, and so do its folder's; nothing is set-uid."""
    if not abi:
        pytest.skip("kernel: no Landlock")
    before = [(path.stat().st_mode, path.stat().st_ctime_ns) for path in (places.shown, places.shown / "f")]

    found = inside(places, TRIES, abi)

    assert [name for name, outcome in found.items() if outcome == "ok"] == []
    assert [(path.stat().st_mode, path.stat().st_ctime_ns) for path in (places.shown, places.shown / "f")] == before
    assert (places.shown / "f").read_bytes() == b"content"
    assert [path.name for path in places.work.iterdir()] == ["f"]


@pytest.mark.parametrize("abi", abis())
def test_writable_places_are_changed_as_ever(places: Places, abi: int) -> None:
    """By any ABI, by each process and thread of the agent; files move between places from ABI 2 on."""
    if not abi:
        pytest.skip("kernel: no Landlock")
    found = inside(places, WORK % abi, abi)

    assert [name for name, outcome in found.items() if outcome != "ok"] == []
