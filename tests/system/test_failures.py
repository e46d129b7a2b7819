"""Each way in which a turn of Claude can fail, on real processes: a terminal state with a reason, in bounded time.

After each of them the session takes the next prompt.
"""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from hutch_client.client import HutchClient
from hutch_shared import messages as m
from tests.rehearsal import Drop, Model, Pause, Refuse, Reply, Say, Step, Steps, Use, anything
from tests.sampling import sample
from tests.system import processes
from tests.system.host import KEY, Host, host, settings_for
from tests.system.log import cli_of, executor_of, goes_on, log_of, wait_for

pytestmark = pytest.mark.system

Find = Callable[[HutchClient, m.Session], Awaitable[int]]

OK = Step(anything, Say("ok"), None)


@pytest.fixture(scope="module")
async def claude_host(model: Model) -> AsyncIterator[Host]:
    """A host with short limits for the end of an interrupt."""
    async with host(settings_for(model, "interrupt_grace = 1\n"), double=True) as made:
        await made.hutch("key", "add", "anthropic", input=KEY)
        yield made


@sample(2)
@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (Refuse(400), "bad_request"),
        (Refuse(401), "auth_failed"),
        (Refuse(429, retry_after=0), "rate_limited"),
        (Refuse(500), "provider_error"),
        (Refuse(529), "overloaded"),
        ([Say("half"), Drop()], "stream_broken"),
    ],
    ids=["400", "401", "429", "500", "529", "dropped stream"],
)
async def test_a_failing_provider_fails_the_turn_with_a_reason(
    claude_host: Host, hutch: HutchClient, model: Model, reply: Reply, reason: str
) -> None:
    """The turn's last event and its record have a sentence, followed by the provider's message."""
    model.script = Steps(Step(anything, reply, None))
    session = await claude_host.claude(hutch, reason)
    async with log_of(hutch, session) as log:
        turn = await hutch.submit_prompt(session.id, "go")
        end = await log.ended(turn)
        record = await hutch.get_turn(turn.id)

        assert (end.state, end.reason) == ("failed", reason)
        assert end.message[0].isupper()
        assert end.message.endswith((".", ")"))
        assert (record.state, record.reason, record.message) == ("failed", reason, end.message)
        assert record.ended_at is not None
        await goes_on(log, model, session)


async def test_a_temporary_failure_is_reported_and_survived(
    claude_host: Host, hutch: HutchClient, model: Model
) -> None:
    """The retry is an event, and the turn completes."""
    model.script = Steps((anything, Refuse(500)), OK)
    session = await claude_host.claude(hutch, "passes")
    async with log_of(hutch, session) as log:
        end = await log.play(session, "go")

        assert end.state == "completed"
        assert "retrying" in [notice.word for notice in log.of("notice")]


async def test_a_wrong_key_fails_the_turn_and_a_right_one_fixes_it(
    claude_host: Host, hutch: HutchClient, model: Model
) -> None:
    """A key that the provider refuses has its own reason; a new key applies from the next session on."""
    await claude_host.hutch("key", "add", "anthropic", input="sk-ant-a-wrong-key-of-this-host-000")
    wrong = await claude_host.claude(hutch, "wrong")
    async with log_of(hutch, wrong) as log:
        refused = await log.play(wrong, "go")
    await claude_host.hutch("key", "rm", "anthropic")
    none = await claude_host.claude(hutch, "none")
    async with log_of(hutch, none) as log:
        missing = await log.play(none, "go")
    await claude_host.hutch("key", "add", "anthropic", input=KEY)
    async with log_of(hutch, none) as log:
        await goes_on(log, model, none)

    assert (refused.state, refused.reason) == ("failed", "auth_failed")
    assert (missing.state, missing.reason) == ("failed", "no_key")
    assert "hutch key add" in missing.message


@pytest.mark.parametrize(
    ("find", "reason"),
    [(cli_of, "agent_died"), (executor_of, "executor_lost")],
    ids=["CLI", "executor"],
)
async def test_a_process_that_dies_fails_the_turn_with_a_reason(
    claude_host: Host, hutch: HutchClient, model: Model, find: Find, reason: str
) -> None:
    """The process dies during the stream, when no more output would come."""
    pause = Pause()
    model.script = Steps(("go", [Say("half"), pause]), OK)
    session = await claude_host.claude(hutch, reason)
    async with log_of(hutch, session) as log:
        turn = await hutch.submit_prompt(session.id, "go")
        await log.until(lambda log: log.of("text_delta"))
        hit = await find(hutch, session)
        os.kill(hit, signal.SIGKILL)
        end = await log.ended(turn)

        assert (end.state, end.reason) == ("failed", reason)
        await wait_for(lambda: not processes.alive(hit))
        await goes_on(log, model, session)


async def test_an_executor_that_hangs_is_ended_when_its_turn_is_interrupted(
    claude_host: Host, hutch: HutchClient, model: Model
) -> None:
    """Its CLI ends too, within the configured grace. After the interrupt returns, none of its processes is left."""
    pause = Pause()
    model.script = Steps(("go", [Say("half"), pause]), OK)
    session = await claude_host.claude(hutch, "hangs")
    async with log_of(hutch, session) as log:
        turn = await hutch.submit_prompt(session.id, "go")
        await log.until(lambda log: log.of("text_delta"))
        executor = await executor_of(hutch, session)
        family = processes.family(executor)
        os.kill(executor, signal.SIGSTOP)
        await hutch.interrupt_turn(session.id)
        left = [one for one in family if processes.alive(one.pid)]
        end = await log.ended(turn)

        assert (end.state, end.reason) == ("stopped", "interrupted")
        assert len(family) > 1
        assert left == []
        await goes_on(log, model, session)


async def test_a_turn_that_takes_too_long_times_out(claude_host: Host, model: Model) -> None:
    """`--timeout` limits the turn; its tool ends with it, and the exit code says so."""
    model.script = Steps(("go", Use("Bash", {"command": "sleep 600"})), OK)
    cwd = str(claude_host.folder("timeout"))
    ran = await claude_host.hutch("run", "-C", cwd, "--mode", "bypass", "--timeout", "2", "-o", "json", "go", code=124)

    assert ran.json["state"] == "timed_out"
    await wait_for(lambda: not any(one.command == "sleep 600" for one in processes.family(claude_host.pid)))


async def test_the_limit_of_model_requests_ends_the_turn(claude_host: Host, hutch: HutchClient, model: Model) -> None:
    """The turn fails, and its message names the limit."""
    model.script = Steps(Step(anything, Use("Bash", {"command": "true"}), None))
    session = await claude_host.claude(hutch, "requests", limits=m.Limits(max_turns=2))
    async with log_of(hutch, session) as log:
        end = await log.play(session, "go")

        assert (end.state, end.reason) == ("failed", "max_turns")
