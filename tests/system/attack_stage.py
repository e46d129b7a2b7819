"""The stage of `programs/attacks.py`: what an agent's command attacks, and whether it succeeded.

A command says what it obtained; the stage compares that with what it planted. A change counts only if it is there
outside the sandbox.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import anyio

from hutch_client.client import HutchClient
from hutch_shared import messages as m
from tests.accounts import Account
from tests.broker.stage import request
from tests.rehearsal import Model, Say, Use
from tests.system import processes
from tests.system.host import SETTINGS_READ, START
from tests.system.hostile import LEASE, PROGRAMS, claude, find_in_memory, lend
from tests.system.log import Log, cli_of, executor_of, log_of, wait_for
from tests.system.shared_host import SharedHost

__all__ = ["AttackStage", "Line", "Observed", "attack_stage", "bare_path", "closed_namespaces", "reload_settings"]

_SHARED_FOLDERS: Final = ("/tmp", "/var/tmp", "/dev/shm")
_OUTLIVES: Final = 0.5
"""Seconds after which processes of a closed session that do nothing count as ended."""


@dataclass(frozen=True, slots=True)
class Line:
    """The result of one attack."""

    open: bool
    said: str
    """What was obtained and refused."""


@dataclass(frozen=True, slots=True)
class Observed:
    """One session's results, by the name of the attack."""

    session: m.Session
    lines: Mapping[str, Line]


