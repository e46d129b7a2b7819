"""What executors are made of: after any change a session gets only an executor that matches it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import anyio
import msgspec
import pytest

from hutch_daemon.environments.port import Account
from hutch_daemon.pool.made_of import ExecutorFiles, MadeOf, read_made_of
from hutch_daemon.services.access import Caller
from hutch_daemon.settings import ExecutorSettings, LimitSettings
from hutch_daemon.store import executors
from hutch_shared import messages as m
from hutch_shared.errors import HutchError
from tests import sampling
from tests.fakes.stage import WAIT, Stage, new_stage, settings, until

CHANGES = 60
"""The number of random changes in CI; `full` makes 1,000."""
USERS = tuple(Caller(uid, uid, 1, f"user{uid}'s client") for uid in (1001, 1002, 1003))
MADE = MadeOf(Account(1, 2, "ann", "/home/ann"), (2, 3), m.ResourceLimits(1 << 30, 100, 50, 1024), "s", "f")


def spares(**changes: Any) -> ExecutorSettings:
    """Return pool settings with spares of the script agent."""
    return ExecutorSettings(spare_agents=("script",), hello_timeout=WAIT, lost_timeout=WAIT, **changes)


def made_with(stage: Stage, account: Account) -> tuple[object, ...]:
    """Return what an executor of an account has to be made of now."""
    limits = stage.in_force.limits
    return replace(account, groups=()), account.groups, limits.memory, limits.pids, limits.open_files, stage.files


async def change_and_open(stage: Stage, dice: Random) -> None:
    """Change something at random, open a session of a random user, and check its executor and the spares."""
    user, limits = dice.choice(USERS), stage.settings.limits
    match dice.randrange(6):
        case 0:
            limits = LimitSettings(memory=dice.randrange(1, 9) << 28, pids=limits.pids, open_files=limits.open_files)
        case 1:
            limits = LimitSettings(memory=limits.memory, pids=dice.randrange(16, 99), open_files=limits.open_files)
        case 2:
            limits = LimitSettings(memory=limits.memory, pids=limits.pids, open_files=dice.randrange(256, 9999))
        case 3:
            stage.groups[user.uid] = tuple(sorted(dice.sample(range(50, 60), dice.randrange(4))))
        case 4:
            stage.files = str(dice.randrange(3))
        case 5:
            stage.gone_accounts ^= {dice.choice(USERS).uid}
    stage.settings = settings(executors=spares(spares=dice.choice((1, 1, 2))), limits=limits)
    if user.uid in stage.gone_accounts:
        with pytest.raises(HutchError):
            await stage.services.sessions.open_session(user, m.OpenSession("script", "/proj"))
    else:
        account = stage.account_of(user.uid)
        session = await stage.services.sessions.open_session(user, m.OpenSession("script", "/proj"))

        def prepared() -> bool:
            return any(one.prepared is not None and one.prepared.session == session.id for one in stage.host.started)

        await until(prepared)
        executor = stage.pool.roster.serving[session.id]
        spec = next(one.spec for one in stage.host.started if one.spec.executor == executor.id)
        got = (spec.memory_limit, spec.pids, spec.open_files)
        assert executor.made_of is not None
        assert (replace(spec.account, groups=()), spec.account.groups, *got, executor.made_of.files) == made_with(
            stage, account
        )
        if dice.random() < 0.7:
            await stage.services.sessions.close_session(user, m.CloseSession(session.id))
    await until(lambda: not too_many(stage))


def too_many(stage: Stage) -> list[str]:
    """Return the accounts with more spares than the settings ask for, or with one although they are gone."""
    count = Counter(one.key.account.uid for one in stage.pool.roster.all() if one.session is None and not one.over)
    most = stage.settings.executors.spares
    return [str(uid) for uid, found in count.items() if found > (0 if uid in stage.gone_accounts else most)]


@pytest.fixture
async def stage(tmp_path: Path) -> Any:
    """A hutchd in system mode that can be started."""
    async with new_stage(tmp_path) as made:
        made.mode, made.host.apart = "system", True
        made.settings = settings(executors=spares(spares=1))
        yield made


async def many_changes(stage: Stage, count: int) -> None:
    """Make random changes between sessions of three accounts."""
    dice = Random(sampling.seed())  # the header of the run prints it
    async with stage.hutchd():
        for _ in range(count):
            await change_and_open(stage, dice)


async def test_after_any_change_a_session_gets_what_holds_then(stage: Stage) -> None:
    """Limits, groups, settings, files and accounts change at random; there are never more spares than asked for."""
    await many_changes(stage, CHANGES)


@pytest.mark.full
@pytest.mark.timeout(600)
async def test_after_many_changes_a_session_gets_what_holds_then(stage: Stage) -> None:
    """The same, with many more changes."""
    await many_changes(stage, 1000)


async def test_kinds_that_nobody_needs_are_forgotten(stage: Stage) -> None:
    """Those of a deleted account at once; those of other accounts once their last session and spare are gone."""
    async with stage.hutchd():
        session = await stage.services.sessions.open_session(USERS[0], m.OpenSession("script", "/proj"))
        await until(lambda: [one.state for one in stage.pool.roster.all()] == ["leased", "ready"])
        await stage.services.sessions.close_session(USERS[0], m.CloseSession(session.id))
        kept = stage.pool.kept
        stage.gone_accounts.add(USERS[0].uid)
        stage.pool.roster.changed.notify()
        await until(lambda: stage.pool.roster.all() == [])

        assert [key.uid for key in kept] == [USERS[0].uid]
        await until(lambda: stage.pool.kept == ())


@pytest.mark.parametrize("seen", [True, False], ids=["seen at once", "seen at the hello"])
async def test_a_change_during_the_start_is_no_failure(stage: Stage, seen: bool) -> None:
    """The executor that was made of something else is replaced at once, however often that happens."""
    stage.settings = settings(executors=spares(spares=0, start_attempts=2))
    async with stage.hutchd():
        stage.host.gate = anyio.Event()
        session = await stage.services.sessions.open_session(USERS[0], m.OpenSession("script", "/proj"))
        for version in ("2", "3", "4"):
            before = stage.host.starts
            await until(lambda before=before: stage.host.starts > before)
            stage.files = version
            gate, stage.host.gate = stage.host.gate, anyio.Event()
            if seen:
                stage.pool.roster.changed.notify()
            gate.set()
        stage.host.gate.set()
        await until(lambda: session.id in stage.pool.roster.serving)

        made_of = stage.pool.roster.serving[session.id].made_of
        assert made_of is not None
        assert made_of.files == "4"


async def test_groups_that_change_during_the_start_are_no_failure(stage: Stage) -> None:
    """The launcher looked them up later than hutchd: another executor is started at once."""
    stage.settings = settings(executors=spares(spares=0, start_attempts=1))
    async with stage.hutchd():
        stage.host.gate = anyio.Event()
        session = await stage.services.sessions.open_session(USERS[0], m.OpenSession("script", "/proj"))
        await until(lambda: stage.host.starts == 1)
        stage.groups[USERS[0].uid] = (7,)
        stage.host.gids = (7, USERS[0].uid)
        stage.host.gate.set()
        await until(lambda: session.id in stage.pool.roster.serving)

        assert stage.host.starts == 2


async def test_groups_that_the_kernel_does_not_confirm_end_the_start(stage: Stage) -> None:
    """No session gets an executor with other groups than its account has; the record says what it is made of."""
    stage.settings = settings(executors=spares(spares=0, start_attempts=1))
    async with stage.hutchd():
        stage.host.gids = (7,)
        session = await stage.services.sessions.open_session(USERS[0], m.OpenSession("script", "/proj"))
        turn = await stage.services.turns.submit_prompt(USERS[0], m.SubmitPrompt(session.id, "go"))

        async def ended() -> bool:
            return (await stage.services.turns.get_turn(USERS[0], m.TurnRef(turn.id))).ended_at is not None

        await until(ended)

        assert (await stage.services.turns.get_turn(USERS[0], m.TurnRef(turn.id))).reason == "agent_unavailable"
        assert stage.host.played == []


@pytest.mark.parametrize("leased", [True, False])
async def test_an_executor_of_an_earlier_version_serves_only_the_session_that_it_has(
    stage: Stage, leased: bool
) -> None:
    """Nobody knows what it is made of: an idle one is ended, and a session's own one stays."""
    async with stage.hutchd():
        session = await stage.services.sessions.open_session(USERS[0], m.OpenSession("script", "/proj"))
        await until(lambda: [one.state for one in stage.pool.roster.all()] == ["leased", "ready"])
        chosen = stage.pool.roster.all()[0 if leased else 1].id
        await stage.store.write(lambda tx: executors.update(tx, chosen, made_of=None))
    fake = next(one for one in stage.host.started if one.spec.executor == chosen)
    async with stage.hutchd():
        await fake.dial()
        if leased:
            assert stage.pool.roster.serving[session.id].id == chosen
        else:
            await until(fake.exited.is_set)


def test_what_is_stored_is_read_again() -> None:
    """A row that cannot be read, or of an earlier version, matches nothing."""
    applied = msgspec.structs.replace(MADE, applied=m.ResourceLimits(open_files=20_000))

    assert read_made_of(msgspec.to_builtins(applied)) == applied
    assert applied.matches(MADE)
    assert read_made_of(None) is None
    assert read_made_of({"of": "tomorrow"}) is None
    assert not MADE.matches(None)


@pytest.mark.parametrize(
    "change",
    [
        {"gids": (2,)},
        {"account": replace(MADE.account, home="/srv/ann")},
        {"account": replace(MADE.account, shell="/bin/zsh")},
        {"limits": m.ResourceLimits(1 << 29, 100, 50, 1024)},
        {"settings": "t"},
        {"files": "g"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_each_part_counts(change: dict[str, Any]) -> None:
    """An executor that differs in one part does not match."""
    assert not msgspec.structs.replace(MADE, **change).matches(MADE)


def test_the_version_of_the_files_follows_their_content() -> None:
    """It names the version of Hutch and is the same at each look while no file changes."""
    files = ExecutorFiles()

    assert files() == files()
    assert files().startswith("0.")
