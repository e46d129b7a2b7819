"""The tests of hostile agents: a victim with secrets, an attacker, and the ways to run an attack."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import anyio

from hutch_client.client import HutchClient
from hutch_shared import messages as m
from hutch_shared.events import TurnEnded
from tests.accounts import Account, processes_of
from tests.rehearsal import Model, Say, Steps, Use
from tests.system import processes
from tests.system.log import DEADLINE, Log, cli_of, executor_of, log_of, wait_for
from tests.system.shared_host import SharedHost

__all__ = [
    "ALICES_KEY",
    "LEASE",
    "MALLORYS_KEY",
    "Diary",
    "bash",
    "broker_of",
    "claude",
    "diary",
    "find_in_memory",
    "lend",
    "open_script",
    "run_claude",
    "run_script",
    "said_by",
    "show",
    "targets",
    "whole",
]

PROGRAMS: Final = Path(__file__).with_name("programs")
ALICES_KEY: Final = "sk-ant-the-key-of-alice-Zr7Lm2Tb5Vn8"
MALLORYS_KEY: Final = "sk-ant-the-key-of-mallory-Kd4Hs6Jw1P"
LEASE: Final = re.compile(rb"hutch-l-[0-9a-z]{16}-[\w-]{43}")
_MEMORY: Final = 256 << 20


def lend(who: Account, program: str, folder: Path) -> Path:
    """Copy one of the programs into a folder of a user."""
    made = folder / program
    shutil.copyfile(PROGRAMS / program, made)
    os.chown(made, who.uid, who.gid)
    return made


def show(figure: str, **values: Any) -> None:
    """Print a figure as a line of JSON."""
    print(json.dumps({"figure": figure, **values}))


# ---------------------------------------------------------------- running attacks


def bash(command: str) -> dict[str, Any]:
    """Return a script line that runs a command."""
    return {"tool": "Bash", "input": {"command": command}, "run": True}


async def open_script(
    host: SharedHost,
    hutch: HutchClient,
    who: Account,
    lines: Sequence[Mapping[str, Any]],
    folder: str = "work",
    mode: m.PermissionMode = "bypass",
    **more: Any,
) -> m.Session:
    """Open a session of a user that runs these lines, in a folder of the user's home."""
    options = m.AgentOptions(script=str(host.script(who, lines)))
    cwd = str(host.folder(who, folder))
    return await hutch.open_session(m.OpenSession("script", cwd, options=options, permission_mode=mode, **more))


def said_by(log: Log) -> str:
    """Return the output of the newest command."""
    return str(log.of("tool_result")[-1].text)


async def run_script(
    host: SharedHost, who: Account, command: str, folder: str = "work", **more: Any
) -> tuple[TurnEnded, str]:
    """Run a command through a user's script agent; return the end of its turn and the output."""
    async with host.client(who) as hutch:
        session = await open_script(host, hutch, who, [bash(command)], folder, **more)
        async with log_of(hutch, session) as log:
            end = await log.play(session, "go")
        await hutch.close_session(session.id, force=True)
        return end, said_by(log) if log.of("tool_result") else ""


async def claude(host: SharedHost, hutch: HutchClient, who: Account, folder: str = "work", **more: Any) -> m.Session:
    """Open a session of Claude, in a folder of a user's home; `.` is the home itself."""
    cwd = who.home if folder == "." else host.folder(who, folder)
    return await hutch.open_session(m.OpenSession("claude", str(cwd), permission_mode="bypass", **more))


async def run_claude(
    host: SharedHost, model: Model, who: Account, command: str, folder: str = "work", **more: Any
) -> tuple[m.Session, TurnEnded, str]:
    """Run a command through the real CLI's Bash tool; return the session, its turn's end and the output."""
    model.script = Steps(("go", Use("Bash", {"command": command, "timeout": 120_000})), ("", Say("done")))
    async with host.client(who) as hutch:
        session = await claude(host, hutch, who, folder, **more)
        async with log_of(hutch, session) as log:
            end = await log.play(session, "go")
        session = await hutch.get_session(session.id)
        await hutch.close_session(session.id, force=True)
        return session, end, said_by(log) if log.of("tool_result") else ""


# ---------------------------------------------------------------- the victim