@dataclass(frozen=True, slots=True)
class Victim:
    """A running `programs/victim.py` of a user."""

    who: Account
    canary: str
    places: Mapping[str, Any]
    process: subprocess.Popen[str]

    @property
    def pid(self) -> int:
        return self.process.pid

    def reached(self) -> dict[str, list[str]]:
        """Return what reached it so far."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        found: dict[str, list[str]] = json.loads(self.process.stdout.readline())
        return found


@asynccontextmanager
async def _victim(host: SharedHost, who: Account) -> AsyncIterator[Victim]:
    """Run it during the block."""
    canary = f"canary-{secrets.token_hex(8)}"
    with tempfile.TemporaryDirectory(prefix="hutch-run-", dir="/run") as made:
        os.chown(made, who.uid, who.gid)
        program = lend(who, "victim.py", who.home)
        process = subprocess.Popen(
            [host.code.python, "-I", program, who.home, made, canary],
            env={**who.env, "VICTIM": canary},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=who.home,
            user=who.uid,
            group=who.gid,
            extra_groups=[],
            start_new_session=True,
        )
        try:
            places = Path(made, "places.json")
            await wait_for(lambda: places.exists() or process.poll() is not None)
            assert process.poll() is None, f"victim.py ended with {process.returncode}"
            yield Victim(who, canary, json.loads(places.read_text()), process)
        finally:
            process.communicate(timeout=30)


@dataclass(slots=True)
class AttackStage:
    """A host with a victim session and victim programs; `attack` runs all attacks in a new session of the same user."""

    host: SharedHost
    model: Model
    hutch: HutchClient
    who: Account
    victim: Victim
    foreign: Victim
    other: m.Session
    other_executor: int
    other_lease: str
    device: str

    async def attack(self, name: str) -> Observed:
        """Run all attacks in a folder with this name; return what each achieved."""
        cwd = self.host.folder(self.who, name)
        program = lend(self.who, "attacks.py", cwd)
        targets, result = cwd / "targets.json", cwd / "result.jsonl"
        command = f"{self.host.code.python} -I {program} {targets} {result}"
        run = Use("Bash", {"command": command, "timeout": 120_000})
        # The attacks ask the model too, so its answers follow from each request.
        self.model.script = lambda request: run if request.prompt == "go" and not request.fresh else Say("done")
        session = await claude(self.host, self.hutch, self.who, name)
        async with log_of(self.hutch, session) as log:
            turn = await self.hutch.submit_prompt(session.id, "go")
            await self._started(log, turn, cwd / "started")
            trial = await self._plant(session, cwd)
            (cwd / "targets.part").write_text(json.dumps(trial.targets))
            os.chown(cwd / "targets.part", self.who.uid, self.who.gid)
            (cwd / "targets.part").rename(targets)
            end = await log.ended(turn)
            said = [one.text for one in log.of("tool_result")]
        assert end.state == "completed", (end, said)
        assert result.exists(), said
        (cwd / "escape").touch()
        await wait_for(lambda: (cwd / "escaped").exists() or not _running(trial.planted))
        changed = [one for one in (self.other, session) if (await self._mode(one)) != one.permission_mode]
        session = await self.hutch.get_session(session.id)
        await self.hutch.close_session(session.id, force=True)
        lines = {line["name"]: line for line in map(json.loads, result.read_text().splitlines())}
        found = {name: Line(trial.succeeded(name, line["got"]), json.dumps(line)) for name, line in lines.items()}
        if changed:
            found["give-orders"] = Line(open=True, said=found["give-orders"].said)
        found["outlive"] = Line(await _grows(cwd / f"{trial.planted}.beat"), found["outlive"].said)
        (cwd / f"{trial.planted}.stop").touch()
        self._remove(trial.planted)
        for one in changed:
            await self.hutch.call("set_permission_mode", m.SetPermissionMode(one.id, one.permission_mode))
        return Observed(session, found)

    async def _started(self, log: Log, turn: m.Turn, mark: Path) -> None:
        """Return once the command runs; fail if the turn ends before."""
        async with anyio.create_task_group() as tasks:

            async def watch() -> None:
                end = await log.ended(turn)
                raise AssertionError(f"the command did not start: {end} {[one.text for one in log.of('tool_result')]}")

            tasks.start_soon(watch)
            await wait_for(mark.exists)
            tasks.cancel_scope.cancel()

    async def _mode(self, session: m.Session) -> str:
        return (await self.hutch.get_session(session.id)).permission_mode

    async def _plant(self, session: m.Session, cwd: Path) -> Trial:
        """Create the files that one run attacks, and say where everything is."""
        host, who = self.host, self.who
        planted = f"planted-{secrets.token_hex(8)}"
        home, agents = who.home, [*host.root.rglob(f"agents/{self.other.id}")]
        files = {name: home / f"{planted}.{name}" for name in ("truncated", "moved", "moved2", "mode", "attributes")}
        files |= {"times": home / f"{planted}.times"}
        for path in files.values():
            path.write_text(f"content of {path.name}")
            path.chmod(0o644)
            os.chown(path, who.uid, who.gid)
        executor = await executor_of(self.hutch, session)
        pids = [processes.table()[executor].parent, executor]
        assert host.daemon is not None
        hutch_pids = [host.daemon.pid, executor, *(one.pid for one in processes.table().values() if _is_broker(one))]
        programs = [host.code.packages / "hutch_executor", host.code.packages / "claude_agent_sdk" / "_bundled"]
        if host.program:
            programs.append(next((home / "venv").rglob("site-packages")))
        status = await self.hutch.get_status()
        targets: dict[str, Any] = {
            "launched": self.host.people["bob"].uid,
            "planted": planted,
            "protocol": m.PROTOCOL,
            "home": str(home),
            "secret": str(home / ".ssh" / "id_ed25519"),
            "link": str(home / "link"),
            "startup": str(home / ".bashrc"),
            "truncated": str(files["truncated"]),
            "moved": [str(files["moved"]), str(files["moved2"])],
            "mode": str(files["mode"]),
            "attributes": str(files["attributes"]),
            "times": str(files["times"]),
            "state_files": [str(path) for path in host.state.iterdir() if path.is_file()],
            "hutch_folders": [str(one) for one in (host.state, host.runtime, host.runtime / "broker")],
            "program_folders": [str(one) for one in programs],
            "hutch_pids": hutch_pids,
            "executor_pids": pids,
            "client_socket": str(host.runtime / "client.sock"),
            "executor_socket": str(host.runtime / "executor.sock"),
            "control_socket": str(host.runtime / "broker-control.sock"),
            "broker_socket": str(host.runtime / "broker" / "broker.sock"),
            "launcher_socket": str(host.launcher_socket),
            "request": request("LEASE").decode(),
            "own_session": session.id,
            "other_session": self.other.id,
            "other_executor": next(one.id for one in status.executors if one.pid == self.other_executor),
            "other_lease": self.other_lease,
            "other_pids": [await cli_of(self.hutch, self.other)],
            "other_files": [str(Path(self.other.cwd, "notes.txt"))],
            "other_folders": [self.other.cwd, *map(str, agents)],
            "limit": _limit_of(self.victim.pid),
            "foreign_file": str(self.foreign.who.home / "notes.txt"),
            "foreign_folder": str(self.foreign.who.home),
            "foreign_pid": self.foreign.pid,
            "victim": dict(self.victim.places),
            "victim_name": self.victim.canary,
            "shared_folders": list(_SHARED_FOLDERS),
            "device": self.device,
        }
        before = Before(
            reached=self.victim.reached(),
            priority=os.getpriority(os.PRIO_PROCESS, self.victim.pid),
            changed=files["mode"].stat().st_ctime_ns,
        )
        return Trial(self, planted, cwd, targets, before)

    def _remove(self, planted: str) -> None:
        """Remove what the run has left outside the folders that the host removes."""
        for place in (*_SHARED_FOLDERS, *map(str, (self.host.code.packages / "hutch_executor",))):
            Path(place, planted).unlink(missing_ok=True)
        for one in _running(planted):
            with contextlib.suppress(ProcessLookupError):
                os.kill(one.pid, signal.SIGKILL)


def _is_broker(one: processes.Process) -> bool:
    return "hutch_broker" in one.command


def _limit_of(pid: int) -> int:
    """Return the limit of a process that `limit-processes` lowers."""
    lines = Path(f"/proc/{pid}/limits").read_text().splitlines()
    return int(next(line for line in lines if "msgqueue" in line).split()[-2])


def _running(planted: str) -> list[processes.Process]:
    """Return the processes that a run has named for what it plants."""
    return [one for one in processes.table().values() if one.command.endswith(planted)]


async def _grows(path: Path) -> bool:
    """Return whether somebody still writes to the file."""
    before = path.stat().st_size
    with anyio.move_on_after(_OUTLIVES):
        while path.stat().st_size == before:
            await anyio.sleep(0.01)
        return True
    return False


@dataclass(frozen=True, slots=True)
class Before:
    """What a run may change, as it was before."""

    reached: Mapping[str, list[str]]
    priority: int
    changed: int


@dataclass(frozen=True, slots=True)
class Trial:
    """One run of all attacks."""

    stage: AttackStage
    planted: str
    cwd: Path
    targets: Mapping[str, Any]
    before: Before

    def succeeded(self, name: str, got: list[str]) -> bool:
        """Return whether an attack succeeded, from the evidence and from what has changed outside."""
        if name in _CHECKS:
            return _CHECKS[name](self, got)
        return bool(got)

    def has_planted(self, folders: list[str]) -> bool:
        """Return whether one of the folders has a file that the command made."""
        return any(any(path.name.startswith(self.planted) for path in Path(one).iterdir()) for one in folders)

    def has_canary(self, got: list[str]) -> bool:
        """Return whether the evidence has the victim's canary."""
        return any(self.stage.victim.canary in one for one in got)

    def has_hash(self, got: list[str], *paths: str) -> bool:
        """Return whether the evidence has the hash of one of the files."""
        return bool({*got} & {hashlib.sha256(Path(path).read_bytes()).hexdigest() for path in paths})

    def knows_name(self, got: list[str]) -> bool:
        """Return whether the evidence has the facts of a file or of a link."""
        found = Path(self.targets["secret"]).stat()
        return bool({*got} & {f"{found.st_size} {found.st_mtime_ns}", os.readlink(self.targets["link"])})

    def moved(self) -> bool:
        """Return whether a file of the home is in the working directory, or was replaced."""
        first, second = map(Path, self.targets["moved"])
        return not second.exists() or first.stat().st_nlink > 1 or first.read_text() == "own"

    def changed_mode(self) -> bool:
        """Return whether the mode of the file, or its owner, was set."""
        found = Path(self.targets["mode"]).stat()
        return stat.S_IMODE(found.st_mode) != 0o644 or found.st_ctime_ns != self.before.changed

    def limited(self) -> bool:
        """Return whether the victim's limit was lowered."""
        return _limit_of(self.stage.victim.pid) != int(self.targets["limit"])

    def has_attribute(self) -> bool:
        """Return whether the file has the attribute."""
        return "user.planted" in os.listxattr(self.targets["attributes"])

    def reached(self, what: str, word: str = "") -> bool:
        """Return whether something with this word has reached the victim."""
        return any(word in one for one in self.stage.victim.reached()[what][len(self.before.reached[what]) :])


