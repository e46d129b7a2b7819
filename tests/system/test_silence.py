"""Silence of the model or the CLI ends a Claude turn, on real processes, after the configured time."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator

import pytest

from hutch_client.client import HutchClient
from tests.rehearsal import Model, Pause, Say, Stall, Step, Steps, anything
from tests.system import processes
from tests.system.host import KEY, Host, host, settings_for
from tests.system.log import cli_of, goes_on, log_of, wait_for

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
async def claude_host(model: Model) -> AsyncIterator[Host]:
    """A host with a short limit for a silent stream; the CLI itself accepts no less than 10 seconds."""
    async with host(settings_for(model, "stream_idle = 6\n").replace("retries = 1", "retries = 0")) as made:
        await made.hutch("key", "add", "anthropic", input=KEY)
        yield made


async def test_a_stream_that_stalls_fails_the_turn(claude_host: Host, hutch: HutchClient, model: Model) -> None:
    """The stream stalls after half a reply. The session continues with the next prompt."""
    model.script = Steps(Step(anything, [Say("half"), Stall()], None))
    session = await claude_host.claude(hutch, "stalled")
    async with log_of(hutch, session) as log:
        end = await log.play(session, "go")

        assert (end.state, end.reason) == ("failed", "stream_stalled")
        await goes_on(log, model, session)


async def test_a_cli_that_is_stopped_fails_the_turn(claude_host: Host, hutch: HutchClient, model: Model) -> None:
    """The stopped CLI is ended, and a new one continues the conversation."""
    model.script = Steps(("go", [Say("half"), Pause()]))
    session = await claude_host.claude(hutch, "stopped")
    async with log_of(hutch, session) as log:
        turn = await hutch.submit_prompt(session.id, "go")
        await log.until(lambda log: log.of("text_delta"))
        stopped = await cli_of(hutch, session)
        os.kill(stopped, signal.SIGSTOP)
        end = await log.ended(turn)

        assert (end.state, end.reason) == ("failed", "agent_stuck")
        await wait_for(lambda: not processes.alive(stopped))
        await goes_on(log, model, session)
