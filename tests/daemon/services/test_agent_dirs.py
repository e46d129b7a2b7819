"""The directories of agents: which one a session gets, and their removal with the session."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from hutch_daemon.store import left_dirs, sessions
from hutch_shared import messages as m
from hutch_shared.agents import SCRATCH
from hutch_shared.errors import HutchError
from tests.accounts import need_root
from tests.fakes.executors import FakeExecutor, never_end
from tests.fakes.stage import Stage, until


async def prepared(stage: Stage, session: m.Session) -> tuple[FakeExecutor, m.PrepareSession]:
    """Play a turn of the session, and return its executor with what it got."""
    stage.host.play = never_end
    await stage.running(await stage.submit(session))
    return next(
        (one, one.prepared)
        for one in reversed(stage.host.started)
        if one.prepared is not None and one.prepared.session == session.id
    )


async def test_each_session_has_a_directory_and_keeps_it(stage: Stage) -> None:
    """The next executor gets the same one."""
    async with stage.hutchd():
        one, other = await stage.open(), await stage.open(name="other")
        executor, first = await prepared(stage, one)
        _, of_other = await prepared(stage, other)
        executor.die()
        _, again = await prepared(stage, one)

        assert first.agent_dir is not None
        assert Path(first.agent_dir).name == one.id
        assert first.agent_dir == again.agent_dir != of_other.agent_dir
        assert Path(first.agent_dir).parent.parent == Path(first.spool).parent


async def test_a_conversation_counts_as_named_until_a_turn_has_begun(stage: Stage) -> None:
    """Until then a missing conversation is an error; afterwards a new one begins."""
    async with stage.hutchd():
        session = await stage.open(resume="c-1")
        executor, first = await prepared(stage, session)
        executor.die()
        _, again = await prepared(stage, session)

        assert (first.resume, first.resume_named) == ("c-1", True)
        assert (again.resume, again.resume_named) == ("c-1", False)


async def test_a_fork_looks_in_the_directories_of_its_ancestors(stage: Stage) -> None:
    """The nearest comes first, then other sessions with the same conversation."""
    async with stage.hutchd():
        parent = await stage.open(resume="c-1")
        other = await stage.open(name="other", resume="c-1")
        dirs = [(await prepared(stage, session))[1].agent_dir for session in (parent, other)]
        child = await stage.services.forks.fork_session(stage.me, m.ForkSession(parent.id))
        grandchild = await stage.services.forks.fork_session(stage.me, m.ForkSession(child.id))
        _, of_child = await prepared(stage, child)
        _, of_grandchild = await prepared(stage, grandchild)

        assert (of_child.fork, of_child.resume, of_child.resume_named) == (True, "c-1", False)
        assert of_child.resume_from == tuple(dirs)
        assert of_grandchild.resume_from == (of_child.agent_dir, *dirs)


async def test_a_fork_of_a_closed_session_has_ended_nothing(stage: Stage) -> None:
    """The result of the kill is that of the closed session."""
    async with stage.hutchd():
        parent = await stage.open(resume="c-1")
        closed = await stage.services.sessions.close_session(stage.me, m.CloseSession(parent.id))
        fork = await stage.services.forks.fork_session(stage.me, m.ForkSession(parent.id))

        assert closed.killed is not None
        assert fork.killed is None


async def test_a_removed_sessions_directory_is_removed(stage: Stage) -> None:
    """Its record goes once the directory is gone."""
    async with stage.hutchd():
        session = await stage.open()
        _, given = await prepared(stage, session)
        assert given.agent_dir is not None
        directory = Path(given.agent_dir)
        (directory / "projects").mkdir(parents=True)
        (directory / "projects" / "x.jsonl").write_text("{}")
        await stage.services.sessions.close_session(stage.me, m.CloseSession(session.id, force=True))

        assert directory.is_dir()
        await stage.services.sessions.delete_session(stage.me, m.SessionRef(session.id))
        await until(lambda: not directory.exists())

        async def forgotten() -> bool:
            return not await stage.store.read(left_dirs.list_)

        await until(forgotten)


async def test_a_closed_sessions_temporary_files_are_removed(stage: Stage) -> None:
    """A killed executor has left them; the conversation stays."""
    async with stage.hutchd():
        session = await stage.open()
        executor, given = await prepared(stage, session)
        assert given.agent_dir is not None
        scratch, kept = Path(given.agent_dir, SCRATCH), Path(given.agent_dir, "projects")
        (scratch / "folder").mkdir(parents=True)
        kept.mkdir()
        executor.die()

        await stage.services.sessions.close_session(stage.me, m.CloseSession(session.id, force=True))
        await until(lambda: not scratch.exists())

        assert kept.exists()


async def test_an_executor_removes_what_belongs_to_another_account(stage: Stage, tmp_path: Path) -> None:
    """Only it can. Until one of the account connects, the directory is remembered."""
    need_root()
    theirs = tmp_path / "agents"
    (theirs / "s-1").mkdir(parents=True)
    os.chown(theirs, 12345, 12345)
    async with stage.hutchd():
        session = await stage.open()
        await prepared(stage, session)
        await stage.store.write(lambda tx: sessions.update(tx, session.id, agent_dir=str(theirs / "s-1")))
        await stage.services.sessions.close_session(stage.me, m.CloseSession(session.id, force=True))
        await stage.services.sessions.delete_session(stage.me, m.SessionRef(session.id))
        (left,) = await stage.store.read(left_dirs.list_)
        assert left.path == str(theirs / "s-1")

        executor, _ = await prepared(stage, await stage.open(name="next"))

        await until(lambda: executor.host.removed == [str(theirs / "s-1")])


async def test_a_session_stays_until_its_forks_have_its_conversation(stage: Stage) -> None:
    """A fork copies it when its first executor prepares it, which may fail for days."""
    stage.host.instructions = m.Instructions()
    async with stage.hutchd():
        parent = await stage.open(agent="claude")
        await stage.ended(await stage.submit(parent))
        stage.host.refusing = 1
        fork = await stage.services.forks.fork_session(stage.me, m.ForkSession(parent.id))
        await until(lambda: stage.host.refusing == 0)
        await stage.services.sessions.close_session(stage.me, m.CloseSession(parent.id))
        with pytest.raises(HutchError, match=f"have not copied its conversation yet: {fork.name}"):
            await stage.services.sessions.delete_session(stage.me, m.SessionRef(parent.id))

        await stage.ended(await stage.submit(fork))
        await stage.services.sessions.delete_session(stage.me, m.SessionRef(parent.id))


@pytest.mark.parametrize("count", [1, 5])
async def test_spares_of_an_earlier_version_prepare_no_session(stage: Stage, count: int) -> None:
    """They would not find the conversation. An executor that has the session already keeps it."""
    without = stage.settings
    with_spares = msgspec.structs.replace(without.executors, spares=count, spare_agents=("claude",))
    stage.settings = msgspec.structs.replace(without, executors=with_spares)
    stage.host.abilities = ("compact", "clear", "offered")
    async with stage.hutchd():
        await stage.ended(await stage.submit(await stage.open(agent="claude")))

        def spares() -> list[FakeExecutor]:
            return [one for one in stage.host.started if one.prepared is None and one.connection is not None]

        await until(lambda: len(spares()) == count)
        old = spares()
    stage.host.abilities, stage.settings = (*stage.host.abilities, "agent_dir"), without

    async with stage.hutchd():
        for one in old:
            await one.dial()
        session = await stage.open(agent="claude", name="next")
        ended = await stage.ended(await stage.submit(session))
        told = await stage.services.history.read_events(stage.me, m.ReadEvents(session.id))

        assert ended.state == "completed", ended
        assert [one.prepared for one in old] == [None] * count
        assert stage.executor not in old
        assert stage.executor.prepared is not None
        assert not [one for one in told.events if b"executor_not_started" in bytes(one)]
