"""Dialogues between a client, hutchd and an executor: the life of a turn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
import pytest

from hutch_daemon.settings import ExecutorSettings, TurnSettings
from hutch_daemon.store import executors
from hutch_daemon.store import turns as turns_of
from hutch_daemon.store.rows import TurnRow
from hutch_shared import messages as m
from hutch_shared.errors import HutchError, Reason
from hutch_shared.events import TurnEnded, UsageSeen
from tests.fakes.executors import FakeExecutor, never_end
from tests.fakes.stage import WAIT, Stage, settings, until


async def test_a_prompt_runs_to_its_end(stage: Stage) -> None:
    """A prompt is queued and runs once in an executor; its end is an event and a state."""
    async with stage.hutchd():
        session = await stage.open()
        turn = await stage.submit(session, "hello")

        ended = await stage.ended(turn)

        assert (turn.state, ended.state, ended.reason) == ("queued", "completed", "done")
        assert await stage.kinds(session) == ["turn_started", "text", "turn_ended"]
        assert stage.host.played == [(stage.executor.spec.executor, "hello")]
        assert (
            await stage.services.sessions.get_session(stage.me, m.SessionRef(session.id))
        ).agent_session == "conversation-1"


@pytest.mark.parametrize("end", ["completed", "interrupted", "executor lost", "killed"])
async def test_the_sessions_processes_may_use_a_model_only_during_the_turn(stage: Stage, end: str) -> None:
    """From before the agent gets the prompt until before anybody can see the end of the turn."""
    during: list[list[str]] = []
    release = anyio.Event()

    async def play(executor: FakeExecutor, prompt: m.ExecutePrompt) -> TurnEnded | None:
        during.append(list(stage.leases.in_turn))
        await release.wait()
        return TurnEnded("completed", "done", "Done.")

    stage.host.play = play
    if end == "killed":
        stage.settings = settings(turns=TurnSettings(interrupt_grace=0.01))
    async with stage.hutchd():
        session = await stage.open()
        before = list(stage.leases.in_turn)
        turn = await stage.submit(session)
        executor = await stage.running(turn)
        await until(lambda: bool(during))
        match end:
            case "completed":
                release.set()
            case "executor lost":
                executor.die()
            case _:
                executor.stubborn = end == "killed"
                await stage.services.turns.interrupt_turn(stage.me, m.InterruptTurn(session.id))
        seen: list[str] | None = None

        async def over() -> bool:
            nonlocal seen
            ended = (await stage.turn(turn)).ended_at is not None
            seen = list(stage.leases.in_turn)
            return ended

        await until(over)

        assert (before, during, seen) == ([], [[session.id]], [])
        assert stage.leases.turns == [("begin", session.id), ("end", session.id)]


async def test_a_session_without_a_turn_may_use_no_model_whatever_was_said_before(stage: Stage) -> None:
    """After a restart the end of a turn may be stored before the session's task knows the turn."""
    async with stage.hutchd():
        session = await stage.open()
        await stage.leases.begin_turn(session.id)
        await stage.ended(await stage.submit(session))

        assert stage.leases.turns == [(word, session.id) for word in ("begin", "end", "begin", "end")]


async def test_prompts_run_one_at_a_time_in_order(stage: Stage) -> None:
    """A session's turns never overlap, and one executor runs them all."""
    async with stage.hutchd():
        session = await stage.open()
        turns = [await stage.submit(session, str(number)) for number in range(5)]

        for turn in turns:
            await stage.ended(turn)

        assert [prompt for _, prompt in stage.host.played] == ["0", "1", "2", "3", "4"]
        assert len(stage.host.started) == 1
        assert [turn.number for turn in turns] == [1, 2, 3, 4, 5]


async def test_the_same_key_makes_one_turn(stage: Stage) -> None:
    """A prompt repeated with its key is the same turn and runs once. Other content under the key is a conflict."""
    async with stage.hutchd():
        session = await stage.open()

        first = await stage.submit(session, "once", "key-1")
        await stage.ended(first)
        again = await stage.submit(session, "once", "key-1")

        assert again.id == first.id
        assert [prompt for _, prompt in stage.host.played] == ["once"]
        with pytest.raises(HutchError) as refused:
            await stage.submit(session, "twice", "key-1")
        assert refused.value.reason is Reason.CONFLICT


