"""Limits, groups, settings and accounts change between sessions: each new session has exactly what holds then."""

from __future__ import annotations

import os
import pwd
import signal
import subprocess
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import anyio
import pytest

from hutch_client.client import HutchClient
from hutch_shared import messages as m
from tests import sampling
from tests.accounts import Account, group, locked
from tests.system.hostile import show
from tests.system.log import DEADLINE
from tests.system.shared_host import SharedHost, shared_host

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]

IN_CI = 4
SHELLS = ("/bin/sh", "/bin/bash")


@dataclass(slots=True)
class Asked:
    """What the settings ask for."""

    memory: int = 512 << 20
    pids: int = 128
    open_files: int = 4096
    cpu_weight: int = 100
    spares: int = 1

    def settings(self) -> str:
        """Return the settings file."""
        return (
            f'[executors]\nspares = {self.spares}\nspare_agents = ["script"]\n[limits]\nmemory = {self.memory}\n'
            f"pids = {self.pids}\nopen_files = {self.open_files}\ncpu_weight = {self.cpu_weight}\n"
        )


@dataclass(slots=True)
class Changes:
    """A host whose settings and accounts change at random."""

    host: SharedHost
    hutch: HutchClient
    groups: tuple[str, ...]
    dice: Random
    asked: Asked = field(default_factory=Asked)
    gone: set[str] = field(default_factory=set)
    counts: Counter[str] = field(default_factory=Counter)
    open: dict[str, m.Session] = field(default_factory=dict)
    """The last session of each account. It stays open, because only accounts with a session have spares."""

    async def change(self) -> None:
        """Change one thing."""
        who = self.dice.choice([*self.host.people.values()])
        kind = self.dice.choice(("limits", "limits", "groups", "groups", "shell", "spares", "account"))
        self.counts[kind] += 1
        match kind:
            case "limits":
                self.asked.memory = self.dice.randrange(300, 700) << 20
                self.asked.pids = self.dice.randrange(64, 256)
                self.asked.open_files = self.dice.randrange(1024, 9000)
                await self.reload()
            case "spares":
                self.asked.spares = self.dice.choice((1, 2))
                await self.reload()
            case "groups" if who.name not in self.gone:
                chosen = self.dice.sample(self.groups, self.dice.randrange(len(self.groups) + 1))
                await run("usermod", "--groups", ",".join(chosen), who.name)
            case "shell" if who.name not in self.gone:
                await run("usermod", "--shell", self.dice.choice(SHELLS), who.name)
            case "account" if who.name in self.gone:
                await self.restore(who)
            case "account":
                await self.close(who.name)
                await run("userdel", "--force", who.name)
                self.gone.add(who.name)

    async def restore(self, who: Account) -> None:
        """Create a deleted account again, with its ids."""
        await run("groupadd", "--force", "--gid", str(who.gid), who.name)
        words = ("--uid", str(who.uid), "--gid", who.name, "--home-dir", str(who.home), "--no-create-home")
        await run("useradd", *words, "--shell", SHELLS[0], who.name)
        self.gone.discard(who.name)

    async def reload(self) -> None:
        """Put the settings into force."""
        self.host.settings = self.asked.settings()
        self.host.write_settings()
        read = self.host.log.read_text().count("settings read")
        assert self.host.daemon is not None
        self.host.daemon.send_signal(signal.SIGHUP)
        with anyio.fail_after(DEADLINE):
            while self.host.log.read_text().count("settings read") == read:
                await anyio.sleep(0.01)

    async def check_session(self) -> None:
        """Open a session of a random account and ask the kernel what its executor has."""
        known = [one for one in self.host.people.values() if one.name not in self.gone]
        if not known:
            await self.restore(self.host.people["alice"])
            known = [self.host.people["alice"]]
        who = self.dice.choice(known)
        cwd = str(self.host.folder(who, "work"))
        warm = {one.id for one in (await self.hutch.get_status()).executors if one.state == "ready"}
        session = await self.hutch.open_session(m.OpenSession("script", cwd, account=who.name))
        executor = await self.executor_of(session)
        self.counts["sessions that got a spare"] += executor.id in warm
        seen = await self.hutch.get_session(session.id)

        assert self.too_many(await self.hutch.get_status()) == {}
        assert in_kernel(executor.pid) == (
            self.asked.open_files,
            tuple(sorted(set(os.getgrouplist(who.name, who.gid)))),
            self.asked.memory,
            self.asked.pids,
        )
        assert seen.executor_limits is not None
        assert seen.executor_limits.applied == m.ResourceLimits(
            self.asked.memory, self.asked.pids, self.asked.cpu_weight, self.asked.open_files
        )
        await self.close(who.name)
        self.open[who.name] = session

    async def close(self, name: str) -> None:
        """Close the open session of an account, if it has one."""
        if (session := self.open.pop(name, None)) is not None:
            await self.hutch.close_session(session.id, force=True)

    async def spares_ready(self) -> None:
        """Wait until each account with a session has its spares."""
        with anyio.fail_after(DEADLINE):
            while True:
                ready = Counter(
                    one.account for one in (await self.hutch.get_status()).executors if one.state == "ready"
                )
                if all(ready[name] == self.asked.spares for name in self.open):
                    return
                await anyio.sleep(0.05)

    async def executor_of(self, session: m.Session) -> m.ExecutorStatus:
        """Wait for the session's executor."""
        with anyio.fail_after(DEADLINE):
            while True:
                found = [one for one in (await self.hutch.get_status()).executors if one.session == session.id]
                if found and found[0].state == "leased":
                    return found[0]
                await anyio.sleep(0.01)

    def too_many(self, status: m.Status) -> dict[str, int]:
        """Return the accounts with more spares than the settings ask for, with their number."""
        spares = Counter(
            one.account for one in status.executors if one.session is None and one.state in ("starting", "ready")
        )
        return {name: count for name, count in spares.items() if count > self.asked.spares}

    async def check_gone(self) -> None:
        """No spare of a deleted account stays."""
        with anyio.fail_after(DEADLINE):
            while any(one.account in self.gone for one in (await self.hutch.get_status()).executors):
                await anyio.sleep(0.05)