@dataclass(frozen=True, slots=True)
class Diary:
    """A user's agent that keeps secrets; see `programs/diary.py`."""

    who: Account
    hutch: HutchClient
    session: m.Session
    turn: m.Turn
    log: Log
    told: dict[str, Any]
    executor: int

    async def close(self) -> dict[str, Any]:
        """Let the agent report what was changed, and end it."""
        Path(self.session.cwd, "end").touch()
        end = await self.log.ended(self.turn)
        assert end.state == "completed", end
        found: dict[str, Any] = json.loads(said_by(self.log))
        return found


@asynccontextmanager
async def diary(host: SharedHost, hutch: HutchClient, who: Account, folder: str = "diary") -> AsyncIterator[Diary]:
    """Run a diary outside any sandbox during the block."""
    cwd = host.folder(who, folder)
    program = lend(who, "diary.py", cwd)
    command = f"DIARY=secret-of-environ-{os.urandom(8).hex()} exec {host.code.python} -I {program} {cwd}"
    session = await open_script(host, hutch, who, [bash(command)], folder)
    async with log_of(hutch, session) as log:
        turn = await hutch.submit_prompt(session.id, "keep it")
        await wait_for((cwd / "diary.json").exists)
        told = json.loads((cwd / "diary.json").read_text())
        yield Diary(who, hutch, session, turn, log, told, await executor_of(hutch, session))
        await hutch.close_session(session.id, force=True)


async def targets(host: SharedHost, kept: Diary, lives: m.Session | None = None) -> dict[str, Any]:
    """Return all that an attacker may know of a diary, of Hutch and of a Claude session."""
    assert host.daemon is not None
    assert host.launcher is not None
    told = dict(kept.told)
    told["pids"] = {
        **told["pids"],
        "executor": kept.executor,
        "hutchd": host.daemon.pid,
        "launcher": host.launcher.pid,
    }
    if lives is not None:
        told["pids"] |= {"broker": broker_of(host), "claude": await cli_of(kept.hutch, lives)}
        told["pids"]["claude-executor"] = await executor_of(kept.hutch, lives)
    sockets = [str(path) for path in host.runtime.rglob("*") if path.is_socket()]
    told["hutch"] = {
        "uid": host.hutch_account.uid,
        "private": [str(path) for path in host.state.rglob("*") if path.is_file()],
        "private_folders": [str(path) for path in (host.state, *host.state.rglob("*")) if path.is_dir()],
        "spool": str(host.spool),
        "places": [str(one) for one in (host.root, host.runtime, host.state, host.spool, host.config.parent)]
        + [str(host.launcher_socket.parent), str(host.runtime / "broker")],
        "public": [str(host.config), str(host.launcher_config)],
        "sockets": [*sockets, str(host.launcher_socket)],
        "launcher": str(host.launcher_socket),
    }
    told["sockets"] = [*told["sockets"], *(one for one in sockets if "control" in one)]
    told["files"] = [*told["files"], *(str(path) for path in kept.who.home.glob("script-*.jsonl"))]
    told["folders"] = [*told["folders"], str(host.spool / str(kept.who.uid))]
    return told


def broker_of(host: SharedHost) -> int:
    """Return the broker's process."""
    its = processes_of(host.hutch_account.uid)
    (pid,) = [one.pid for one in processes.table().values() if "hutch_broker" in one.command and one.pid in its]
    return pid


def find_in_memory(pid: int, wanted: re.Pattern[bytes], is_it: Callable[[bytes], bool] = lambda _: True) -> bytes:
    """Return the matches of `wanted` that root finds in a process's memory."""
    left = _MEMORY
    with Path(f"/proc/{pid}/mem").open("rb", 0) as memory:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            span, rights, *_ = line.split()
            start, end = (int(part, 16) for part in span.split("-"))
            if not rights.startswith("rw") or end - start > left:
                continue
            left -= end - start
            with suppress(OSError, OverflowError, ValueError):
                memory.seek(start)
                for found in wanted.finditer(memory.read(end - start)):
                    if is_it(found[0]):
                        return found[0]
    raise AssertionError(f"{wanted.pattern!r} is not in the memory of {pid}")


async def whole(host: SharedHost) -> None:
    """Return once hutchd answers; fail if it does not, or if it or the launcher has ended."""
    assert host.daemon is not None
    assert host.daemon.poll() is None, host.log_text()
    assert host.launcher is not None
    assert host.launcher.poll() is None, host.log_text()
    with anyio.fail_after(DEADLINE):
        await host.hutch(host.hutch_account, "status")
