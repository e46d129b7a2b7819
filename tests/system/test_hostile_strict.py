"""`strict` is required and bubblewrap is missing: sessions are refused with the reason, and no agent runs."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from hutch_client.client import HutchClient
from hutch_shared import messages as m
from hutch_shared.errors import HutchError, Reason
from hutch_shared.events import TurnEnded
from tests.accounts import Account, processes_of
from tests.programs import bubblewrap, landlock_holds, link_programs
from tests.rehearsal import Model, Say, Step, Steps, Use, anything, serve
from tests.sampling import sample
from tests.system.host import KEY, settings_for
from tests.system.hostile import bash, claude, open_script, whole
from tests.system.log import DEADLINE, log_of
from tests.system.shared_host import SharedHost, shared_host

pytestmark = [pytest.mark.system, pytest.mark.timeout(180), sample(5)]

AGENTS = ("script", "claude")
MARK = "touch ran; sh -c 'readlink /proc/self/ns/pid' > where"
"""The command that leaves a trace, which also shows whether it ran in a sandbox."""


class Stage:
    """A host whose bubblewrap a test can remove."""

    def __init__(self, host: SharedHost, model: Model) -> None:
        self.host = host
        self.model = model
        self.alice: Account = host.people["alice"]
        self.programs = host.root / "programs"

    def give(self) -> None:
        """Install bubblewrap where hutchd finds it first."""
        shutil.copy2(bubblewrap(), self.programs / "bwrap")

    def take_away(self) -> None:
        """Remove it."""
        (self.programs / "bwrap").unlink(missing_ok=True)

    async def open(self, hutch: HutchClient, agent: str, folder: str, level: m.IsolationLevel | None) -> m.Session:
        """Open a session of an agent whose turns run `MARK`."""
        use = Use("Bash", {"command": MARK})
        self.model.script = Steps(Step("first", use, None), Step("again", use, None), Step(anything, Say("done"), None))
        if agent == "claude":
            return await claude(self.host, hutch, self.alice, folder, isolation=level)
        return await open_script(self.host, hutch, self.alice, [bash(MARK)], folder, isolation=level)

    async def play(self, hutch: HutchClient, session: m.Session, prompt: str) -> TurnEnded:
        """Run a turn, after removing the traces of earlier ones."""
        for name in ("ran", "where"):
            Path(session.cwd, name).unlink(missing_ok=True)
        async with log_of(hutch, session) as log:
            return await log.play(session, prompt)

    async def let_go(self, hutch: HutchClient, session: m.Session) -> None:
        """End the session's executor, so that the next prompt needs another one."""
        for pid in [one.pid for one in (await hutch.get_status()).executors if one.session == session.id]:
            self.alice.run("kill", "-KILL", str(pid))
        with anyio.fail_after(DEADLINE):
            while any(one.session == session.id for one in (await hutch.get_status()).executors):
                await anyio.sleep(0.05)


@asynccontextmanager
async def staged(require: str = "") -> AsyncIterator[Stage]:
    """Create a stage whose hutchd and children search for programs in a folder of the host only."""
    bubblewrap()
    async with serve(key=KEY, script=lambda _: Say("hello")) as model:
        settings = settings_for(model, f"[executors]\nspares = 0\n{require}")
        async with shared_host("alice", settings=settings, start=False) as host:
            programs = host.root / "programs"
            programs.mkdir(mode=0o755)
            link_programs(programs)
            host.hutchd_env["PATH"] = str(programs)
            made = Stage(host, model)
            made.give()
            await host.start_launcher()
            await host.start()
            await host.hutch(made.alice, "key", "add", "anthropic", input=KEY)
            yield made


@pytest.fixture(scope="module")
async def stage() -> AsyncIterator[Stage]:
    """The shared stage; each test installs and removes bubblewrap."""
    async with staged() as made:
        yield made


def ran(session: m.Session) -> bool:
    """Return whether the command ran."""
    return Path(session.cwd, "ran").exists()


def is_refusal(end: TurnEnded) -> bool:
    """Return whether a turn was refused with the reason that there is no sandbox."""
    return (end.state, end.reason) == ("failed", "isolation_unavailable") and "strict" in end.message


@pytest.mark.parametrize("agent", AGENTS)
async def test_a_strict_session_runs_in_a_sandbox(stage: Stage, agent: str) -> None:
    """With bubblewrap, the command runs in its own pid namespace."""
    stage.give()
    async with stage.host.client(stage.alice) as hutch:
        session = await stage.open(hutch, agent, f"there-{agent}", "strict")
        end = await stage.play(hutch, session, "first")
        await hutch.close_session(session.id, force=True)

    assert (session.isolation.level, session.isolation.asked) == ("strict", "strict")
    assert end.state == "completed", end
    assert Path(session.cwd, "where").read_text().strip() != str(Path("/proc/self/ns/pid").readlink())


@pytest.mark.parametrize("agent", AGENTS)
async def test_a_session_is_refused_before_anything_starts(stage: Stage, agent: str) -> None:
    """There is no session, no process of the account and no model request; the reason names the missing part."""
    stage.take_away()
    before = len(stage.model.requests)
    async with stage.host.client(stage.alice) as hutch:
        idle = set(processes_of(stage.alice.uid))
        with pytest.raises(HutchError) as refused:
            await stage.open(hutch, agent, f"refused-{agent}", "strict")
        started = set(processes_of(stage.alice.uid)) - idle
        sessions = [one for one in await hutch.list_sessions() if one.cwd.endswith(f"refused-{agent}")]
        weaker = await stage.open(hutch, agent, f"weaker-{agent}", None)
        await hutch.close_session(weaker.id, force=True)
    said = await stage.host.hutch(
        stage.alice,
        "run",
        "--agent",
        "script",
        "--isolation",
        "strict",
        "--mode",
        "bypass",
        '{"text": "no"}',
        code=None,
    )
    await whole(stage.host)

    assert refused.value.reason is Reason.ISOLATION_UNAVAILABLE
    assert "strict" in refused.value.message
    assert "account" in refused.value.message
    assert "sandbox" in refused.value.message
    assert (started, sessions, len(stage.model.requests)) == (set(), [], before)
    assert weaker.isolation.level == "account"
    assert said.code != 0
    assert "strict" in said.err