async def run(program: str, *words: str) -> None:
    """Run a program that changes accounts, one process of all test runs at a time."""

    def change() -> None:
        with locked():
            done = subprocess.run([program, *words], capture_output=True, text=True, check=False)
        assert done.returncode == 0 or program == "userdel", f"{program}: {done.stderr}"

    await anyio.to_thread.run_sync(change)


def in_kernel(pid: int) -> tuple[int, tuple[int, ...], int, int]:
    """Return the limit of open files, the groups, and the limits of memory and processes of an executor."""
    limits = Path(f"/proc/{pid}/limits").read_text().splitlines()
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
    files = next(int(line.split()[3]) for line in limits if line.startswith("Max open files"))
    groups = {int(status["Gid"].split()[1]), *map(int, status["Groups"].split())}
    return files, tuple(sorted(groups)), group_limit(pid, "memory"), group_limit(pid, "pids")


def group_limit(pid: int, controller: str) -> int:
    """Return a limit of the executor's cgroup, of either version."""
    names = {"memory": ("memory.max", "memory.limit_in_bytes"), "pids": ("pids.max",)}[controller]
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        for mount in ("/sys/fs/cgroup", "/sys/fs/cgroup/unified", f"/sys/fs/cgroup/{controllers}"):
            for name in names:
                file = Path(f"{mount}{path}", name)
                if "hutch-x-" in path and file.exists():
                    return int(file.read_text())
    raise AssertionError(f"the executor has no limit of {controller}")


@pytest.fixture
async def changes(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Changes]:
    """A host with three users and three groups, seen by root."""
    with ExitStack() as stack:
        groups = tuple(stack.enter_context(group(f"g{at}")) for at in range(3))
        async with shared_host("alice", "bob", "carol", settings=Asked().settings()) as host:
            monkeypatch.setenv("HUTCH_STATE_DIR", str(host.state))  # root trusts the server that owns it
            async with HutchClient.connect(host.runtime / "client.sock") as hutch:
                made = Changes(host, hutch, groups, Random(sampling.seed()))
                try:
                    yield made
                finally:
                    for who in host.people.values():
                        if who.name in made.gone:
                            await made.restore(who)


async def make_changes(changes: Changes, count: int) -> None:
    """Make random changes, each followed by a session. Before about half of them, the spares are ready."""
    for _ in range(count):
        if changes.dice.random() < 0.5:
            await changes.spares_ready()
        await changes.change()
        await changes.check_session()
    await changes.check_gone()
    show("changes between sessions", changes=count, kinds=dict(changes.counts))
    names = [who.name for who in changes.host.people.values() if who.name not in changes.gone]
    assert all(pwd.getpwnam(name) for name in names)


async def test_a_new_session_has_what_holds_then(changes: Changes) -> None:
    """The kernel confirms limits and groups, and no account has more spares than asked for."""
    await make_changes(changes, IN_CI)


@pytest.mark.full
@pytest.mark.timeout(1800)
async def test_after_200_changes_each_session_has_what_holds_then(changes: Changes) -> None:
    """The same, with 200 changes."""
    await make_changes(changes, 200)
