"""Turns that compact or clear the conversation of the real CLI, and prompts that it may already have got."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import anyio
import pytest

from hutch_shared.events import TurnEnded
from tests.rehearsal import Pause, Refuse, Reply, Request, Say, Use
from tests.sampling import sample
from tests.system.claude_stage import gone, stage

pytestmark = [pytest.mark.system, pytest.mark.timeout(120), sample(3)]

SUMMARY = "<analysis>hm</analysis><summary>They spoke of sheep.</summary>"


def is_summary(request: Request) -> bool:
    """Return whether the request is for a summary of the conversation."""
    return "summary of the conversation" in request.heard


def answer(request: Request) -> Reply:
    """Summarise if asked to, otherwise say a word that nothing else contains."""
    return Say(SUMMARY) if is_summary(request) else Say("baaah")


def cost(end: TurnEnded) -> float:
    """Return the cost of a turn."""
    assert end.usage is not None
    return end.usage.usd or 0.0


async def test_a_conversation_is_compacted(tmp_path: Path) -> None:
    """The agent goes on from the summary. The summary is one request with the prompt cache of the conversation."""
    async with stage(tmp_path, answer) as on:
        empty = await on.turn("", "compact")
        before = await on.turn("Of sheep")
        end = await on.turn("keep the\nsheep", "compact")
        requests = on.model.turns[:]
        after = await on.turn("/status now")

        assert (empty.state, cost(before) > 0, len(requests)) == ("completed", True, 2)
        assert (end.state, end.reason, end.result, end.agent_session) == (
            "completed",
            "completed",
            None,
            before.agent_session,
        )
        assert cost(end) > 0
        assert is_summary(requests[1])
        assert "keep the\nsheep" in requests[1].heard
        for name in ("system", "tools", "model"):
            assert requests[1].body[name] == requests[0].body[name], name
        assert "They spoke of sheep." in str(on.model.turns[2].messages)
        assert "baaah" not in str(on.model.turns[2].messages)
        assert "/status now" in on.model.turns[2].heard
        assert (after.state, after.agent_session, len(on.model.turns)) == ("completed", before.agent_session, 3)
        assert cost(after) < 2 * cost(before)
        assert {"compacting", "compacted"} <= {*on.daemon.notices()}


async def test_a_conversation_that_cannot_be_compacted_goes_on(tmp_path: Path) -> None:
    """The provider fails, or the user interrupts: the turn says so, and the conversation is as it was.

    The CLI may count nothing of a summary that it did not get; then what the turn used is unknown.
    """
    pause = Pause()
    summary: Reply = Refuse(400)

    def script(request: Request) -> Reply:
        return summary if is_summary(request) else Say("baaah")

    async with stage(tmp_path, script) as on:
        await on.turn("Of sheep")
        failed = await on.turn("", "compact")
        summary = [Say("<sum"), pause]
        assert on.daemon.notices().count("usage_unknown") == 1
        ends: list[TurnEnded] = []
        async with anyio.create_task_group() as group:

            async def compact() -> None:
                ends.append(await on.turn("", "compact"))

            group.start_soon(compact)
            await pause.reached.wait()
            await on.runner.interrupt()
        pause.release.set()
        after = await on.turn("And?")

        assert (failed.state, failed.reason) == ("failed", "compact_failed")
        assert "refused by the script" in failed.message
        assert [(end.state, end.reason) for end in ends] == [("stopped", "interrupted")]
        assert on.daemon.notices().count("usage_unknown") == (1 if ends[0].usage else 2)
        assert after.state == "completed"
        assert "baaah" in str(on.model.turns[-1].messages)


async def test_a_cleared_conversation_leaves_no_traces(tmp_path: Path) -> None:
    """The next prompt begins another conversation with the request that a new session would send."""
    async with stage(tmp_path, answer) as on:
        first = await on.turn("Of sheep")
        cleared = await on.turn("", "clear")
        again = await on.turn("Of sheep")

        assert (cleared.state, cleared.agent_session, cleared.usage) == ("completed", None, None)
        assert again.agent_session not in (None, first.agent_session)
        one, two = on.model.turns
        assert [message["role"] for message in two.messages] == ["user"]
        assert len(two.raw) == len(one.raw)
        assert cost(again) < 1.5 * cost(first)


async def test_a_cleared_fork_has_nothing_of_its_parent(tmp_path: Path) -> None:
    """A fork that is cleared before its first prompt does not continue its parent."""
    async with stage(tmp_path, answer) as on:
        parent = await on.turn("Of sheep")
    async with stage(tmp_path, answer, resume=parent.agent_session, fork=True) as on:
        await on.turn("", "clear")
        await on.turn("Of what?")

        assert "sheep" not in str(on.model.turns[-1].messages)


@pytest.mark.parametrize("forked", [False, True], ids=["begun", "forked"])
async def test_a_conversation_outlives_an_executor_that_dies_in_its_first_turn(tmp_path: Path, forked: bool) -> None:
    """hutchd does not know its id yet. Once it is cleared, the next executor begins another one."""
    pause = Pause()

    def script(request: Request) -> Reply:
        if request.heard.endswith("Of goats"):
            return Use("Bash", {"command": "true"})
        return [Say("half"), pause] if "toolu" in str(request.messages[-1]) else Say("baaah")

    parent: str | None = None
    elsewhere = tmp_path / "agents" / "parent"
    if forked:
        async with stage(tmp_path, script, agent_dir=elsewhere) as on:
            parent = (await on.turn("Of sheep")).agent_session
    given: dict[str, Any] = {"resume": parent, "fork": forked, "resume_from": (str(elsewhere),)}
    async with stage(tmp_path, script, **given) as on, anyio.create_task_group() as group:
        group.start_soon(on.turn, "Of goats")
        await pause.reached.wait()
        group.cancel_scope.cancel()
    pause.release.set()
    async with stage(tmp_path, script, **given) as on:
        known = on.prepared.agent_session
        after = await on.turn("And?")
        messages = str(on.model.turns[-1].messages)
        await on.turn("", "clear")
    async with stage(tmp_path, script) as on:
        cleared = await on.turn("And?")

        assert known == after.agent_session not in (None, parent)
        assert "Of goats" in messages
        assert ("Of sheep" in messages) is forked
        assert cleared.agent_session not in (None, known)
        assert "Of goats" not in str(on.model.turns[-1].messages)


async def test_an_offered_prompt_runs_only_if_the_agent_never_got_it(tmp_path: Path) -> None:
    """The CLI is killed in the middle of a turn. Its prompt is known afterwards, another one is not."""
    pause = Pause()

    def script(request: Request) -> Reply:
        if request.fresh:
            return [Say("half"), pause]
        return Use("Bash", {"command": "touch ran"}) if "once" in request.heard else Say("ok")

    async with stage(tmp_path, script) as on:
        first = await on.turn("first")
        async with anyio.create_task_group() as group:
            group.start_soon(lambda: on.turn("once", turn="t-once"))
            await pause.reached.wait()
            pid = on.pid
            os.kill(pid, signal.SIGKILL)
        pause.release.set()
        assert await gone(pid)
    (tmp_path / "work" / "ran").unlink()
    async with stage(tmp_path, script, resume=first.agent_session) as on:
        again = await on.turn("once", turn="t-once", offered=True)
        unasked = len(on.model.turns)
        other = await on.turn("twice", turn="t-other", offered=True)
        assert (again.state, again.reason) == ("failed", "outcome_unknown")
        assert (unasked, other.state, other.result) == (0, "completed", "ok")
        assert not (on.cwd / "ran").exists()
    async with stage(tmp_path, script, resume=other.agent_session) as on:
        with anyio.fail_after(30):
            dropped = await on.turn("twice", turn="t-other")  # the conversation contains it: the CLI itself drops it

        assert (dropped.state, dropped.reason, on.model.turns) == ("failed", "outcome_unknown", [])
