"""Accounts for tests, and an installed copy of Hutch that every account can read and execute.

Both need root; without it the test is skipped. Nothing here changes an account that it did not make.
"""

from __future__ import annotations

import atexit
import compileall
import contextlib
import fcntl
import os
import pwd
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

import pytest

__all__ = [
    "Account",
    "Installed",
    "account",
    "group",
    "installed",
    "join",
    "kill_all",
    "locked",
    "need_root",
    "processes_of",
    "renamed",
]

_TOP: Final = Path(__file__).parents[1]
_PLACE: Final = Path("/opt")
_made: Final = Counter[str]()
_VERSION: Final = f"python{sys.version_info.major}.{sys.version_info.minor}"


def need_root() -> None:
    """Skip the test unless root runs it."""
    if sys.platform != "linux" or os.geteuid() != 0 or shutil.which("useradd") is None:
        pytest.skip("only root can make an account")


# ---------------------------------------------------------------- accounts


@dataclass(frozen=True, slots=True)
class Account:
    """A new account with a home of its own (0700)."""

    name: str
    uid: int
    gid: int
    home: Path

    def run(
        self,
        *command: str | Path,
        input: str | None = None,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        timeout: float = 60.0,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command as this account, in its home, with its current groups; return the finished process."""
        return subprocess.run(
            [str(word) for word in command],
            input=input,
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout,
            cwd=cwd or self.home,
            env=self.env if env is None else dict(env),
            user=self.uid,
            group=self.gid,
            extra_groups=os.getgrouplist(self.name, self.gid),
            umask=0o077,
        )

    @property
    def env(self) -> dict[str, str]:
        """The whole environment of its commands."""
        return {
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "HOME": str(self.home),
            "USER": self.name,
            "LOGNAME": self.name,
            "LANG": "C.UTF-8",
        }


@contextmanager
def account(tag: str, *, groups: Sequence[str] = (), shell: str = "/bin/sh") -> Iterator[Account]:
    """Create an account named for this process and `tag`; at the end remove it with its processes and files."""
    need_root()
    name = _name(tag)
    words = ["--create-home", "--shell", shell, *(["--groups", ",".join(groups)] if groups else [])]
    _change("useradd", *words, name)
    found = pwd.getpwnam(name)
    made = Account(name, found.pw_uid, found.pw_gid, Path(found.pw_dir))
    try:
        made.home.chmod(0o700)
        yield made
    finally:
        try:
            kill_all(made.uid)
        finally:
            _remove_files(made.uid)
            _change("userdel", "--force", "--remove", name)


@contextmanager
def group(tag: str) -> Iterator[str]:
    """Create a group named for this process and `tag`; yield its name."""
    need_root()
    name = _name(tag)
    _change("groupadd", name)
    try:
        yield name
    finally:
        _change("groupdel", name)


def join(who: Account, name: str) -> None:
    """Add an account to a group; its running processes do not change."""
    _change("usermod", "--append", "--groups", name, who.name)


@contextmanager
def renamed(who: Account, name: str) -> Iterator[None]:
    """Give an account another name while the body runs."""
    _change("usermod", "--login", name, who.name)
    try:
        yield
    finally:
        _change("usermod", "--login", who.name, name)


def processes_of(uid: int) -> list[int]:
    """Return the living processes of `uid` (real, effective or saved); zombies do not count."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                fields = dict(line.split(":", 1) for line in (entry / "status").read_text().splitlines() if ":" in line)
                if str(uid) in fields["Uid"].split() and fields["State"].split()[0] not in "ZX":
                    found.append(int(entry.name))
    return found


def kill_all(uid: int) -> None:
    """Kill all processes of a test's account. AssertionError if some still live after 20 s."""
    assert uid >= 100, "no account of a test"
    deadline = time.monotonic() + 20
    while pids := processes_of(uid):
        assert time.monotonic() < deadline, f"uid {uid} still has {pids}"
        for number in (signal.SIGSTOP, signal.SIGKILL):  # a stopped process cannot fork
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)


def _name(tag: str) -> str:
    _made[tag] += 1
    name = f"hutch-t{os.getpid() % 100_000}-{tag}{_made[tag] if _made[tag] > 1 else ''}"
    assert len(name) <= 32, f"{name} is too long"
    return name


def _change(program: str, *words: str) -> None:
    """Run a program that changes this machine's accounts, one process of all runs at a time."""
    with locked():
        done = subprocess.run([program, *words], capture_output=True, text=True, check=False)
    # 12: userdel did not find the mail spool, or could not remove the home; 6: groupdel of a missing group
    assert done.returncode == 0 or (program == "userdel" and done.returncode == 12), f"{program}: {done.stderr}"


def _remove_files(uid: int) -> None:
    subprocess.run(["ipcrm", "--all"], capture_output=True, check=False, user=uid, group=65534, extra_groups=[])
    for place in ("/tmp", "/var/tmp", "/dev/shm"):
        for path in Path(place).iterdir():
            with contextlib.suppress(OSError):
                if path.lstat().st_uid == uid:
                    if path.is_dir() and not path.is_symlink():
                        shutil.rmtree(path, ignore_errors=True)
                    else:
                        path.unlink()


# ---------------------------------------------------------------- an installed copy


@dataclass(frozen=True, slots=True)
class Installed:
    """Hutch as installed on a host: it belongs to root, and every account can read and execute it.

    `python` is its interpreter, with all of Hutch and what it needs in `packages`; `root / "bin"` also holds the
    commands (`hutch`, `hutchd`, …). A test changes nothing in it: other tests use it at the same time.
    """

    python: Path
    root: Path
    packages: Path

    def command(self, name: str) -> Path:
        """Return the path of a command: `hutch`, `hutchd`, `hutch-broker` or `hutch-launcher`."""
        return self.root / "bin" / name