async def test_reopening_a_session_waits_for_its_executor(stage: Stage) -> None:
    """The repeated call waits for the executor; a later prompt runs, and the session can be closed."""

    async def settle() -> None:
        for _ in range(10):  # more events than the session's task reads before it waits
            await stage.events(session)

    async with stage.hutchd():
        session = await stage.open(idempotency_key="key-1")
        await stage.ended(await stage.submit(session))
        stage.executor.hang_up()
        await settle()
        await stage.open(idempotency_key="key-1")
        await settle()
        await stage.executor.dial()
        await settle()

        ended = await stage.ended(await stage.submit(session))
        with anyio.fail_after(30):
            closed = await stage.services.sessions.close_session(stage.me, m.CloseSession(session.id))

        assert (ended.state, closed.state) == ("completed", "closed")


async def test_interrupt_stops_the_running_turn(stage: Stage) -> None:
    """When interrupt_turn replies, the executor has stopped the turn; the turn ends as stopped."""
    stage.host.play = never_end
    async with stage.hutchd():
        session = await stage.open()
        turn = await stage.submit(session)
        executor = await stage.running(turn)

        await stage.services.turns.interrupt_turn(stage.me, m.InterruptTurn(session.id))
        told = [name for name, _ in executor.calls]
        ended = await stage.ended(turn)

        assert "interrupt_turn" in told
        assert (ended.state, ended.reason) == ("stopped", "interrupted")
        assert (await stage.kinds(session))[-1] == "turn_ended"


async def test_an_agent_that_does_not_stop_is_killed(stage: Stage) -> None:
    """After the grace, the executor is ended with all its processes, and the turn ends."""
    stage.settings = settings(turns=TurnSettings(interrupt_grace=0.05))
    stage.host.play = never_end
    async with stage.hutchd():
        session = await stage.open()
        turn = await stage.submit(session)
        executor = await stage.running(turn)
        executor.stubborn = True

        await stage.services.turns.interrupt_turn(stage.me, m.InterruptTurn(session.id))
        ended = await stage.ended(turn)

        assert executor.exited.is_set()
        assert ended.state == "stopped"
        assert "did not stop by itself" in (ended.message or "")


async def test_a_turn_over_its_time_limit_is_stopped(stage: Stage) -> None:
    """hutchd ends it as timed_out if its executor ignores the limit."""
    stage.settings = settings(turns=TurnSettings(timeout=0.05, interrupt_grace=0.1))
    stage.host.play = never_end
    async with stage.hutchd():
        session = await stage.open()
        told = await stage.ended(await stage.submit(session, "minds the interrupt"))
        turn = await stage.submit(session, "minds nothing")
        await stage.running(turn)
        stage.executor.stubborn = True
        killed = await stage.ended(turn)

        assert [told.state, killed.state] == ["timed_out", "timed_out"]
        assert stage.host.started[0].exited.is_set()


async def test_an_interrupt_leaves_queued_turns(stage: Stage) -> None:
    """The turn that waits behind the interrupted one runs."""
    async with stage.hutchd():
        session = await stage.open()
        stage.host.play = never_end
        first = await stage.submit(session, "first")
        await stage.running(first)
        second = await stage.submit(session, "second")

        async def quick(executor: FakeExecutor, prompt: m.ExecutePrompt) -> TurnEnded:
            return TurnEnded("completed", "done", "Done.")

        stage.host.play = quick
        await stage.services.turns.interrupt_turn(stage.me, m.InterruptTurn(session.id))

        assert (await stage.ended(first)).state == "stopped"
        assert (await stage.ended(second)).state == "completed"


async def test_a_queued_turn_is_cancelled_and_never_runs(stage: Stage) -> None:
    """cancel_turn removes a turn from the queue; it refuses one that runs."""
    stage.host.play = never_end
    async with stage.hutchd():
        session = await stage.open()
        first = await stage.submit(session, "first")
        await stage.running(first)
        second = await stage.submit(session, "second")

        cancelled = await stage.services.turns.cancel_turn(stage.me, m.TurnRef(second.id))

        assert cancelled.state == "stopped"
        with pytest.raises(HutchError) as refused:
            await stage.services.turns.cancel_turn(stage.me, m.TurnRef(first.id))
        assert refused.value.reason is Reason.WRONG_STATE
        assert [prompt for _, prompt in stage.host.played] == ["first"]