async def test_without_bubblewrap_another_account_has_landlock(stage: Stage) -> None:
    """Its level is `account`, never `strict`; with bubblewrap back, the next start of its agent is `strict`."""
    if not landlock_holds():
        pytest.skip("kernel: it has no Landlock")
    stage.take_away()
    async with stage.host.client(stage.alice) as hutch:
        session = await stage.open(hutch, "claude", "locked", None)
        end = await stage.play(hutch, session, "first")
        locked, ran_then = await hutch.get_session(session.id), ran(session)
        stage.give()
        await stage.let_go(hutch, session)
        again = await stage.play(hutch, session, "again")
        later = await hutch.get_session(session.id)
        await hutch.close_session(session.id, force=True)

    assert (end.state, again.state, ran_then) == ("completed", "completed", True), (end, again)
    assert (locked.isolation.sandbox, locked.isolation.level, locked.keys) == ("landlock", "account", "brokered")
    assert "bubblewrap would add" in locked.isolation.missing
    assert (later.isolation.sandbox, later.isolation.level) == ("bubblewrap", "strict")


@pytest.mark.parametrize("agent", AGENTS)
async def test_a_strict_session_gets_no_other_executor(stage: Stage, agent: str) -> None:
    """After bubblewrap is removed, the next prompt is refused and nothing runs. With bubblewrap back, it runs."""
    stage.give()
    async with stage.host.client(stage.alice) as hutch:
        session = await stage.open(hutch, agent, f"next-{agent}", "strict")
        first = await stage.play(hutch, session, "first")
        await stage.let_go(hutch, session)
        stage.take_away()
        asked = len(stage.model.turns)
        refused = await stage.play(hutch, session, "again")
        ran_then, asked = ran(session), len(stage.model.turns) - asked
        stage.give()
        again = await stage.play(hutch, session, "again")
        ran_after = ran(session)
        await hutch.close_session(session.id, force=True)

    assert first.state == "completed", first
    assert is_refusal(refused), refused
    assert (ran_then, asked) == (False, 0)
    assert (again.state, ran_after) == ("completed", True), again


async def test_a_live_executor_runs_nothing_without_a_sandbox(stage: Stage) -> None:
    """Each command has its own sandbox; if the sandbox cannot be created, the command does not run."""
    stage.give()
    async with stage.host.client(stage.alice) as hutch:
        session = await stage.open(hutch, "script", "live", "strict")
        first = await stage.play(hutch, session, "first")
        stage.take_away()
        refused = await stage.play(hutch, session, "again")
        ran_then = ran(session)
        stage.give()
        again = await stage.play(hutch, session, "again")
        ran_after = ran(session)
        await hutch.close_session(session.id, force=True)

    assert first.state == "completed", first
    assert (refused.state, refused.reason, ran_then) == ("failed", "isolation_unavailable", False), refused
    assert (again.state, ran_after) == ("completed", True), again


async def test_a_bubblewrap_that_isolates_nothing_is_rejected(stage: Stage) -> None:
    """The probe detects a program that only runs its command."""
    stage.give()
    async with stage.host.client(stage.alice) as hutch:
        session = await stage.open(hutch, "script", "false", "strict")
        await stage.let_go(hutch, session)
        stage.take_away()
        (stage.programs / "bwrap").write_text("#!/bin/sh\nexit 1\n")
        (stage.programs / "bwrap").chmod(0o755)
        refused = await stage.play(hutch, session, "first")
        ran_then = ran(session)
        stage.take_away()
        await hutch.close_session(session.id, force=True)

    assert (refused.state, refused.reason, ran_then) == ("failed", "isolation_unavailable", False), refused


async def test_a_required_level_survives_a_restart() -> None:
    """Without bubblewrap, old strict sessions of both agents take no prompt, and no new one is opened."""
    async with staged('[isolation]\nrequire = "strict"\n') as stage:
        host = stage.host
        async with host.client(stage.alice) as hutch:
            sessions = [await stage.open(hutch, agent, f"restart-{agent}", None) for agent in AGENTS]
            first = [await stage.play(hutch, session, "first") for session in sessions]
            for session in sessions:
                await stage.let_go(hutch, session)
        stage.take_away()
        await host.end(host.daemon)
        await host.start()
        asked = len(stage.model.turns)
        async with host.client(stage.alice) as hutch:
            refused = [await stage.play(hutch, session, "again") for session in sessions]
            for agent in AGENTS:
                with pytest.raises(HutchError, match="bubblewrap"):
                    await stage.open(hutch, agent, f"new-{agent}", None)
        shown = await host.hutch(stage.alice, "status")

        assert [end.state for end in first] == ["completed", "completed"]
        assert [is_refusal(end) for end in refused] == [True, True], refused
        assert all("bubblewrap (bwrap) is not installed" in end.message for end in refused)
        assert [ran(session) for session in sessions] == [False, False]
        assert len(stage.model.turns) == asked
        assert "bubblewrap" in shown.out