_held: list[tuple[Path, int]] = []
"""This process's copy, and the descriptor that holds it."""


@cache
def installed() -> Installed:
    """Return this run's copy. The first call creates it; it is removed when the last worker has ended."""
    need_root()
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", f"p{os.getpid()}")
    root = _PLACE / f"hutch-test-{run[:16]}"
    made = Installed(root / "bin" / "python", root, root / "lib" / _VERSION / "site-packages")
    with locked():
        for other in _PLACE.glob("hutch-test-*"):
            if other != root:
                _remove_unless_held(other)  # left by a run that was killed
        root.mkdir(mode=0o755, parents=True, exist_ok=True)
        root.chmod(0o755)
        held = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(held, fcntl.LOCK_SH)
        if not (root / "complete").exists():
            _build(made)
            (root / "complete").touch()
    _held.append((root, held))
    atexit.register(let_go)
    return made


@contextmanager
def locked() -> Iterator[None]:
    """Let one process of all test runs enter the block at a time."""
    lock = os.open(_PLACE, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def let_go() -> None:
    """Remove this run's copy, unless another worker uses it. Nothing may use it here afterwards."""
    while _held:
        root, held = _held.pop()
        with locked():
            os.close(held)
            _remove_unless_held(root)


def _remove_unless_held(root: Path) -> None:
    """Remove `root`, unless a worker uses it."""
    with contextlib.suppress(OSError):
        looked = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(looked, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(root, ignore_errors=True)
        finally:
            os.close(looked)


def _build(to: Installed) -> None:
    """Build a prefix below `root/base` and a virtual environment on top of it, with hard links if possible."""
    base = to.root / "base"
    lib = Path(sys.base_prefix, "lib")
    old = os.umask(0o022)
    try:
        _link(lib / _VERSION, base / "lib" / _VERSION, {"test", "site-packages", "dist-packages", "idlelib", "tkinter"})
        for library in lib.glob("libpython*"):
            _patched(library, base / "lib" / library.name)
        program = base / "bin" / _VERSION
        program.parent.mkdir()
        _patched(Path(sys.base_prefix, "bin", _VERSION), program)
        program.chmod(0o755)
        for packages in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
            _link(Path(packages), to.packages, {"mypy", "mypyc", "pip"})
        for path in to.packages.glob("*.pth"):
            path.unlink()  # an editable install: it would add the checkout to sys.path
        project = tomllib.loads((_TOP / "pyproject.toml").read_text())
        for package in project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]:
            copy = to.packages / Path(package).name
            shutil.copytree(_TOP / package, copy, ignore=shutil.ignore_patterns("__pycache__"))
            subprocess.run(["chmod", "-R", "u=rwX,go=rX", copy], check=True)
            compileall.compile_dir(copy, quiet=2)
        for library in (base / "lib").glob("libpython*"):
            (to.root / "lib" / library.name).symlink_to(library)
        (to.root / "bin").mkdir()
        (to.root / "pyvenv.cfg").write_text(f"home = {program.parent}\ninclude-system-site-packages = false\n")
        for name in ("python", "python3"):
            (to.root / "bin" / name).symlink_to(program)
        shutil.copy(program, to.root / "bin" / "hutch-python")
        (to.root / "bin" / "hutch-python").chmod(0o711)
        for name, entry in project["project"]["scripts"].items():
            module, _, function = entry.partition(":")
            text = f"#!{to.python}\nimport sys\nfrom {module} import {function}\nsys.exit({function}())\n"
            to.command(name).write_text(text)
            to.command(name).chmod(0o755)
    finally:
        os.umask(old)


def _patched(source: Path, to: Path) -> None:
    """Copy a program or library, changed so that it finds its libraries beside itself."""
    if source.is_symlink() and source.resolve().parent == source.parent:
        to.symlink_to(source.readlink().name)
        return
    before, after = os.fsencode(Path(sys.base_prefix, "lib")) + b"\0", b"$ORIGIN/../lib\0"
    content = source.read_bytes()
    if len(before) >= len(after):
        content = content.replace(b"\0" + before, b"\0" + after.ljust(len(before), b"\0"))
    to.write_bytes(content)
    to.chmod(0o755)


def _link(source: Path, to: Path, without: set[str]) -> None:
    """Copy a tree by hard links; copy the data of files on another disk and of files that others may not read."""
    for place, folders, files in os.walk(source):
        target = to / Path(place).relative_to(source)
        target.mkdir(parents=True, exist_ok=True)
        folders[:] = [name for name in folders if name not in without and not name.startswith("config-")]
        for name in [*folders]:
            if os.path.islink(os.path.join(place, name)):
                folders.remove(name)
                files.append(name)
        for name in files:
            one = os.path.join(place, name)
            try:
                found = os.lstat(one)
                if found.st_uid == 0 and (found.st_mode & 0o444) == 0o444 and not found.st_mode & 0o022:
                    os.link(one, target / name, follow_symlinks=False)
                    continue
            except OSError:
                pass
            with contextlib.suppress(FileNotFoundError, FileExistsError):
                shutil.copy2(one, target / name, follow_symlinks=False)
                if not (target / name).is_symlink():
                    mode = (target / name).stat().st_mode
                    (target / name).chmod(0o755 if mode & 0o100 else 0o644)
