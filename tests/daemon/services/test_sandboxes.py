"""Sessions and the sandbox of the moment: what an executor refuses, what a restart finds, what the settings exclude."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from hutch_daemon.environments.sandbox_probe import KindTrial, ProgramIdentity, SandboxProbe
from hutch_daemon.settings import SandboxSettings
from hutch_daemon.store import sessions
from hutch_shared import messages as m
from hutch_shared.errors import HutchError, Reason
from hutch_shared.events import TurnEnded
from tests.fakes.executors import FakeExecutor, never_end, say_done
from tests.fakes.stage import Stage, settings, until

PROGRAM = ProgramIdentity("/usr/bin/bwrap", (1,))
BOTH = SandboxProbe(KindTrial("bubblewrap", program=PROGRAM, version="bubblewrap 0.8.0"))
ONLY_LANDLOCK = SandboxProbe(KindTrial("bubblewrap", {"full": "it broke"}, PROGRAM), KindTrial("landlock", abi=7))
NEITHER = SandboxProbe(KindTrial("bubblewrap"), KindTrial("landlock", {"full": "the kernel has none"}))
LOST = replace(NEITHER, bubblewrap=ONLY_LANDLOCK.bubblewrap, is_lost=True)


async def notices(stage: Stage, session: m.Session) -> list[dict[str, Any]]:
    """Return the session's notices about its isolation."""
    found = [msgspec.json.decode(one.data) for one in await stage.events(session) if one.kind == "notice"]
    return [one for one in found if one["word"] == "isolation"]


async def test_a_refused_sandbox_is_tried_again_within_the_same_prompt(stage: Stage) -> None:
    """Something broke bubblewrap that no look shows: the prompt runs under Landlock, and the session says so."""
    stage.host.sandbox_of_all, stage.host.sandbox_after_doubt = BOTH, ONLY_LANDLOCK
    async with stage.hutchd():
        opened = await stage.open(agent="claude")
        await stage.ended(await stage.submit(opened))
        stage.executor.die()
        stage.host.refused_kinds = {"bubblewrap"}
        ended = await stage.ended(await stage.submit(opened))
        later = await stage.services.sessions.get_session(stage.me, m.SessionRef(opened.id))
        said = await notices(stage, opened)

    assert (ended.state, stage.host.doubted) == ("completed", ["bubblewrap"])
    assert (opened.isolation.sandbox, later.isolation.sandbox) == ("bubblewrap", "landlock")
    assert [one["details"] for one in said] == [{"sandbox": "landlock", "level": "reduced", "keys": "exposed"}]
    assert [None if one.prepared is None else one.exited.is_set() for one in stage.host.started] == [True, True, False]


async def test_a_change_is_reported_once_even_if_the_first_preparation_fails(stage: Stage) -> None:
    """The record has the new isolation before the agent starts, so the notice comes with it."""
    stage.host.sandbox_of_all = BOTH
    async with stage.hutchd():
        session = await stage.open(agent="claude")
        await stage.ended(await stage.submit(session))
        stage.executor.die()
        stage.host.sandbox_of_all, stage.host.refused_kinds = ONLY_LANDLOCK, {"landlock"}
        failed = await stage.ended(await stage.submit(session))
        stage.host.refused_kinds = set()
        ended = await stage.ended(await stage.submit(session))
        said = await notices(stage, session)

    assert (failed.reason, ended.state) == ("isolation_unavailable", "completed")
    assert [one["details"] for one in said] == [{"sandbox": "landlock", "level": "reduced", "keys": "exposed"}]


async def test_an_executor_whose_sandbox_failed_in_a_turn_is_replaced(stage: Stage) -> None:
    """The agent was started again, and its sandbox could not be made: the next prompt gets what holds then."""
    stage.host.sandbox_of_all = BOTH

    async def fail(executor: FakeExecutor, prompt: m.ExecutePrompt) -> TurnEnded:
        return TurnEnded("failed", "isolation_unavailable", "The sandbox is gone.")

    async with stage.hutchd():
        session = await stage.open(agent="claude")
        stage.host.play = fail
        failed = await stage.ended(await stage.submit(session))
        first, stage.host.play, stage.host.sandbox_of_all = stage.executor, say_done, ONLY_LANDLOCK
        ended = await stage.ended(await stage.submit(session))
        kept = await stage.ended(await stage.submit(session))
        later = await stage.services.sessions.get_session(stage.me, m.SessionRef(session.id))

    assert (failed.state, ended.state, kept.state) == ("failed", "completed", "completed")
    assert (later.isolation.sandbox, first.exited.is_set(), len(stage.host.started)) == ("landlock", True, 2)


