"""An agent in a sandbox whose broker directory was removed and made again."""

from __future__ import annotations

import os
import shutil

import pytest

from tests.programs import bubblewrap
from tests.rehearsal import Say, Use, serve
from tests.rehearsal.parts import Reply, Request
from tests.system.host import KEY, host, settings_for
from tests.system.log import log_of, wait_for

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]


async def test_the_next_prompt_works_after_the_runtime_directory_was_made_again() -> None:
    """Between turns the agent starts again, with its conversation; a turn that runs fails as `broker_lost`."""
    bubblewrap()
    steps = "touch begun; while [ ! -e go ]; do sleep 0.05; done"

    def script(request: Request) -> Reply:
        if request.prompt == "wait" and not request.results:
            return Use("Bash", {"command": steps})
        return Say("noted")

    async with serve(key=KEY, script=script) as model:
        settings = settings_for(model, "[executors]\nspares = 0\n")
        async with host(settings, double=True) as made:
            await made.hutch("key", "add", "anthropic", input=KEY)

            async def make_again() -> None:
                shutil.rmtree(made.runtime)
                made.runtime.mkdir(mode=0o700)
                await wait_for(lambda: made.socket.exists() and len(list(made.runtime.rglob("broker.sock"))) == 1)

            async with made.client() as hutch:
                session = await made.claude(hutch, "work")
            async with made.client() as hutch, log_of(hutch, session) as log:
                first = await log.play(session, "apples are red")
            await make_again()
            async with made.client() as hutch, log_of(hutch, session) as log:
                second = await log.play(session, "what is red?")
                turn = await hutch.submit_prompt(session.id, "wait")
                await wait_for(lambda: os.path.exists(os.path.join(session.cwd, "begun")))
            await make_again()
            (made.work / "work" / "go").touch()
            async with made.client() as hutch, log_of(hutch, session) as log:
                third = await log.ended(turn)
                fourth = await log.play(session, "still red?")

    assert session.isolation.level == "reduced"
    assert [end.state for end in (first, second, third, fourth)] == ["completed", "completed", "failed", "completed"]
    assert third.reason == "broker_lost"
    assert "apples are red" in str(model.turns[-1].messages)