_CHECKS: Final[dict[str, Callable[[Trial, list[str]], bool]]] = {
    "read-keys": lambda t, got: t.has_hash(got, str(t.stage.host.state / "master.key")),
    "change-hutch": lambda t, _: t.has_planted(t.targets["hutch_folders"]),
    "change-programs": lambda t, _: t.has_planted(t.targets["program_folders"]),
    "read-records": lambda t, got: any(t.stage.other.id in one for one in got),
    "give-orders": lambda *_: False,  # the stage asks hutchd
    "take-lease": lambda t, got: t.stage.other_lease in got,
    "read-sessions": lambda t, got: t.has_hash(got, *t.targets["other_files"]),
    "change-sessions": lambda t, _: t.has_planted(t.targets["other_folders"]),
    "foreign-sessions": lambda t, got: (
        t.has_hash(got, t.targets["foreign_file"])
        or any(t.stage.foreign.canary in one for one in got)
        or Path(t.targets["foreign_folder"], t.planted).exists()
    ),
    "read-secrets": lambda t, got: t.has_hash(got, t.targets["secret"]),
    "list-home": lambda t, got: t.has_canary(got),
    "learn-names": lambda t, got: t.knows_name(got),
    "write-home": lambda t, _: (
        Path(t.targets["home"], t.planted).exists() or t.planted in Path(t.targets["startup"]).read_text()
    ),
    "truncate-files": lambda t, _: not Path(t.targets["truncated"]).stat().st_size,
    "move-files": lambda t, _: t.moved(),
    "change-modes": lambda t, _: t.changed_mode(),
    "change-attributes": lambda t, _: t.has_attribute(),
    "change-times": lambda t, _: Path(t.targets["times"]).stat().st_mtime == 1,
    "watch-files": lambda t, got: t.has_canary(got),
    "see-processes": lambda t, got: t.has_canary(got),
    "read-processes": lambda t, got: t.has_canary(got),
    "signal-processes": lambda t, _: t.reached("signals"),
    "steer-processes": lambda t, _: os.getpriority(os.PRIO_PROCESS, t.stage.victim.pid) != t.before.priority,
    "limit-processes": lambda t, _: t.limited(),
    "outlive": lambda *_: False,  # the stage looks after the session's end
    "session-bus": lambda t, got: t.has_canary(got),
    "ssh-agent": lambda t, got: t.has_canary(got),
    "abstract-sockets": lambda t, got: t.has_canary(got),
    "datagram-sockets": lambda t, _: t.reached("datagrams", t.planted),
    "shared-memory": lambda t, got: t.has_canary(got),
    "read-shared-folders": lambda t, got: t.has_canary(got),
    "leave-files": lambda t, _: t.has_planted(t.targets["shared_folders"]),
    "devices": lambda _, got: "00000000" in got,
    "write-terminal": lambda t, _: t.reached("typed", t.planted),
    "loopback": lambda t, got: t.has_canary(got),
    "udp": lambda t, got: t.has_canary(got),
    "listen": lambda t, got: t.has_canary(got),
    "mounts": lambda t, got: t.has_hash(got, t.targets["secret"]),
}
"""How to see success where a successful call is not enough. All others count by their evidence alone."""


