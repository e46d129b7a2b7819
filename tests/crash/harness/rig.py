"""A host with a real hutchd under load: kills its processes, and collects the evidence."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, closing, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import anyio
import anyio.abc

from tests.crash.harness import planted, wire
from tests.crash.harness.logs import Logs
from tests.crash.harness.notebook import Notebook, read
from tests.crash.harness.parties import APART, Stage, handles_sigterm
from tests.crash.harness.places import FAILPOINTS
from tests.crash.harness.prompts import CLAUDE, claude, script_of
from tests.crash.harness.verdict import TERMINAL, Evidence, Kill, Violation
from tests.rehearsal import serve
from tests.system import processes
from tests.system.host import KEY, Host, host, settings_for

TOP = Path(__file__).parents[3]
SETTINGS = "[executors]\nspares = 0\nadopt_timeout = 30\nlost_timeout = 60\nstart_attempts = 50\n"
PARTIES_LOG = "parties.log"
KEPT_IN = "HUTCH_CRASH_LOGS"
"""The variable with the directory for the logs of failed runs (default: the system's temporary one)."""
LOOK = 0.01
SPOOLED = 10.0
"""Seconds within which a busy executor without hutchd spools; usually it takes a tenth of a second."""
ADOPTED = 20.0
"""Seconds within which every living executor must be adopted."""
PARTIES = {
    "players": ("player:bold-1:bypass", "player:shy-1:ask", "player:bold-2:bypass", "player:shy-2:ask"),
    "watchers": ("watcher", "rival"),
}
CLAUDES = {"claudes": ("player:claude-1:bypass", "player:claude-2:ask")}


@dataclass(slots=True)
class Rig:
    """A host and the kills on it. `seed` decides every choice."""

    host: Host
    seed: int
    rng: Random
    parties: dict[str, tuple[str, ...]]
    logs: Logs
    began: float
    apart: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    kills: Counter[str] = field(default_factory=Counter)
    """The number of kills of each kind of process."""
    kills_in_order: list[Kill] = field(default_factory=list)
    adoption: list[float] = field(default_factory=list)
    answerable: list[float] = field(default_factory=list)
    disturbed: set[str] = field(default_factory=set)
    """Sessions whose agent was killed on purpose, so that their turns may fail."""
    noticed: list[Violation] = field(default_factory=list)
    killed: set[str] = field(default_factory=set)
    running: dict[str, anyio.abc.Process] = field(default_factory=dict)
    pending: str | None = None
    """The permission request that waits in the session apart from the players."""
    listening: float | None = None
    """The time when the executor socket of the current hutchd accepted connections."""
    is_old: bool = False
    """True once an older record replaced the record, so that promises of the newer one are void."""
    failpoint: str | None = None
    """The failpoint of the current hutchd."""
    is_failpoint_reached: bool = False
    """Whether an executor died at its failpoint while the last hutchd was killed."""

    @property
    def folder(self) -> Path:
        return self.host.work

    @property
    def mark(self) -> Path:
        return self.host.root / "failpoint"

    @property
    def stage(self) -> Stage:
        return Stage(self.host.socket, self.folder, str(self.seed))

    # ------------------------------------------------------------ hutchd

    async def start(self, failpoint: str | None = None, *, settled: bool = True) -> None:
        """Start hutchd; with a failpoint, it is killed there.

        With `settled`, return once all living executors are adopted, and note how long that took.
        """
        self.failpoint = failpoint
        with self.host.log.open("a") as log:
            log.write(f"-- hutchd starts: after {self.last_kill or 'no kill'}; failpoint: {failpoint or 'none'}\n")
        env = {}
        if failpoint is not None:
            self.mark.touch()
            env = {"HUTCH_FAILPOINT": failpoint, "HUTCH_FAILPOINT_MARK": str(self.mark)}
        failure: AssertionError | None = None
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._note_listening)
            try:
                await self.host.start(env=env)
            except AssertionError as error:
                failure = error
            tasks.cancel_scope.cancel()
        if failure is not None:
            if failpoint is None or self.mark.exists():
                raise failure
            await self.host.exited()
            self._count("hutchd", "hutchd at its failpoint")
            await self.start(settled=settled)
            return
        if settled:
            with suppress(wire.LostError, wire.RefusedError):
                await self._measure()

    async def _note_listening(self) -> None:
        """Note when executors can connect again."""
        self.listening = None
        while self.listening is None:
            with suppress(OSError):
                async with await anyio.connect_unix(str(self.host.runtime / "executor.sock")):
                    self.listening = anyio.current_time()
            await anyio.sleep(LOOK / 2)

    async def _measure(self) -> None:
        since = self.listening or anyio.current_time()
        async with wire.connect(self.host.socket) as line:
            if self.pending is not None:
                question, self.pending = self.pending, None
                await self._answer(line, question)
                self.answerable.append(anyio.current_time() - since)
            waiting: set[str] | None = None
            while waiting or waiting is None:
                status = await line.ask("get_status")
                now = anyio.current_time() - since
                detached = {
                    one["id"] for one in status.get("executors", ()) if one["state"] == "detached"
                } - self.killed
                adopted = {one["id"] for one in status.get("executors", ()) if one.get("adopted")}
                back = adopted - detached if waiting is None else waiting - detached
                self.adoption += [now] * len(back - self.killed)
                waiting = detached
                if now > ADOPTED:
                    self._notice("not_adopted", f"{waiting} are not adopted after {now:.0f} s")
                    return
                await anyio.sleep(LOOK)

    async def _answer(self, line: wire.Line, question: str) -> None:
        try:
            settled = await line.ask("answer_permission", permission=question, decision="allow")
            state = settled["state"]
        except wire.RefusedError as error:  # the last hutchd stored the decision and was killed before it answered
            state = error.data.get("permission", {}).get("state", str(error))
        if state == "withdrawn" and self.is_failpoint_reached:
            return  # the executor that died there may have been the one that asked
        killed = {row["id"] for row in self.rows("permissions") if row["executor"] in self.killed}
        if state != "allowed" and question not in killed:
            self._notice("question_lost", f"{question} waited before the restart; allowed after it: {state}")

    async def rest(self, seconds: float) -> None:
        """Wait. If hutchd dies at its failpoint, start it again."""
        assert self.host.daemon is not None
        code: int | None = None
        with anyio.move_on_after(seconds):
            code = await self.host.daemon.wait()
        if code is not None:
            if code != -signal.SIGKILL or self.mark.exists() or self.failpoint is None:
                self._notice("bug", f"hutchd ended by itself with {code}")
            await self.host.exited()
            self._count("hutchd", "hutchd at its failpoint")
            await self.start()

    def _count(self, kind: str, process: str) -> None:
        """Count a kill. Log lines before this moment belong to the previous kill."""
        self.logs.scan(self.last_kill)
        self.kills[kind] += 1
        at = anyio.current_time() - self.began
        self.kills_in_order.append(Kill(len(self.kills_in_order) + 1, process, at, self.failpoint))

    @property
    def last_kill(self) -> Kill | None:
        return self.kills_in_order[-1] if self.kills_in_order else None

    def _notice(self, word: str, detail: str) -> None:
        self.noticed.append(Violation(word, detail, after=self.last_kill))

    async def kill_hutchd(self, failpoint: str | None = None, *, settled: bool = True) -> None:
        """Kill hutchd, and start a new one; with a failpoint, it is killed there."""
        self.is_failpoint_reached = False
        self._count("hutchd", f"hutchd {self.host.pid}")
        await self.host.kill()
        if self.failpoint is not None and FAILPOINTS[self.failpoint.partition(":")[0]].process == "executor":
            with anyio.move_on_after(0.3):  # without hutchd an executor spools, and may reach its failpoint
                while self.mark.exists():
                    await anyio.sleep(LOOK)
            self.is_failpoint_reached = not self.mark.exists()
        self.mark.unlink(missing_ok=True)
        await self.start(failpoint, settled=settled)

    # ------------------------------------------------------------ executors, agents, clients

    async def executors(self) -> list[dict[str, Any]]:
        """Return the living executors of the players' sessions."""
        try:
            async with wire.connect(self.host.socket) as line:
                status = await line.ask("get_status")
                sessions = (await line.ask("list_sessions"))["sessions"]
        except (wire.LostError, wire.RefusedError):
            return []
        apart = {one["id"] for one in sessions if one["name"].startswith(APART)}
        found = [one for one in status.get("executors", ()) if one.get("session") and one.get("pid")]
        return [one for one in found if one["session"] not in apart and one["id"] not in self.killed]

    def kill_executor(self, executor: dict[str, Any]) -> None:
        """Kill one executor."""
        self.killed.add(executor["id"])
        self._count("executor", f"executor {executor['id']} ({executor['pid']})")
        with suppress(ProcessLookupError):
            os.kill(executor["pid"], signal.SIGKILL)

    async def busy(self) -> list[dict[str, Any]]:
        """Wait for executors that run a player's turn, and return them. After a while return any executors."""
        with anyio.move_on_after(ADOPTED):
            while True:
                turns = {row["executor"] for row in self.rows("turns") if row["state"] == "running"}
                if found := [one for one in await self.executors() if one["id"] in turns]:
                    return found
                await anyio.sleep(LOOK)
        return await self.executors()

    async def kill_busy_executor(self) -> None:
        """Kill an executor that runs a turn."""
        if found := await self.busy():
            self.kill_executor(self.rng.choice(found))

    async def kill_all_executors(self) -> None:
        for one in await self.executors():
            self.kill_executor(one)

    async def kill_some_executor(self) -> None:
        if found := await self.executors():
            self.kill_executor(self.rng.choice(found))

    async def kill_executor_of_an_absent_hutchd(self) -> None:
        """Kill hutchd, let an executor spool, then kill that executor too, so that only its spool remains."""
        found = await self.busy()
        self.mark.unlink(missing_ok=True)
        self._count("hutchd", f"hutchd {self.host.pid}")
        await self.host.kill()
        spooling: list[dict[str, Any]] = []
        with anyio.move_on_after(SPOOLED):
            while not (spooling := [one for one in found if self._holds_alone(one["id"])]):
                await anyio.sleep(LOOK)
        for one in spooling[:1]:
            self.kill_executor(one)
        await self.start()

    def _holds_alone(self, executor: str) -> bool:
        """Return whether an executor has synced events to its spool that the dead hutchd did not store."""
        (acked,) = (row["acked_n"] for row in self.rows("executors") if row["id"] == executor)
        lines: list[list[Any]] = read(self.host.root / "witness")  # type: ignore[assignment]
        return any(line[:2] == ["spooled", executor] and line[2] > acked for line in lines)

    async def going(self) -> None:
        """Return once the first turn of every player has ended, or after a while."""
        players = sum(role.startswith("player") for roles in self.parties.values() for role in roles)
        with anyio.move_on_after(ADOPTED):
            while len({row["session"] for row in self.rows("turns") if row["state"] in TERMINAL}) < players:
                await anyio.sleep(5 * LOOK)

    async def wait_asked(self) -> None:
        """Return once a permission request waits in the session apart from the players."""
        with anyio.fail_after(ADOPTED):
            while self.pending is None:
                await anyio.sleep(LOOK)

    async def hold_question(self) -> None:
        """From now on, leave the permission request of that session undecided until the end."""
        await self.wait_asked()
        self.apart.cancel()
        self.pending = None

    async def kill_asking_executor(self) -> None:
        """Kill that session's executor while its permission request waits."""
        await self.wait_asked()
        (asker,) = [one for one in self.rows("executors") if one["session"] == self._session_apart()]
        self.kill_executor(asker)

    def _session_apart(self) -> str:
        return next(str(row["id"]) for row in self.rows("sessions") if row["name"] == APART)

    async def start_old_hutchd(self) -> None:
        """Restore the record of an earlier hutchd. An executor that has served a later one must not serve this one."""
        record, copy = self.host.state / "hutch.db", self.host.root / "old.db"
        with closing(sqlite3.connect(record)) as now, closing(sqlite3.connect(copy)) as old:
            now.backup(old)
        await self.kill_hutchd()
        await self.kill_hutchd()
        await self.host.kill()
        copy.replace(record)
        for rest in ("-wal", "-shm"):
            record.with_name(record.name + rest).unlink(missing_ok=True)
        self.is_old = True
        await self.start(settled=False)
        await self.rest(1.5)

    async def kill_some_agent(self) -> None:
        """Kill a process that an executor started."""
        found = await self.executors()
        pids = {one["pid"] for one in found}
        table = await anyio.to_thread.run_sync(processes.table)
        if agents := [one for one in table.values() if one.parent in pids]:
            agent = self.rng.choice(agents)
            self._count("agent", f"agent {agent.pid} of {agent.parent}")
            self.disturbed |= {one["session"] for one in found if one["pid"] == agent.parent and one["agent"] == CLAUDE}
            processes.kill([agent])

    async def kill_some_party(self) -> None:
        """Kill a process of parties, and start it again."""
        name = self.rng.choice(sorted(self.running))
        process = self.running.pop(name)
        self._count("client", f"the {name} {process.pid}")
        process.kill()
        await process.wait()
        await process.aclose()
        await self.start_party(name)

    async def start_party(self, name: str) -> None:
        argv = [sys.executable, "-m", "tests.crash.harness.parties", str(self.host.socket), str(self.folder)]
        with (self.host.root / PARTIES_LOG).open("ab") as log:
            self.running[name] = await anyio.open_process(
                [*argv, f"{self.seed}", *self.parties[name]], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                env={**self.host.env, "PYTHONPATH": str(TOP)}, cwd=TOP,
            )  # fmt: skip

    # ------------------------------------------------------------ the session apart from the players

    async def ask_apart(self) -> None:
        """Until the next restart, keep a permission request waiting in a session whose executor is not killed."""
        with self.apart:
            try:
                await self._ask_apart()
            except wire.RefusedError as error:
                self._notice("forgotten", f"{APART}: {error}")

    async def _ask_apart(self) -> None:
        notes = Notebook(self.folder / f"{APART}.notes")
        stage = self.stage
        cwd = self.host.folder(APART)
        session = await stage.ask(
            "open_session", agent="script", cwd=str(cwd), name=APART, permission_mode="ask", idempotency_key=APART
        )
        number = 0
        while True:
            number += 1
            key = f"{APART}-{number}"
            turn = await stage.ask(
                "submit_prompt", session=session["id"], prompt=script_of(key).prompt, idempotency_key=key
            )
            notes.write(accepted=key, turn=turn["id"])
            while (await stage.ask("get_turn", turn=turn["id"]))["state"] not in TERMINAL:
                if self.pending is None:
                    waiting = (await stage.ask("list_permissions", session=session["id"]))["permissions"]
                    self.pending = waiting[0]["id"] if waiting else None
                await anyio.sleep(5 * LOOK)
            self.pending = None

    # ------------------------------------------------------------ the end

    async def end(self, deadline: float) -> Evidence:
        """Let every turn end, collect the evidence, and stop."""
        if self.is_old:
            for process in self.running.values():
                process.kill()
            processes.kill(await anyio.to_thread.run_sync(self._of_sessions))
        else:
            await self.settle(deadline)
        evidence = await self.evidence()
        await self.close_sessions()
        await self.host.stop()
        left = await _gone(lambda: processes.marked(self.host.mark))
        processes.kill(left)
        if others := [one for one in left if "hutch_broker" not in one.command]:  # the broker outlives hutchd
            self._notice("process_left", f"after hutchd has stopped: {others}")
        return evidence

    async def settle(self, deadline: float) -> None:
        """Let the parties finish within `deadline` seconds. A party that does not is `stuck`."""
        self.mark.unlink(missing_ok=True)
        self.apart.cancel()
        until = anyio.current_time() + deadline
        for name in set(self.parties) - {"watchers"}:
            await self._finish(name, until)
        with anyio.CancelScope(deadline=until):
            while any(row["state"] not in TERMINAL for row in self.rows("turns")):
                await self._allow_rest()
                await anyio.sleep(10 * LOOK)
            while any(row["state"] == "gone" and row["spool"] is not None for row in self.rows("executors")):
                await anyio.sleep(10 * LOOK)
        await self._finish("watchers", until)

    async def _finish(self, name: str, until: float) -> None:
        process = self.running.pop(name)
        with anyio.CancelScope(deadline=until):
            while process.returncode is None and not handles_sigterm(self.folder, process.pid).exists():
                await anyio.sleep(LOOK)
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        with anyio.CancelScope(deadline=max(until, anyio.current_time() + 1.0)) as waiting:
            await process.wait()
        if waiting.cancelled_caught:
            self._notice("stuck", f"the {name} did not finish in time")
            process.kill()
            await process.wait()
        elif process.returncode != 0:
            self._notice("bug", f"the {name} ended with {process.returncode}; see {PARTIES_LOG}")
        await process.aclose()

    async def _allow_rest(self) -> None:
        with suppress(wire.LostError):
            async with wire.connect(self.host.socket) as line:
                for question in (await line.ask("list_permissions"))["permissions"]:
                    await self._answer(line, question["id"])

    async def close_sessions(self) -> None:
        """Close all sessions. No process of theirs may be left."""
        async with wire.connect(self.host.socket) as line:
            async with anyio.create_task_group() as closing_all:
                for session in (await line.ask("list_sessions"))["sessions"]:
                    closing_all.start_soon(self._close, session["id"])
            status = await line.ask("get_status")
        spares = {one["pid"] for one in status.get("executors", ()) if not one.get("session")}
        if left := await _gone(lambda: [one for one in self._of_sessions() if one.pid not in spares]):
            self._notice("process_left", f"after the sessions were closed: {left}")
            processes.kill(left)

    async def _close(self, session: str) -> None:
        async with wire.connect(self.host.socket) as line:
            try:
                await line.ask("close_session", session=session, force=True)
            except wire.LostError as error:
                turns = [
                    row for row in self.rows("turns") if row["session"] == session and row["state"] not in TERMINAL
                ]
                served = [row for row in self.rows("executors") if row["session"] == session]
                self._notice("stuck", f"{session} is not closed: {error}; {turns}, {served}")

    def _of_sessions(self) -> list[processes.Process]:
        return [one for one in processes.marked(self.host.mark) if processes.marked_by(one.pid, "HUTCH_EXECUTOR_ID=")]

    async def evidence(self) -> Evidence:
        """Return the evidence. hutchd must be running."""
        histories: dict[str, list[dict[str, Any]]] = {}
        async with wire.connect(self.host.socket) as line:
            histories["*"] = await wire.history(line, "*")
            for row in self.rows("sessions"):
                histories[row["id"]] = await wire.history(line, row["id"])
        self.logs.scan(self.last_kill)
        self.noticed += self.logs.violations()
        return Evidence(
            notes={path.stem: read(path) for path in self.folder.glob("*.notes")},
            histories=histories,
            turns=self.rows("turns"),
            permissions=self.rows("permissions"),
            executors=self.rows("executors"),
            ran={row["id"]: _lines(Path(row["cwd"], "ran")) for row in self.rows("sessions")},
            witness=read(self.host.root / "witness"),  # type: ignore[arg-type]
            killed=self.killed,
            disturbed=self.disturbed,
            noticed=self.noticed,
        )

    def keep(self) -> Path:
        """Copy logs, kills, notebooks and the record to a folder that outlives the host; return the folder."""
        self.logs.scan(self.last_kill)
        kept = Path(os.environ.get(KEPT_IN) or tempfile.gettempdir(), f"hutch-crash-{self.seed}-{os.getpid()}")
        shutil.copytree(self.logs.folder, kept)
        (kept / "kills.txt").write_text("".join(f"{kill}\n" for kill in self.kills_in_order))
        for path in (
            *self.folder.glob("*.notes"),
            self.host.root / "witness",
            *(self.host.state / f"hutch.db{end}" for end in ("", "-wal", "-shm")),
        ):
            with suppress(FileNotFoundError):
                shutil.copy(path, kept)
        return kept

    def rows(self, table: str) -> list[dict[str, Any]]:
        """Return all rows of a table of the store."""
        with closing(sqlite3.connect(f"file:{self.host.state / 'hutch.db'}?mode=ro", uri=True)) as conn:
            conn.row_factory = sqlite3.Row
            return [dict(row) for row in conn.execute(f"SELECT * FROM {table}")]