async def test_a_turn_whose_executor_dies_fails_and_the_next_one_resumes(stage: Stage) -> None:
    """The prompt is not run again; the next prompt gets a new executor that resumes the conversation."""
    async with stage.hutchd():
        session = await stage.open()
        await stage.ended(await stage.submit(session, "first"))
        stage.host.play = never_end
        turn = await stage.submit(session, "second")
        executor = await stage.running(turn)

        executor.die()
        lost = await stage.ended(turn)
        turn = await stage.submit(session, "third")
        await stage.running(turn)

        assert (lost.state, lost.reason) == ("failed", "executor_lost")
        assert [prompt for _, prompt in stage.host.played] == ["first", "second", "third"]
        assert stage.executor is not executor
        assert stage.executor.prepared is not None
        assert stage.executor.prepared.resume == "conversation-1"


async def test_a_broken_connection_loses_nothing(stage: Stage) -> None:
    """A reconnected executor continues its turn, and an event that it sends again is stored once."""
    release = anyio.Event()

    async def wait(executor: FakeExecutor, prompt: m.ExecutePrompt) -> TurnEnded:
        await release.wait()
        return TurnEnded("completed", "done", "Done.")

    stage.host.play = wait
    async with stage.hutchd():
        session = await stage.open()
        turn = await stage.submit(session)
        executor = await stage.running(turn)

        executor.hang_up()
        welcome = await executor.dial()
        await executor.resend(0)
        release.set()
        ended = await stage.ended(turn)

        assert (welcome.turn, welcome.acked) == (turn.id, 1)
        assert ended.state == "completed"
        assert await stage.kinds(session) == ["turn_started", "turn_ended"]


async def test_a_gap_in_the_numbers_is_refused(stage: Stage) -> None:
    """A report must continue the executor's event numbers."""
    stage.host.play = never_end
    async with stage.hutchd():
        session = await stage.open()
        executor = await stage.running(await stage.submit(session))

        executor.events.append(
            executor.events[0].__class__(7, executor.events[0].at, "stderr", executor.events[0].data)
        )

        with pytest.raises(HutchError) as refused:
            await executor.resend(1)
        assert refused.value.reason is Reason.INVALID_REQUEST


async def test_only_the_first_end_of_a_turn_counts(stage: Stage) -> None:
    """A later turn_ended becomes a notice and changes nothing."""
    async with stage.hutchd():
        session = await stage.open()
        turn = await stage.ended(await stage.submit(session))

        await stage.executor.report("turn_ended", TurnEnded("failed", "late", "Late."), turn.id)

        assert await stage.kinds(session) == ["turn_started", "text", "turn_ended", "notice"]
        assert (await stage.turn(turn)).state == "completed"


async def test_usage_is_counted_with_the_end(stage: Stage) -> None:
    """The usage table gets the usage from the end of the turn."""

    async def costly(executor: FakeExecutor, prompt: m.ExecutePrompt) -> TurnEnded:
        return TurnEnded("completed", "done", "Done.", usage=UsageSeen(10, 5, usd=0.25, model="big", total=True))

    stage.host.play = costly
    async with stage.hutchd():
        session = await stage.open()
        for _ in range(2):
            await stage.ended(await stage.submit(session))

        table = await stage.services.history.get_usage(stage.me, m.GetUsage(by="model"))

        assert [(row.of, row.turns, row.usage.input_tokens, row.usage.usd) for row in table.rows] == [
            ("big", 2, 20, 0.5)
        ]


async def test_a_refused_prompt_goes_to_another_executor(stage: Stage) -> None:
    """A prompt that an executor refuses before accepting it is queued again and runs in another one."""
    async with stage.hutchd():
        session = await stage.open()
        await stage.ended(await stage.submit(session, "first"))
        stage.executor.refuses = "leaving"

        ended = await stage.ended(await stage.submit(session, "second"))

        assert ended.state == "completed"
        assert [prompt for _, prompt in stage.host.played] == ["first", "second"]
        assert len(stage.host.started) == 2


