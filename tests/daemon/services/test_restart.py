"""Dialogues across the end of one hutchd and the start of the next."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import anyio
import pytest

from hutch_daemon.environments.port import Launched
from hutch_daemon.environments.sandbox_probe import KindTrial, SandboxProbe
from hutch_daemon.settings import ExecutorSettings, SandboxSettings
from hutch_daemon.store import executors, turns
from hutch_shared import messages as m
from hutch_shared.errors import HutchError, Reason
from hutch_shared.events import Text, TurnEnded
from tests.fakes.executors import FakeExecutor, never_end, say_done
from tests.fakes.stage import BOOT, WAIT, Stage, settings, until


class _Held:
    """A play that ends when the test releases it."""

    def __init__(self) -> None:
        self.release = anyio.Event()

    async def __call__(self, executor: FakeExecutor, prompt: m.ExecutePrompt) -> TurnEnded:
        await self.release.wait()
        return TurnEnded("completed", "done", "Done.")


async def test_a_running_turn_survives_the_restart(stage: Stage) -> None:
    """The executor continues, is adopted at its hello, and reports the events that it kept. The prompt ran once."""
    held = stage.host.play = _Held()
    async with stage.hutchd():
        session = await stage.open()
        turn = await stage.submit(session)
        executor = await stage.running(turn)
    await executor.report("text", Text("while nobody listened"), turn.id)

    async with stage.hutchd():
        before = await stage.turn(turn)
        welcome = await executor.dial()
        held.release.set()
        ended = await stage.ended(turn)
        status = await stage.services.host.get_status(stage.me, m.Nothing())

        assert before.state == "running"
        assert welcome.turn == turn.id
        assert ended.state == "completed"
        assert await stage.kinds(session) == ["turn_started", "text", "turn_ended"]
        assert len(stage.host.played) == 1
        assert [one.adopted for one in status.executors] == [True]


async def test_an_executors_network_is_that_of_its_preparation(stage: Stage) -> None:
    """Neither new settings nor a restart of hutchd change it."""
    stage.host.play = never_end
    stage.host.sandbox_of_all = SandboxProbe(landlock=KindTrial("landlock", abi=7))
    stage.settings = settings(sandbox=SandboxSettings(network="broker-only"))
    async with stage.hutchd():
        executor = await stage.running(await stage.submit(await stage.open()))
        await executor.get_key()
        stage.settings = settings(sandbox=SandboxSettings(network="full"))
        await executor.get_key()
    async with stage.hutchd():
        await executor.dial()
        await executor.get_key()
        other = await stage.running(await stage.submit(await stage.open()))
        await other.get_key()
    async with stage.hutchd():
        await other.dial()
        await other.get_key()

    assert stage.networks == ["broker-only"] * 3 + ["full"] * 2


async def test_a_turn_that_ended_while_hutchd_was_down_gets_its_state(stage: Stage) -> None:
    """The state follows from the events that the executor reports."""
    held = stage.host.play = _Held()
    async with stage.hutchd():
        session = await stage.open()
        turn = await stage.submit(session)
        executor = await stage.running(turn)
    held.release.set()
    await until(lambda: executor.turn is None)

    async with stage.hutchd():
        await executor.dial()

        assert (await stage.ended(turn)).state == "completed"


@pytest.mark.parametrize("ended", [False, True], ids=["still running", "ended meanwhile"])
async def test_a_restart_neither_stops_nor_extends_the_use_of_a_model(stage: Stage, ended: bool) -> None:
    """The processes of a running turn may go on; once its end is known, they may not."""
    held = stage.host.play = _Held()
    async with stage.hutchd():
        session = await stage.open()
        turn = await stage.submit(session)
        executor = await stage.running(turn)
    if ended:
        held.release.set()
        await until(lambda: executor.turn is None)

    async with stage.hutchd():
        await executor.dial()
        between = list(stage.leases.turns)
        held.release.set()
        await stage.ended(turn)
        await until(lambda: not stage.leases.in_turn)

        assert between == [("begin", session.id)] or ended
        assert stage.leases.turns == [("begin", session.id), ("end", session.id)]


async def test_a_turn_whose_executor_died_with_hutchd_fails_as_outcome_unknown(stage: Stage) -> None:
    """It is not run again; queued turns run."""
    stage.host.play = never_end
    async with stage.hutchd():
        session = await stage.open()
        turn = await stage.submit(session, "first")
        executor = await stage.running(turn)
        queued = await stage.submit(session, "second")
    executor.die()

    async with stage.hutchd():
        settled = await stage.ended(turn)
        await stage.running(queued)

        assert (settled.state, settled.reason) == ("failed", "outcome_unknown")
        assert [prompt for _, prompt in stage.host.played] == ["first", "second"]


async def test_a_live_executor_that_does_not_return_is_ended(stage: Stage) -> None:
    """After adopt_timeout it is killed, and its turn is settled."""
    stage.host.play = never_end
    async with stage.hutchd():
        session = await stage.open()
        turn = await stage.submit(session)
        executor = await stage.running(turn)
    stage.settings = settings(executors=ExecutorSettings(spares=0, adopt_timeout=0.05, hello_timeout=WAIT))

    async with stage.hutchd():
        settled = await stage.ended(turn)

        assert executor.exited.is_set()
        assert settled.reason == "outcome_unknown"


async def test_an_executor_that_was_ending_serves_its_session_no_more(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next hutchd never looks it up as the session's executor, not even before it has ended it."""
    async with stage.hutchd():
        session = await stage.open()
        await stage.ended(await stage.submit(session))
        name = stage.executor.spec.executor
        await stage.store.write(lambda tx: executors.update(tx, name, state="draining"))
    found: list[tuple[bool, object]] = []
    adopt = stage.host.adopt

    def look(state: Mapping[str, Any]) -> Launched | None:
        roster = stage.pool.roster
        found.append((roster.by_id[name].over, roster.serving.get(session.id)))
        return adopt(state)

    monkeypatch.setattr(stage.host, "adopt", look)
    async with stage.hutchd():
        ended = await stage.ended(await stage.submit(session))

        assert found == [(True, None)]
        assert ended.state == "completed"