def logs_of(on: Host) -> list[Path]:
    """Return the logs of all processes of a host: hutchd, broker, executors, parties."""
    return [
        on.log,
        on.state / "broker.log",
        *(on.state / "executors").glob("*.log"),
        on.root / PARTIES_LOG,
    ]


async def _gone(find: Callable[[], list[processes.Process]]) -> list[processes.Process]:
    """Wait a few seconds until `find`, which runs in a thread, returns nothing; return the rest."""
    for _ in range(25):
        left = await anyio.to_thread.run_sync(find)
        if not left:
            break
        await anyio.sleep(20 * LOOK)
    return left


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


@asynccontextmanager
async def rig(seed: int, *, fault: str | None = None, with_claude: bool = False) -> AsyncIterator[Rig]:
    """Yield a host with hutchd and the load."""
    async with AsyncExitStack() as stack:
        model = await stack.enter_async_context(serve(key=KEY, script=claude)) if with_claude else None
        settings = SETTINGS if model is None else settings_for(model, SETTINGS)
        made = await stack.enter_async_context(host(settings, start=False))
        made.extra_env["HUTCH_WITNESS"] = str(made.root / "witness")
        if fault is not None:
            made.program = planted.command(fault, "hutch_daemon")
        async with anyio.create_task_group() as tasks:
            parties = PARTIES | (CLAUDES if with_claude else {})
            logs = Logs(made.root / "logs", partial(logs_of, made))
            one = Rig(made, seed, Random(seed), parties, logs, anyio.current_time())
            await one.start()
            if with_claude:
                await made.hutch("key", "add", "anthropic", input=KEY)
            for name in one.parties:
                await one.start_party(name)
            tasks.start_soon(one.ask_apart)
            try:
                yield one
            finally:
                tasks.cancel_scope.cancel()
                with anyio.CancelScope(shield=True):
                    for process in one.running.values():
                        if process.returncode is None:
                            process.kill()
                        await process.aclose()