async def test_an_executor_that_cannot_start_fails_the_turn_with_the_reason(stage: Stage) -> None:
    """After the limit of failed starts the user gets an actionable reason, in one notice."""
    stage.host.refusing = 1000
    async with stage.hutchd():
        session = await stage.open()

        ended = await stage.ended(await stage.submit(session))
        status = await stage.services.host.get_status(stage.me, m.Nothing())

        assert (ended.state, ended.reason) == ("failed", "agent_unavailable")
        assert "There is no such program." in (ended.message or "")
        assert 1000 - stage.host.refusing == 3
        assert len([notice for notice in status.notices if "failed to start" in notice]) == 1


async def test_an_agent_that_cannot_be_opened_fails_the_turn(stage: Stage) -> None:
    """The user gets the executor's reason."""
    stage.host.unpreparable = "The CLI is not installed."
    async with stage.hutchd():
        session = await stage.open()

        ended = await stage.ended(await stage.submit(session))

        assert (ended.state, ended.message) == ("failed", "The CLI is not installed.")


async def test_close_ends_all_turns_and_processes_of_a_session(stage: Stage) -> None:
    """A forced close stops the turns, ends the processes, and says that none is left."""
    stage.host.play = never_end
    async with stage.hutchd():
        session = await stage.open()
        first = await stage.submit(session, "first")
        executor = await stage.running(first)
        second = await stage.submit(session, "second")
        with pytest.raises(HutchError) as refused:
            await stage.services.sessions.close_session(stage.me, m.CloseSession(session.id))

        closed = await stage.services.sessions.close_session(stage.me, m.CloseSession(session.id, force=True))

        assert refused.value.reason is Reason.WRONG_STATE
        assert closed.state == "closed"
        assert executor.exited.is_set()
        assert [(await stage.turn(turn)).state for turn in (first, second)] == ["stopped", "stopped"]
        assert closed.killed == m.KillResult("gone", "no process that descends from it is left")
        assert "no process that descends from it is left" in bytes((await stage.events(session))[-1].data).decode()
        assert stage.pool.roster.all() == []
        with pytest.raises(HutchError) as late:
            await stage.submit(session, "third")
        assert late.value.reason is Reason.SESSION_CLOSED


async def test_an_unkillable_process_is_quarantined_and_named(stage: Stage) -> None:
    """If a close cannot verify that none is left, it names those left, and the executor keeps its slot."""
    stage.host.unkillable = True
    async with stage.hutchd():
        session = await stage.open()
        await stage.ended(await stage.submit(session))

        closed = await stage.services.sessions.close_session(stage.me, m.CloseSession(session.id))
        status = await stage.services.host.get_status(stage.me, m.Nothing())
        audit = await stage.services.history.read_audit(stage.me, m.ReadAudit(session=session.id))

        assert closed.killed is not None
        assert (closed.killed.outcome, closed.killed.left) == ("left", (stage.executor.pid,))
        assert [executor.state for executor in status.executors] == ["quarantined"]
        assert any("could not be ended" in notice for notice in status.notices)
        assert "could not be ended" in bytes((await stage.events(session))[-1].data).decode()
        assert ("close_session", "left") in {(entry.action, entry.outcome) for entry in audit.entries}


async def verified(stage: Stage, session: m.Session) -> None:
    """Wait until hutchd reports that nothing of a session is left."""

    async def is_gone() -> bool:
        found = await stage.services.sessions.get_session(stage.me, m.SessionRef(session.id))
        return found.killed is not None and found.killed.outcome == "gone"

    await until(is_gone)