async def test_it_is_tried_again_once(stage: Stage) -> None:
    """Then the prompt fails with the reason; it is no loop, even if each trial finds something else."""
    stage.host.sandbox_of_all, stage.host.sandbox_after_doubt = BOTH, ONLY_LANDLOCK
    async with stage.hutchd():
        session = await stage.open(agent="claude")
        await stage.ended(await stage.submit(session))
        stage.executor.die()
        stage.host.refused_kinds = {"bubblewrap", "landlock"}
        ended = await stage.ended(await stage.submit(session))

    assert (ended.state, ended.reason) == ("failed", "isolation_unavailable")
    assert "landlock does not hold" in (ended.message or "")
    assert len(stage.host.started) == 3


async def test_a_session_that_gets_a_sandbox_later_says_so(stage: Stage) -> None:
    """It had none: that bubblewrap was installed meanwhile is a change of its isolation like any other."""
    stage.host.sandbox_of_all = NEITHER
    async with stage.hutchd():
        session = await stage.open(agent="claude")
        await stage.ended(await stage.submit(session))
        stage.executor.die()
        stage.host.sandbox_of_all = BOTH
        await stage.ended(await stage.submit(session))
        said = await notices(stage, session)

    assert [one["details"]["sandbox"] for one in said] == ["bubblewrap"]


async def test_a_sandbox_that_holds_in_its_trial_is_not_exchanged(stage: Stage) -> None:
    """What one session's folder does to its sandbox is no reason to give it a weaker one."""
    stage.host.sandbox_of_all = BOTH
    async with stage.hutchd():
        session = await stage.open(agent="claude")
        await stage.ended(await stage.submit(session))
        stage.executor.die()
        stage.host.refused_kinds = {"bubblewrap"}
        ended = await stage.ended(await stage.submit(session))
        later = await stage.services.sessions.get_session(stage.me, m.SessionRef(session.id))

    assert (ended.state, ended.reason) == ("failed", "isolation_unavailable")
    assert "bubblewrap does not hold" in (ended.message or "")
    assert (stage.host.doubted, len(stage.host.started)) == (["bubblewrap"], 2)
    assert later.isolation.sandbox == "bubblewrap"


@pytest.mark.parametrize("found", [ONLY_LANDLOCK, NEITHER, LOST], ids=["landlock", "neither", "lost"])
@pytest.mark.parametrize(
    ("sandbox", "gets"),
    [
        (SandboxSettings(), ("landlock", None, "refused")),
        (SandboxSettings(mode="require"), ("refused", "refused", "refused")),
        (SandboxSettings(mode="require", kind="bubblewrap"), ("refused", "refused", "refused")),
        (SandboxSettings(mode="require", kind="any"), ("landlock", "refused", "refused")),
        (SandboxSettings(mode="require", kind="landlock"), ("landlock", "refused", "refused")),
        (SandboxSettings(kind="bubblewrap"), (None, None, "refused")),
        (SandboxSettings(network="broker-only"), ("landlock", "refused", "refused")),
        (SandboxSettings(mode="off"), (None, None, None)),
    ],
    ids=["auto", "require", "require bubblewrap", "any", "require landlock", "bubblewrap", "broker-only", "off"],
)
async def test_without_bubblewrap_no_session_gets_less_than_the_settings_allow(
    stage: Stage, found: SandboxProbe, sandbox: SandboxSettings, gets: tuple[str | None, ...]
) -> None:
    """A sandbox that was lost without a visible reason is not exchanged for none."""
    stage.settings = settings(sandbox=sandbox)
    stage.host.sandbox_of_all = found
    async with stage.hutchd():
        try:
            got: str | None = (await stage.open(agent="claude")).isolation.sandbox
        except HutchError as error:
            got = {Reason.ISOLATION_UNAVAILABLE: "refused"}[error.reason]

    assert got == gets[[ONLY_LANDLOCK, NEITHER, LOST].index(found)]


