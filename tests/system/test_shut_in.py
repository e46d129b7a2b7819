"""hutchd and its broker under the restrictions of a host's unit: visible files and allowed system calls."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hutch_client.install.units import DAEMON, render_systemd
from tests.accounts import Account, account, installed
from tests.programs import systemd_analyze
from tests.system.host import KEY, START

pytestmark = pytest.mark.system

SHUT_IN = Path(__file__).with_name("programs") / "shut_in.py"


TRIES = """
import ctypes, mmap, os, socket
def tried(name, call):
    try:
        call()
    except OSError:
        return
    print(name)
tried("writes and executes", lambda: mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC))
def unshare():
    if ctypes.CDLL(None).unshare(0x10000000):
        raise OSError
tried("makes namespaces", unshare)
tried("asks the kernel of its network", lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW))
tried("writes to the system", lambda: open("/usr/x", "w"))
tried("reads root's home", lambda: os.listdir("/root"))
tried("changes a kernel's setting", lambda: open("/proc/sys/kernel/hostname", "w"))
tried("opens a Unix socket", lambda: socket.socket(socket.AF_UNIX))
"""


@dataclass(frozen=True)
class ShutIn:
    """A hutchd under these restrictions, below `folder`."""

    folder: Path
    who: Account
    places: dict[str, str]
    pid: int

    def hutch(self, *words: str, input: str = "") -> str:
        """Run the command as hutchd's account; return its output."""
        done = self.who.run(installed().command("hutch"), *words, input=input, env={**self.who.env, **self.places})
        assert done.returncode == 0, done.stderr
        return done.stdout

    def status(self) -> dict[str, Any]:
        """Return hutchd's status."""
        return dict(json.loads(self.hutch("status", "-o", "json")))

    def children(self) -> list[int]:
        """Return hutchd's child processes."""
        tasks = Path(f"/proc/{self.pid}/task").iterdir()
        return [int(pid) for task in tasks for pid in (task / "children").read_text().split()]


def status_of(pid: int) -> dict[str, str]:
    """Return the kernel's status of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


@pytest.fixture
def shut_in() -> Iterator[ShutIn]:
    """hutchd in system mode, restricted by its unit's text, with its own directories."""
    systemd_analyze()
    copy = installed()
    with account("shut") as who:
        folder = Path(tempfile.mkdtemp(prefix="hutch-shut-in-", dir="/var/lib"))
        log = folder / "hutchd.log"
        try:
            folder.chmod(0o755)
            places = {"HUTCH_CONFIG": str(folder / "hutch.toml")}
            for name, mode in (("STATE", 0o700), ("RUNTIME", 0o755)):
                places[f"HUTCH_{name}_DIR"] = str(folder / name)
                (folder / name).mkdir()
                (folder / name).chmod(mode)
                os.chown(folder / name, who.uid, who.gid)
            command = str(copy.command("hutchd"))
            unit = folder / DAEMON
            unit.write_text(render_systemd([command], places, system=True, launcher=["/bin/true"])[DAEMON])
            with log.open("wb") as output:
                process = subprocess.Popen(
                    [sys.executable, SHUT_IN, unit, who.name, command, "--system"],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env={**who.env, **places},
                )
            try:
                deadline = time.monotonic() + START
                while not Path(places["HUTCH_RUNTIME_DIR"], "client.sock").exists():
                    assert process.poll() is None, log.read_text()
                    assert time.monotonic() < deadline, log.read_text()
                    time.sleep(0.05)
                yield ShutIn(folder, who, places, process.pid)
            finally:
                process.terminate()
                process.wait(30)
                print(log.read_text()[-5000:])
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def test_hutchd_works_under_the_restrictions_of_its_unit(shut_in: ShutIn) -> None:
    """Record, vault and backup work, and so does the broker, which inherits every restriction."""
    shut_in.hutch("key", "add", "anthropic", input=KEY)
    deadline = time.monotonic() + START
    while (broker := shut_in.status()["broker"])["state"] != "up":
        assert time.monotonic() < deadline, broker
        time.sleep(0.05)
    copy = shut_in.folder / "STATE" / "copy.db"
    shut_in.hutch("daemon", "backup", str(copy))
    seen = [status_of(pid) for pid in (shut_in.pid, *shut_in.children())]
    elsewhere = shut_in.who.run(
        installed().command("hutch"), "daemon", "backup", "/tmp/x.db", env={**shut_in.who.env, **shut_in.places}
    )

    assert copy.stat().st_size > 0
    assert len(seen) >= 2
    for one in seen:
        assert one["Uid"].split() == [str(shut_in.who.uid)] * 4
        assert (one["NoNewPrivs"], one["Seccomp"]) == ("1", "2")
        assert {one[name] for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {"0" * 16}
    assert "a private /tmp" in elsewhere.stderr
    assert elsewhere.returncode == 1


def test_the_unit_forbids_each_attempt(shut_in: ShutIn) -> None:
    """Each attempt fails under the unit and works outside, so the test above proves something."""
    unit = shut_in.folder / DAEMON
    words: list[str | Path] = [sys.executable, SHUT_IN, unit, shut_in.who.name, installed().python, "-c", TRIES]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    outside = shut_in.who.run(installed().python, "-c", TRIES)

    assert done.stdout.splitlines() == ["opens a Unix socket"]
    assert {"writes and executes", "asks the kernel of its network"} <= {*outside.stdout.splitlines()}