async def test_an_unknown_end_is_reported_as_unknown_until_it_is_verified(stage: Stage) -> None:
    """Session, event, audit and notices say that nobody can tell, never that nothing is left; a check ends that."""
    stage.settings = settings(executors=ExecutorSettings(spares=0, lost_timeout=0.2))
    stage.host.unknowable = "The launcher is away."
    async with stage.hutchd():
        session = await stage.open()
        await stage.ended(await stage.submit(session))

        closed = await stage.services.sessions.close_session(stage.me, m.CloseSession(session.id))
        status = await stage.services.host.get_status(stage.me, m.Nothing())
        said = bytes((await stage.events(session))[-1].data).decode()
        audit = await stage.services.history.read_audit(stage.me, m.ReadAudit(session=session.id))
        stage.host.unknowable = ""
        await verified(stage, session)
        later = await stage.services.host.get_status(stage.me, m.Nothing())
        after = await stage.services.history.read_audit(stage.me, m.ReadAudit(session=session.id))

        unknown = "what is left of it is unknown: The launcher is away"
        assert closed.killed == m.KillResult("unknown", unknown)
        assert any(unknown in notice for notice in status.notices)
        assert unknown in said
        assert "session_closed" not in said
        assert ("close_session", "unknown") in {(entry.action, entry.outcome) for entry in audit.entries}
        assert (later.notices, later.executors) == ((), ())
        assert "executor_gone" in bytes((await stage.events(session))[-1].data).decode()
        assert ("end_executor", "gone") in {(entry.action, entry.outcome) for entry in after.entries}


async def test_a_close_looks_again_at_a_quarantined_executor(stage: Stage) -> None:
    """The close of a session whose turn ended without verification reports what is true then."""
    stage.host.play = never_end
    stage.settings = settings(turns=TurnSettings(interrupt_grace=0.05))
    stage.host.unknowable = "The launcher is away."
    async with stage.hutchd():
        session = await stage.open()
        turn = await stage.submit(session)
        (await stage.running(turn)).stubborn = True
        interrupted = await stage.services.turns.interrupt_turn(stage.me, m.InterruptTurn(session.id))
        before = await stage.services.sessions.get_session(stage.me, m.SessionRef(session.id))
        stage.host.unknowable = ""

        closed = await stage.services.sessions.close_session(stage.me, m.CloseSession(session.id))

        assert (interrupted.state, interrupted.reason) == ("stopped", "not_verified")
        assert "unknown: The launcher is away" in (interrupted.message or "")
        assert [found.killed and found.killed.outcome for found in (before, closed)] == ["unknown", "gone"]


async def test_an_unknown_end_outlives_a_restart_of_hutchd(stage: Stage) -> None:
    """The next hutchd still says so, and records the later verification for the session."""
    stage.settings = settings(executors=ExecutorSettings(spares=0, lost_timeout=0.2))
    stage.host.unknowable = "The launcher is away."
    async with stage.hutchd():
        session = await stage.open()
        await stage.ended(await stage.submit(session))
        await stage.services.sessions.close_session(stage.me, m.CloseSession(session.id))
    async with stage.hutchd():
        status = await stage.services.host.get_status(stage.me, m.Nothing())
        before = await stage.services.sessions.get_session(stage.me, m.SessionRef(session.id))
        stage.host.unknowable = ""
        await verified(stage, session)

        assert [(one.state, one.session) for one in status.executors] == [("quarantined", session.id)]
        assert before.killed is not None
        assert before.killed.outcome == "unknown"


async def test_a_fork_continues_the_conversation(stage: Stage) -> None:
    """A fork is a separate session whose agent resumes a copy of the conversation."""
    async with stage.hutchd():
        session = await stage.open(name="one")
        await stage.ended(await stage.submit(session))

        fork = await stage.services.forks.fork_session(stage.me, m.ForkSession("one"))
        await until(lambda: len(stage.host.started) == 2 and stage.executor.prepared is not None)

        assert (fork.forked_from, fork.agent_session) == (session.id, None)
        assert stage.executor.prepared is not None
        assert (stage.executor.prepared.resume, stage.executor.prepared.fork) == ("conversation-1", True)


async def test_a_deleted_session_is_gone_and_its_audit_stays(stage: Stage) -> None:
    """Only a closed session can be deleted; the audit names the user who did it."""
    async with stage.hutchd():
        session = await stage.open()
        with pytest.raises(HutchError):
            await stage.services.sessions.delete_session(stage.me, m.SessionRef(session.id))
        await stage.services.sessions.close_session(stage.me, m.CloseSession(session.id))

        await stage.services.sessions.delete_session(stage.me, m.SessionRef(session.id))

        with pytest.raises(HutchError):
            await stage.services.sessions.get_session(stage.me, m.SessionRef(session.id))
        page = await stage.services.history.read_audit(stage.me, m.ReadAudit(session=session.id))
        assert [entry.action for entry in page.entries] == ["open_session", "close_session", "delete_session"]


