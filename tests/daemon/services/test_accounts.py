"""Sessions under accounts: permitted accounts, limits, isolation, and turns that end at a limit."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager
from pathlib import Path

import anyio
import msgspec
import pytest

from hutch_daemon.services.access import Caller
from hutch_daemon.settings import AccountSettings, ExecutorSettings, IsolationSettings, LimitSettings
from hutch_shared import messages as m
from hutch_shared.errors import HutchError, Reason
from tests.fakes.executors import never_end
from tests.fakes.stage import Stage, new_stage, settings, until

ALICE = Caller(1001, 1001, 1, "alice's client")
BOB = Caller(1002, 1002, 1, "bob's client")
ADMIN = Caller(1003, 1003, 1, "an admin's client", admin=True)


@pytest.fixture
async def system(tmp_path: Path) -> AsyncIterator[Stage]:
    """Yield a hutchd in system mode whose environment gives each account the required isolation."""
    async with new_stage(tmp_path) as made:
        made.mode, made.host.apart = "system", True
        made.admins.add(ADMIN.uid)
        async with made.hutchd():
            yield made


@pytest.fixture
async def stage(stage: Stage) -> AsyncIterator[Stage]:
    """Yield a hutchd in user mode."""
    async with stage.hutchd():
        yield stage


async def open_as(stage: Stage, caller: Caller, **changes: object) -> m.Session:
    """Open a session of the script agent."""
    fields = {"agent": "script", "cwd": "/project", **changes}
    return await stage.services.sessions.open_session(caller, msgspec.convert(fields, m.OpenSession))


def refused(reason: Reason, match: str) -> AbstractContextManager[pytest.ExceptionInfo[HutchError]]:
    """Check that the block raises this refusal."""
    return pytest.raises(HutchError, match=match, check=lambda error: error.reason is reason)


async def test_in_user_mode_only_ones_own_account_is_accepted(stage: Stage) -> None:
    """Naming one's own account changes nothing; another is refused."""
    me = stage.account_of(stage.me.uid).name
    assert (await stage.open(account=me)).account == me
    with refused(Reason.NOT_ALLOWED, "alone"):
        await stage.open(account="somebody")


async def test_each_users_sessions_run_as_that_user(system: Stage) -> None:
    """By default the account of an executor is that of the user who opened the session."""
    for caller in (ALICE, BOB):
        session = await open_as(system, caller)
        assert (session.owner, session.account) == (caller.uid, f"user{caller.uid}")
    await until(lambda: {one.spec.account.uid for one in system.host.started} == {ALICE.uid, BOB.uid})


async def test_map_run_as_and_administrators_choose_other_accounts(system: Stage) -> None:
    """`map` names one's account, `run_as` permits another one, and an administrator may name any."""
    system.settings = settings(
        accounts=AccountSettings(map={"user1001": "service"}, run_as={"user1002": ("service",)}),
        executors=system.settings.executors,
    )
    assert (await open_as(system, ALICE)).account == "service"
    assert (await open_as(system, BOB)).account == "user1002"
    shared = await open_as(system, BOB, account="service")
    assert (shared.owner, shared.account) == (BOB.uid, "service")
    assert (await open_as(system, ADMIN, account="user1002")).account == "user1002"
    with refused(Reason.NOT_ALLOWED, "may not run agents as"):
        await open_as(system, ALICE, account="user1002")
    started = {(one.spec.account.name, one.spec.account.uid) for one in system.host.started}
    await until(lambda: len(system.host.started) >= 4)
    assert started <= {("service", 4000), ("user1002", 1002)}


async def test_a_withdrawn_permission_applies_to_open_sessions(system: Stage) -> None:
    """The current settings decide about the next prompt and a fork; the session can still be read and closed."""
    executors = system.settings.executors
    system.settings = settings(accounts=AccountSettings(run_as={"user1002": ("service",)}), executors=executors)
    shared = await open_as(system, BOB, account="service")
    turn = await system.services.turns.submit_prompt(BOB, m.SubmitPrompt(shared.id, "go"))
    assert (await finished(system, BOB, turn)).state == "completed"
    system.settings = settings(executors=executors)
    turn = await system.services.turns.submit_prompt(BOB, m.SubmitPrompt(shared.id, "go"))
    ended = await finished(system, BOB, turn)
    assert (ended.state, ended.reason) == ("failed", "not_allowed")
    with refused(Reason.NOT_ALLOWED, "any more"):
        await system.services.forks.fork_session(BOB, m.ForkSession(shared.id))
    assert (await system.services.sessions.close_session(BOB, m.CloseSession(shared.id))).state == "closed"