async def test_a_queued_prompt_runs_after_the_restart(stage: Stage) -> None:
    """A prompt that was durable before the reply runs in the next hutchd without any call."""
    stage.host.mute = True
    async with stage.hutchd():
        session = await stage.open()
        turn = await stage.submit(session)
        await until(lambda: len(stage.host.started) == 1)
    stage.host.mute = False
    stage.executor.die()

    async with stage.hutchd():
        ended = await stage.ended(turn)

        assert ended.state == "completed"
        assert len(stage.host.played) == 1


@pytest.mark.parametrize("got_it", [True, False])
async def test_a_prompt_in_dispatch_runs_once(stage: Stage, got_it: bool) -> None:
    """A turn left in `dispatching` is sent again; an executor that has it replies the same and runs it once."""
    held = stage.host.play = _Held()
    async with stage.hutchd():
        session = await stage.open()
        await until(lambda: len(stage.host.started) == 1 and stage.executor.prepared is not None)
        executor = stage.executor
        if got_it:
            turn = await stage.submit(session)
            await stage.running(turn)
        else:
            executor.deaf = True
            turn = await stage.submit(session)

            async def dispatching() -> bool:
                return (await stage.turn(turn)).state == "dispatching"

            await until(dispatching)
        await stage.store.write(lambda tx: turns.move(tx, turn.id, {"running", "dispatching"}, "dispatching"))
    executor.deaf = False

    async with stage.hutchd():
        await executor.dial()
        held.release.set()
        ended = await stage.ended(turn)

        assert ended.state == "completed"
        assert len(stage.host.played) == 1


async def test_a_superseded_executor_gets_lease_lost(stage: Stage) -> None:
    """An executor that returns after another got its session is refused."""
    async with stage.hutchd():
        session = await stage.open()
        await stage.ended(await stage.submit(session, "first"))
        old = stage.executor
        stage.host.unkillable = True
        known = stage.pool.roster.serving.get(session.id)
        assert known is not None
        connection = old.connection
        await stage.pool.end(known, "as if it was lost")
        await stage.ended(await stage.submit(session, "second"))

        with pytest.raises(HutchError) as refused:
            await old.dial()

        assert connection is not None
        assert not connection.open
        assert stage.executor is not old
        assert refused.value.reason in (Reason.LEASE_LOST, Reason.TOKEN_UNKNOWN)