@contextmanager
def _device() -> Iterator[str]:
    """Create a device that every account may open."""
    path = f"/dev/hutch-t-{os.getpid()}"
    os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 5))
    os.chmod(path, 0o666)
    try:
        yield path
    finally:
        os.unlink(path)


def bare_path(root: Path) -> str:
    """Create a folder in `root` with the few programs that hutchd needs, without bubblewrap; return it, for PATH."""
    made = root / "bin"
    made.mkdir(mode=0o755)
    for name in ("sh", "bash", "setpriv", "git"):
        (made / name).symlink_to(str(shutil.which(name)))
    return str(made)


def closed_namespaces() -> tuple[str, ...]:
    """Return the command of root that runs another one on what is a host without user namespaces."""
    return (sys.executable, "-I", str(PROGRAMS / "closed_namespaces.py"))


async def reload_settings(host: SharedHost, settings: str) -> None:
    """Have hutchd read these settings."""
    assert host.daemon is not None
    host.settings = settings
    host.write_settings()
    before = host.log.read_text().count(SETTINGS_READ)
    host.daemon.send_signal(signal.SIGHUP)
    with anyio.fail_after(START):
        while host.log.read_text().count(SETTINGS_READ) == before:
            await anyio.sleep(0.02)


@asynccontextmanager
async def attack_stage(host: SharedHost, model: Model) -> AsyncIterator[AttackStage]:
    """Prepare a host whose first user attacks, and whose second user is another owner.

    The first user has a session of Claude that lives during the block, a key file, and programs that run. Where the
    host is the first user's own, there is no other owner: then those of the user stand for the other owner's.
    """
    alice, bob = (host.people[name] for name in ("alice", "bob"))
    foreign = alice if host.program else bob
    for who in (alice, bob):
        (who.home / ".ssh").mkdir(mode=0o700)
        (who.home / ".ssh" / "id_ed25519").write_text(f"a key {secrets.token_hex(16)}")
        (who.home / "notes.txt").write_text(f"notes {secrets.token_hex(16)}")
        (who.home / "link").symlink_to(f"/somewhere/{secrets.token_hex(8)}")
        (who.home / ".bashrc").write_text("# nothing\n")
        for path in who.home.rglob("*"):
            os.chown(path, who.uid, who.gid, follow_symlinks=False)
    async with contextlib.AsyncExitStack() as stack:
        device = stack.enter_context(_device())
        victim = await stack.enter_async_context(_victim(host, alice))
        elsewhere = victim if foreign is alice else await stack.enter_async_context(_victim(host, foreign))
        async with host.client(alice) as hutch:
            model.script = lambda _: Say("hello")
            other = await claude(host, hutch, alice, "other")
            async with log_of(hutch, other) as log:
                end = await log.play(other, "go")
                assert end.state == "completed", end
            Path(other.cwd, "notes.txt").write_text(f"notes {secrets.token_hex(16)}")
            os.chown(Path(other.cwd, "notes.txt"), alice.uid, alice.gid)
            executor = await executor_of(hutch, other)
            lease = find_in_memory(executor, LEASE).decode()
            yield AttackStage(host, model, hutch, alice, victim, elsewhere, other, executor, lease, device)
            await hutch.close_session(other.id, force=True)
