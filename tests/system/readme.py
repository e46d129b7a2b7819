"""The README's commands, which tests run word by word, and the world in which they run.

A block that a test runs has `<!-- test: NAME -->` above it. The world is a mount namespace: `/etc` is a copy, `/run`
and `/tmp` are new, `/opt`, `/home`, `/var/lib` and `/usr/local/bin` are overlays. So accounts, settings and programs
that are made in it exist nowhere else. Processes, cgroups and the loopback interface are the machine's.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.accounts import installed, locked, need_root
from tests.system.host import Done

__all__ = ["World", "block", "world"]

_README: Final = Path(__file__).parents[2] / "README.md"
_OVER: Final = ("/opt", "/home", "/var/lib", "/usr/local/bin")
_SET_UP: Final = """
mount --make-rprivate /
mount --bind {top}/etc /etc
for place in {over}; do
  mkdir -p {top}/over$place {top}/work$place
  mount -t overlay -o lowerdir=$place,upperdir={top}/over$place,workdir={top}/work$place overlay $place
done
mount -t tmpfs -o mode=755 tmpfs /run
mkdir -m 755 -p /run/user
mkdir -p /opt/hutch {top}/over-copy {top}/work-copy
mount -t overlay -o lowerdir={copy},upperdir={top}/over-copy,workdir={top}/work-copy overlay /opt/hutch
for script in /opt/hutch/bin/*; do
  [ -L $script ] || sed -i '1s,{copy},/opt/hutch,' $script
done
mount -t tmpfs -o mode=1777 tmpfs /tmp
echo ready
exec sleep infinity
"""


def block(name: str) -> list[str]:
    """Return the commands of a block, without comments."""
    found = re.search(rf"<!-- test: {name} -->\n```sh\n(.*?)```", _README.read_text(), re.DOTALL)
    assert found is not None, f"the README has no block {name!r}"
    return [re.sub(r" +# .*", "", line) for line in found[1].splitlines()]


@dataclass(frozen=True)
class World:
    """A running mount namespace; `top` holds the files that differ from the machine's."""

    pid: int
    top: Path

    def run(self, *lines: str, as_: str = "", input: str = "", code: int | None = 0, timeout: float = 120) -> Done:
        """Run the lines in a shell, as root or an account of this world; `code` is the expected exit code."""
        script = "set -e\n" + "\n".join(lines)
        become = ["setpriv", f"--reuid={as_}", f"--regid={as_}", "--init-groups", "--reset-env", "--"] if as_ else []
        words = ["nsenter", f"--mount=/proc/{self.pid}/ns/mnt", "--wdns=/", "--", *become, "bash", "-c", script]
        env = {
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": "/root",
            "LANG": "C.UTF-8",
        }
        done = subprocess.run(
            words, input=input, capture_output=True, text=True, check=False, env=env, timeout=timeout, umask=0o022
        )
        result = Done(done.returncode, done.stdout, done.stderr)
        assert code is None or result.code == code, f"{script}: {result}"
        return result

    def begin(self, *lines: str) -> None:
        """Run lines that leave background processes, whose output goes to /tmp/log."""
        self.run("exec > /tmp/log 2>&1 < /dev/null", *lines)

    def wait_for(self, test: str, within: float = 60.0) -> None:
        """Wait until a shell test succeeds; the error shows /tmp/log."""
        deadline = time.monotonic() + within
        while self.run(f"test {test}", code=None).code:
            assert time.monotonic() < deadline, self.run("cat /tmp/log", code=None).out
            time.sleep(0.1)

    def processes(self) -> list[int]:
        """Return the processes of this world, also those in namespaces within it."""
        found = []
        for entry in Path("/proc").iterdir():
            with suppress(OSError):
                if entry.name.isdigit() and f"{self.top}/" in (entry / "mountinfo").read_text():
                    found.append(int(entry.name))
        return found


@contextmanager
def world() -> Iterator[World]:
    """Create a world with Hutch installed in /opt/hutch; at the end, no process and no file of it is left."""
    need_root()
    copy = installed().root
    top = Path(tempfile.mkdtemp(prefix="hutch-world-", dir="/var/tmp"))
    _copy_etc(top / "etc")
    script = _SET_UP.format(over=" ".join(_OVER), top=top, copy=copy)
    holder = subprocess.Popen(
        ["unshare", "--mount", "--propagation=private", "bash", "-ec", script],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "ready\n"
        made = World(holder.pid, top)
        try:
            yield made
        finally:
            _end(made)
    finally:
        holder.kill()
        holder.communicate()
        shutil.rmtree(top, ignore_errors=True)


def _copy_etc(to: Path) -> None:
    """Copy /etc while no other test changes accounts."""
    with locked():
        subprocess.run(["cp", "-a", "/etc", to], check=True)
    for left in to.glob("*.lock"):
        left.unlink()


def _end(made: World) -> None:
    """End all processes in it: hutchd first, so that the launcher ends executors; then the rest, and cgroups."""
    groups = {path for pid in made.processes() for path in _groups_of(pid)}
    for word, number in (("hutchd", signal.SIGTERM), ("", signal.SIGTERM), ("", signal.SIGKILL)):
        chosen = [pid for pid in made.processes() if pid != made.pid and word in _command_of(pid)]
        for pid in chosen:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        deadline = time.monotonic() + 20
        while set(made.processes()) & set(chosen) and time.monotonic() < deadline:
            time.sleep(0.05)
    for group in groups:
        for path in Path("/sys/fs/cgroup").glob(f"*/{group}"):
            with suppress(OSError):
                path.rmdir()
    assert set(made.processes()) <= {made.pid}


def _command_of(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return ""


def _groups_of(pid: int) -> list[str]:
    with suppress(OSError):
        return re.findall(r"hutch-x-[0-9a-z]+", Path(f"/proc/{pid}/cgroup").read_text())
    return []