async def test_a_setting_that_requires_bubblewrap_ends_an_executor_under_landlock(stage: Stage) -> None:
    """At its next prompt: `mode = "require"` was set while it lived."""
    stage.host.sandbox_of_all = ONLY_LANDLOCK
    async with stage.hutchd():
        session = await stage.open(agent="claude")
        await stage.ended(await stage.submit(session))
        first = stage.executor
        stage.settings = settings(sandbox=SandboxSettings(mode="require", kind="any"))
        kept = await stage.ended(await stage.submit(session))
        stage.settings = settings(sandbox=SandboxSettings(mode="require"))
        refused = await stage.ended(await stage.submit(session))
        assert kept.state == "completed"
        assert (refused.state, refused.reason) == ("failed", "isolation_unavailable")
        assert first.exited.is_set()


async def test_a_spare_of_an_earlier_version_gets_no_sandbox(stage: Stage) -> None:
    """It would run the empty program of Landlock, and has no filter of system calls. Another executor is started."""
    without = stage.settings
    with_spares = msgspec.structs.replace(without.executors, spares=1, spare_agents=("claude",))
    stage.settings = msgspec.structs.replace(without, executors=with_spares)
    abilities, stage.host.abilities = stage.host.abilities, ("compact", "clear", "offered", "agent_dir", "recap")
    stage.host.sandbox_of_all = ONLY_LANDLOCK

    def spares() -> list[FakeExecutor]:
        return [one for one in stage.host.started if one.prepared is None and one.connection is not None]

    async with stage.hutchd():
        await stage.ended(await stage.submit(await stage.open(agent="claude")))
        await until(lambda: len(spares()) == 1)
        (old,) = spares()
    stage.host.abilities = abilities

    async with stage.hutchd():
        await old.dial()
        session = await stage.open(agent="claude", name="next")
        ended = await stage.ended(await stage.submit(session))

        assert (ended.state, old.prepared) == ("completed", None)
        assert stage.executor.prepared is not None
        assert stage.executor.prepared.sandbox == m.SandboxSpec("", kind="landlock")
        await until(old.exited.is_set)


@pytest.mark.parametrize(
    ("record", "scope"),
    [
        (m.Isolation("strict", "an earlier version"), "nothing of it is left"),
        (m.Isolation("reduced", "an earlier version"), "no process that descends from it is left"),
        (m.Isolation("reduced", "now", sandbox="bubblewrap"), "nothing of it is left"),
        (m.Isolation("account", "now", sandbox="landlock"), "no process that descends from it is left"),
    ],
    ids=["strict of before", "reduced of before", "bubblewrap", "landlock"],
)
async def test_what_an_end_verifies_of_an_adopted_executor(stage: Stage, record: m.Isolation, scope: str) -> None:
    """Only a process namespace holds everything that an agent started, and Landlock has none."""
    stage.host.play = never_end
    async with stage.hutchd():
        session = await stage.open(agent="claude")
        executor = await stage.running(await stage.submit(session))
        await stage.store.write(lambda tx: sessions.update(tx, session.id, isolation=record))

    async with stage.hutchd():
        await executor.dial()
        await stage.services.sessions.close_session(stage.me, m.CloseSession(session.id, force=True))

        async def killed() -> bool:
            now = await stage.services.sessions.get_session(stage.me, m.SessionRef(session.id))
            return now.killed is not None

        await until(killed)
        now = await stage.services.sessions.get_session(stage.me, m.SessionRef(session.id))

    assert now.killed is not None
    assert now.killed.message == scope


@pytest.mark.parametrize(("found", "scope"), [(BOTH, "nothing of it"), (ONLY_LANDLOCK, "no process that descends")])
async def test_only_bubblewraps_end_verifies_everything(stage: Stage, found: SandboxProbe, scope: str) -> None:
    """The words of a stop claim no more than the sandbox holds."""
    stage.host.sandbox_of_all = found
    async with stage.hutchd():
        session = await stage.open(agent="claude")
        await stage.ended(await stage.submit(session))
        await stage.services.sessions.close_session(stage.me, m.CloseSession(session.id, force=True))
        now = await stage.services.sessions.get_session(stage.me, m.SessionRef(session.id))

    assert now.killed is not None
    assert now.killed.message.startswith(scope)