async def test_foreign_records_look_missing(stage: Stage) -> None:
    """Another account gets not_found for a session, a turn and a request; an administrator sees them."""
    async with stage.hutchd():
        session = await stage.open()
        turn = await stage.submit(session)
        other = stage.me.__class__(stage.me.uid + 1, 1, 1)
        admin = stage.me.__class__(stage.me.uid + 2, 1, 1, admin=True)

        for attempt in (
            stage.services.sessions.get_session(other, m.SessionRef(session.id)),
            stage.services.turns.get_turn(other, m.TurnRef(turn.id)),
            stage.services.turns.submit_prompt(other, m.SubmitPrompt(session.id, "x")),
        ):
            with pytest.raises(HutchError) as refused:
                await attempt
            assert refused.value.reason is Reason.NOT_FOUND
        assert (await stage.services.sessions.get_session(admin, m.SessionRef(session.id))).id == session.id


async def test_opening_a_second_session_in_a_directory_warns(stage: Stage) -> None:
    """The reply names the other session."""
    async with stage.hutchd():
        first = await stage.open(name="one")

        second = await stage.open(name="two")
        third = await stage.open(name="three")

        assert first.warning is None
        assert second.warning == "Another open session works in /proj: one."
        assert third.warning == "Other open sessions work in /proj: one, two."


async def test_a_token_of_another_process_is_refused(stage: Stage) -> None:
    """A token is valid only for the process and account that it was issued for."""
    async with stage.hutchd():
        session = await stage.open()
        await stage.ended(await stage.submit(session))
        executor = stage.executor

        reasons = []
        for changes in ({"pid": 1}, {"uid": 4242}, {"token": "made-up"}, {"protocol": 99}, {"session": "s-other"}):
            with pytest.raises(HutchError) as refused:
                await executor.dial(**changes)
            reasons.append(refused.value.reason.word)

        assert reasons == ["not_allowed", "not_allowed", "token_unknown", "protocol_mismatch", "lease_lost"]


async def test_a_used_up_token_is_refused(stage: Stage) -> None:
    """It is refused even from the process that it was issued for."""
    async with stage.hutchd():
        session = await stage.open()
        await stage.ended(await stage.submit(session))
        executor = stage.executor
        executor.hang_up()
        await stage.store.write(lambda tx: executors.update(tx, executor.spec.executor, token_max_uses=1))

        with pytest.raises(HutchError) as refused:
            await executor.dial()

        assert refused.value.reason is Reason.TOKEN_EXPIRED


async def test_an_end_during_a_read_is_noticed(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """The turn ends after the session's task has read its state, but before the task gets the result."""
    release = anyio.Event()

    async def end_late(executor: FakeExecutor, prompt: m.ExecutePrompt) -> None:
        try:
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                await release.wait()

    stage.host.play = end_late
    async with stage.hutchd():
        session = await stage.open()
        turn = await stage.submit(session)
        executor = await stage.running(turn)
        read = stage.store.read
        stale = 0

        async def read_late(look: Callable[[Any], Any]) -> Any:
            nonlocal stale
            found = await read(look)
            if isinstance(found, TurnRow) and found.state == "stopping" and called(executor):
                stale += 1
                release.set()
                while (row := await read(lambda conn: turns_of.get(conn, turn.id))) and row.state == "stopping":
                    await anyio.sleep(0.001)
                await anyio.sleep(0.05)  # by now every waiting task has been woken
            return found

        monkeypatch.setattr(stage.store, "read", read_late)
        with anyio.fail_after(WAIT / 2):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(
                    stage.services.sessions.close_session, stage.me, m.CloseSession(session.id, force=True)
                )
                await until(lambda: called(executor))
                await anyio.sleep(0.05)
                leased = stage.pool.roster.serving.get(session.id)
                assert leased is not None
                stage.executor_changed.emit(leased)
        assert stale == 1


def called(executor: FakeExecutor) -> bool:
    """Return whether the executor's turn was interrupted."""
    return any(name == "interrupt_turn" for name, _ in executor.calls)