async def test_no_session_runs_as_hutchds_account(system: Stage) -> None:
    """Not even an administrator's session does."""
    with refused(Reason.NOT_ALLOWED, "hutchd itself|never run as root|root"):
        await open_as(system, ADMIN, account=system.account_of(os.geteuid()).name)


async def test_an_account_that_the_environment_refuses_gets_no_session(system: Stage) -> None:
    """Opening the session fails and stores nothing."""
    system.host.refused_accounts.add("user1001")
    with refused(Reason.ISOLATION_UNAVAILABLE, "may not"):
        await open_as(system, ALICE)
    assert not (await system.services.sessions.list_sessions(ADMIN, m.ListSessions(all_owners=True))).sessions


@pytest.mark.parametrize("asked", ["account", "strict"])
async def test_less_than_the_required_isolation_is_refused(stage: Stage, asked: m.IsolationLevel) -> None:
    """Here the environment offers no separate account."""
    with refused(Reason.ISOLATION_UNAVAILABLE, f"must have the isolation {asked}"):
        await stage.open(isolation=asked)
    stage.settings = settings(isolation=IsolationSettings(require=asked))
    with refused(Reason.ISOLATION_UNAVAILABLE, f"must have the isolation {asked}"):
        await stage.open(isolation="reduced")
    assert not stage.host.started


async def test_system_mode_requires_a_separate_account(system: Stage) -> None:
    """This is the default. A session does not start with less if the host lost that later."""
    session = await open_as(system, ALICE)
    assert (session.isolation.level, session.isolation.asked) == ("account", "account")
    system.host.apart = False
    with refused(Reason.ISOLATION_UNAVAILABLE, "could have only reduced"):
        await open_as(system, BOB)
    turn = await system.services.turns.submit_prompt(ALICE, m.SubmitPrompt(session.id, "go"))
    await until(lambda: bool(system.host.started))
    await finished(system, ALICE, turn)
    system.host.started[-1].die()
    again = await finished(
        system, ALICE, await system.services.turns.submit_prompt(ALICE, m.SubmitPrompt(session.id, "go"))
    )
    assert (again.state, again.reason) == ("failed", "isolation_unavailable")


async def test_an_accounts_open_sessions_are_limited(system: Stage) -> None:
    """The session beyond the limit is refused and not stored. A closed one makes room. Accounts count separately."""
    system.settings = settings(limits=LimitSettings(sessions=2), executors=system.settings.executors)
    first, _ = await open_as(system, ALICE), await open_as(system, ALICE)
    with refused(Reason.OVERLOADED, "2 open sessions"):
        await open_as(system, ALICE)
    await open_as(system, BOB)
    assert len((await system.services.sessions.list_sessions(ALICE, m.ListSessions())).sessions) == 2
    await system.services.sessions.close_session(ALICE, m.CloseSession(first.id, force=True))
    await open_as(system, ALICE)


async def test_an_accounts_executors_are_limited_separately(system: Stage) -> None:
    """Alice's third session waits for one of hers; Bob's does not."""
    system.settings = settings(
        limits=LimitSettings(executors=2), executors=ExecutorSettings(spares=0, maximum=10, hello_timeout=30.0)
    )
    system.host.play = never_end
    for _ in range(2 + 4 * (os.cpu_count() or 1)):  # more than can start concurrently
        session = await open_as(system, ALICE)
        await system.services.turns.submit_prompt(ALICE, m.SubmitPrompt(session.id, "go"))
    await until(lambda: len(system.host.started) == 2)
    theirs = await open_as(system, BOB)
    await system.services.turns.submit_prompt(BOB, m.SubmitPrompt(theirs.id, "go"))
    await until(lambda: len(system.host.started) == 3)
    await anyio.sleep(0.05)
    uids = [one.spec.account.uid for one in system.host.started]
    assert (uids.count(ALICE.uid), uids.count(BOB.uid)) == (2, 1)


async def test_a_failing_account_does_not_delay_others(system: Stage) -> None:
    """The number of its concurrent starts does not matter."""
    system.host.hanging_accounts.add("user1001")
    for _ in range(4 * (os.cpu_count() or 1)):
        await open_as(system, ALICE)
    theirs = await open_as(system, BOB)
    ended = await finished(system, BOB, await system.services.turns.submit_prompt(BOB, m.SubmitPrompt(theirs.id, "go")))
    assert ended.state == "completed"
    system.host.hanging_accounts.clear()