async def test_a_leased_executor_with_an_expired_token_is_admitted(stage: Stage) -> None:
    """If the process matches its launch record, its token is renewed after an outage."""
    stage.host.play = never_end
    async with stage.hutchd():
        turn = await stage.submit(await stage.open())
        executor = await stage.running(turn)
        name = executor.spec.executor
        await stage.store.write(lambda tx: executors.update(tx, name, token_until=0))

    async with stage.hutchd():
        await executor.dial()
        row = await stage.store.read(lambda conn: executors.get(conn, name))

        assert row is not None
        assert row.token_until > 0
        assert (row.token_uses, row.boot_id) == (2, BOOT)


async def test_a_request_made_before_the_restart_is_decided_after_it(stage: Stage) -> None:
    """The record survives; the request that is sent again gets the decision made meanwhile."""
    call = m.ToolCall("c-1", "run_command", "Bash", {"command": "make"}, command="make")
    decided: list[m.PermissionDecision] = []

    async def asks(executor: FakeExecutor, prompt: m.ExecutePrompt) -> TurnEnded:
        while not decided:
            try:
                decided.append(await executor.ask(call, ask="a-1"))
            except (AssertionError, HutchError):
                await anyio.sleep(0.005)
        return TurnEnded("completed", "done", "Done.")

    stage.host.play = never_end
    async with stage.hutchd():
        session = await stage.open()
        turn = await stage.submit(session)
        executor = await stage.running(turn)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(executor.ask, call)
            asked = await stage.pending()
            tasks.cancel_scope.cancel()
        request = m.RequestPermission("", session.id, turn.id, "tool", call, "/proj")
        row = await stage.services.approvals.approvals.get(asked.id)

    async with stage.hutchd():
        answered = await stage.answer(asked, "allow")
        await executor.dial()
        decision = await executor.ask(request.call, ask=row.ask)

        assert answered.state == "allowed"
        assert (decision.decision, decision.input, decision.digest) == ("allow", {"command": "make"}, asked.digest)
        assert (await stage.kinds(session)).count("permission_asked") == 1


async def test_a_default_stop_tells_the_executors_with_a_turn_that_hutchd_leaves(stage: Stage) -> None:
    """They end soon after their turn unless hutchd is back by then; an executor without a turn is ended."""

    async def play(executor: FakeExecutor, prompt: m.ExecutePrompt) -> TurnEnded | None:
        return await (never_end if prompt.prompt == "never end" else say_done)(executor, prompt)

    stage.host.play = play
    async with stage.hutchd():
        turn = await stage.submit(await stage.open(), "never end")
        busy = await stage.running(turn)
        await stage.ended(await stage.submit(await stage.open()))

        await stage.services.host.stop("drain", 0.01)

        told = [params for name, params in busy.calls if name == "shutdown"]
        assert [isinstance(one, m.Shutdown) and one.if_alone is not None for one in told] == [True]
        assert [one.exited.is_set() for one in stage.host.started] == [one is not busy for one in stage.host.started]


async def test_stopping_by_leave_lets_the_turn_run_on(stage: Stage) -> None:
    """`leave` ends no executor of a session; `stop` stops the turn and ends all executors."""
    stage.host.play = never_end
    async with stage.hutchd():
        turn = await stage.submit(await stage.open())
        executor = await stage.running(turn)

        await stage.services.host.stop("leave", 1.0)
        left = executor.exited.is_set()
        told = [name for name, _ in executor.calls if name == "shutdown"]
        with pytest.raises(HutchError) as refused:
            await stage.open()
        await stage.services.host.stop("stop", WAIT)

        assert not left
        assert told == []
        assert refused.value.reason is Reason.SHUTTING_DOWN
        assert executor.exited.is_set()
        assert (await stage.turn(turn)).state == "stopped"
