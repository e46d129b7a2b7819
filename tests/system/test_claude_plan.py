"""The mode `plan` of the real CLI and the session's mode are the same."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from hutch_executor.runners.claude.connection import ClaudeConnection
from tests.rehearsal import Pause, Say, Step, Steps, Use, anything
from tests.system.claude_stage import Stage, gone, stage

pytestmark = [pytest.mark.system, pytest.mark.timeout(120)]


async def test_an_agent_that_may_enter_plan_mode_stays_in_it(tmp_path: Path) -> None:
    """The CLI is in plan mode for the rest of the turn, in the next turn, and after it was started again."""
    script = Steps(("go", Use("EnterPlanMode", {})), Step(anything, Say("ok"), None))
    async with stage(tmp_path, script, mode="ask") as on:
        await on.turn()
        await on.turn("and now?")
        link = on.runner.connection
        assert link is not None
        mode = link.translator.mode
        pid = on.pid
        link.process.kill()
        assert await gone(pid)
        await on.turn("and then?")
        again = on.runner.connection or await _after(on)

        assert (mode, again.translator.mode) == ("plan", "plan")
        assert "agent_mode" not in on.daemon.notices()
        for request in on.model.turns[1:]:
            assert "plan mode is active" in request.raw.decode().lower()


async def _after(on: Stage) -> ClaudeConnection:
    """Run another turn, since the last one met the end of the CLI; return its CLI."""
    await on.turn("and now?")
    assert on.runner.connection is not None
    return on.runner.connection


async def test_a_cli_that_is_in_another_mode_is_set_back(tmp_path: Path) -> None:
    """The user reads that it happened."""
    pause = Pause()
    async with stage(tmp_path, Steps(("go", [Say("half"), pause]), Step(anything, Say("ok"), None)), mode="ask") as on:
        async with anyio.create_task_group() as group:
            group.start_soon(on.turn)
            await pause.reached.wait()
            link = on.runner.connection
            assert link is not None
            await link.process.control("set_permission_mode", mode="plan")
            await on.daemon.until(lambda daemon: "agent_mode" in daemon.notices())
            pause.release.set()
        await on.turn("again")
        last = on.runner.connection

        assert on.daemon.notices().count("agent_mode") == 1
        assert last is not None
        assert last.translator.mode == "default"