async def test_an_account_removed_from_the_list_runs_nothing_more(system: Stage) -> None:
    """Its next prompt fails with the reason, and its idle executor is ended."""
    session = await open_as(system, ALICE)
    turn = await system.services.turns.submit_prompt(ALICE, m.SubmitPrompt(session.id, "go"))
    assert (await finished(system, ALICE, turn)).state == "completed"
    system.host.refused_accounts.add("user1001")
    turn = await system.services.turns.submit_prompt(ALICE, m.SubmitPrompt(session.id, "go"))
    ended = await finished(system, ALICE, turn)
    assert (ended.state, ended.reason) == ("failed", "isolation_unavailable")
    await until(system.host.started[0].exited.is_set)


async def test_a_stricter_level_applies_to_running_executors(system: Stage) -> None:
    """The next prompt does not run in an executor with less isolation than the settings now require."""
    session = await open_as(system, ALICE)
    turn = await system.services.turns.submit_prompt(ALICE, m.SubmitPrompt(session.id, "go"))
    assert (await finished(system, ALICE, turn)).state == "completed"
    system.settings = settings(isolation=IsolationSettings(require="strict"), executors=system.settings.executors)
    turn = await system.services.turns.submit_prompt(ALICE, m.SubmitPrompt(session.id, "go"))
    ended = await finished(system, ALICE, turn)
    assert (ended.state, ended.reason) == ("failed", "isolation_unavailable")
    assert len(system.host.played) == 1


async def test_executors_of_a_deleted_account_are_ended(tmp_path: Path) -> None:
    """A restarted hutchd ends them although the account no longer exists."""
    async with new_stage(tmp_path) as made:
        made.mode, made.host.apart = "system", True
        async with made.hutchd():
            await open_as(made, ALICE)
            await until(lambda: bool(made.host.started) and made.host.started[0].prepared is not None)
        made.gone_accounts.add(ALICE.uid)
        async with made.hutchd():
            await until(made.host.started[0].exited.is_set)


async def test_limits_reach_the_start_of_an_executor(system: Stage) -> None:
    """The limits come from the settings, or from the defaults of system mode."""
    await open_as(system, ALICE)
    await until(lambda: bool(system.host.started) and system.host.started[0].prepared is not None)
    system.settings = settings(
        limits=LimitSettings(memory=1 << 30, pids=100, cpu_weight=50, open_files=512),
        executors=system.settings.executors,
    )
    session = await open_as(system, BOB)
    await until(lambda: len(system.host.started) == 2)
    first, second = (one.spec for one in system.host.started)
    assert first.pids == 4096
    assert first.memory_limit is not None
    assert first.memory_limit > 1 << 28
    assert (second.memory_limit, second.pids, second.cpu_weight, second.open_files) == (1 << 30, 100, 50, 512)
    assert "1,024 MiB of memory" in session.isolation.limits
    assert "100 processes" in session.isolation.limits


async def test_a_turn_that_exceeded_a_limit_says_so(system: Stage) -> None:
    """The kernel killed its executor; the turn has that reason, and the next turn runs."""
    system.host.play = never_end
    session = await open_as(system, ALICE)
    turn = await system.services.turns.submit_prompt(ALICE, m.SubmitPrompt(session.id, "go"))
    await until(lambda: bool(system.host.started) and system.host.started[0].turn is not None)
    system.host.over = "The session exceeded its memory limit of 64 MiB: 1 process was ended."
    system.host.started[0].die()
    ended = await finished(system, ALICE, turn)
    assert (ended.state, ended.reason) == ("failed", "over_limit")
    assert ended.message is not None
    assert "64 MiB" in ended.message


async def test_a_dedicated_account_is_swept_after_its_last_executor(system: Stage) -> None:
    """It is not swept while another of its executors lives."""
    one, two = await open_as(system, ALICE), await open_as(system, ALICE)
    await until(lambda: len(system.host.started) == 2)
    await until(lambda: all(one.prepared is not None for one in system.host.started))
    await system.services.sessions.close_session(ALICE, m.CloseSession(one.id, force=True))
    assert system.host.swept == []
    await system.services.sessions.close_session(ALICE, m.CloseSession(two.id, force=True))
    await until(lambda: system.host.swept == ["user1001"])


async def finished(stage: Stage, caller: Caller, turn: m.Turn) -> m.Turn:
    """Wait for a turn's end."""

    async def over() -> bool:
        return (await stage.services.turns.get_turn(caller, m.TurnRef(turn.id))).ended_at is not None

    await until(over)
    return await stage.services.turns.get_turn(caller, m.TurnRef(turn.id))
