"""Prompts whose executor dies before it accepts them; conversations that are compacted and cleared. In a whole host."""

from __future__ import annotations

import os
import signal

import anyio
import pytest

from hutch_client.client import HutchClient
from hutch_shared import messages as m
from tests.rehearsal import Model, Pause, Reply, Request, Say, Step, Steps, Use, anything, serve
from tests.system.host import KEY, Host, host, settings_for
from tests.system.log import log_of, wait_for

pytestmark = [pytest.mark.system, pytest.mark.timeout(120)]

OK = Step(anything, Say("ok"), None)


async def executor_of(hutch: HutchClient, session: m.Session) -> int:
    """Return the process id of a session's executor."""
    (pid,) = [one.pid for one in (await hutch.get_status()).executors if one.session == session.id]
    return pid


async def test_a_prompt_to_an_executor_that_is_dying_runs_in_the_next_one(
    claude_host: Host, hutch: HutchClient, model: Model
) -> None:
    """The executor stands still when it gets the prompt, and is killed: the agent never got it."""
    model.script = Steps(OK)
    session = await claude_host.claude(hutch, "dying")
    async with log_of(hutch, session) as log:
        await log.ended(await hutch.submit_prompt(session.id, "remember the sheep"))
        before, pid = len(model.turns), await executor_of(hutch, session)
        os.kill(pid, signal.SIGSTOP)
        turn = await hutch.submit_prompt(session.id, "/status of what?")
        with anyio.fail_after(60):
            while (await hutch.get_turn(turn.id)).state != "dispatching":
                await anyio.sleep(0.02)
        os.kill(pid, signal.SIGKILL)
        end = await log.ended(turn)

        assert (end.state, end.result) == ("completed", "ok")
        assert await executor_of(hutch, session) != pid
        (request,) = model.turns[before:]
        assert request.heard == "/status of what?"
        assert "remember the sheep" in str(request.messages)


async def test_an_executor_that_dies_at_the_moment_of_accepting_is_replaced() -> None:
    """It is killed after it has accepted the prompt and before the agent gets it."""
    async with serve(key=KEY, script=Steps(OK)) as model, host(settings_for(model), start=False, double=True) as made:
        mark = made.root / "mark"
        mark.touch()
        await made.start(env={"HUTCH_FAILPOINT": "executor.accepted", "HUTCH_FAILPOINT_MARK": str(mark)})
        await made.hutch("key", "add", "anthropic", input=KEY)
        done = await made.hutch("run", "--name", "killed", "-C", str(made.folder("killed")), "go")

        assert not mark.exists()
        assert "ok" in done.out
        assert [one.heard for one in model.turns] == ["go"]


async def test_a_prompt_that_the_agent_got_does_not_run_again() -> None:
    """hutchd dies when the prompt is accepted, then its executor in mid-turn: the next executor finds the prompt."""
    pause = Pause()

    def script(request: Request) -> Reply:
        if request.fresh:
            return [Say("half"), pause]
        return Use("Read", {"file_path": "sheep.txt"}) if request.heard == "go" else Say("ok")

    async with serve(key=KEY, script=script) as model, host(settings_for(model), start=False, double=True) as made:
        mark = made.root / "mark"
        await made.start(env={"HUTCH_FAILPOINT": "turn.accepted:2", "HUTCH_FAILPOINT_MARK": str(mark)})
        await made.hutch("key", "add", "anthropic", input=KEY)
        async with made.client() as hutch:
            session = await made.claude(hutch, "known")
            async with log_of(hutch, session) as log:
                await log.ended(await hutch.submit_prompt(session.id, "first"))
                pid = await executor_of(hutch, session)
                mark.touch()
                turn = await hutch.submit_prompt(session.id, "go")
                await made.exited()
                await model.until(lambda model: model.turns[-1].heard == "go")
                transcripts = made.state / "spool" / "agents"
                await wait_for(lambda: any(b'"go"' in path.read_bytes() for path in transcripts.rglob("*.jsonl")))
                os.kill(pid, signal.SIGKILL)
                await made.start()
                end = await log.ended(turn)
                then = await log.ended(await hutch.submit_prompt(session.id, "and then?"))

        assert (end.state, end.reason) == ("failed", "outcome_unknown")
        assert then.state == "completed"
        assert [one.heard for one in model.turns].count("go") == 1


async def test_a_conversation_is_compacted_and_cleared(claude_host: Host, hutch: HutchClient, model: Model) -> None:
    """Both commands say what they cost; `hutch usage` counts it."""
    model.script = Steps(
        ("summary of the conversation", Say("<summary>They spoke of goats.</summary>")),
        Step(anything, Say("baaah"), None),
    )
    folder, before = claude_host.folder("conversation"), len(model.turns)
    await claude_host.hutch("run", "--name", "talk", "-C", str(folder), "of sheep")
    compacted = await claude_host.hutch("compact", "talk", "keep", "the", "goats")
    await claude_host.hutch("run", "--session", "talk", "/clear is a word")
    after = model.turns[-1]
    cleared = await claude_host.hutch("clear", "talk")
    await claude_host.hutch("run", "--session", "talk", "of what?")
    turns = (await claude_host.hutch("inspect", "talk", "-o", "json")).json["all_turns"]
    refused = await claude_host.hutch("run", "--name", "played", "--agent", "script", "-C", str(folder), "hello")
    nothing = await claude_host.hutch("compact", "played", code=2)

    assert "✓ done" in compacted.err
    assert "$" in compacted.err
    assert "goes on from a summary" in compacted.err
    assert "keep the goats" in model.turns[before + 1].heard
    assert "They spoke of goats." in str(after.messages)
    assert "of sheep" not in str(after.messages)
    assert "/clear is a word" in after.heard
    assert "begins a new conversation" in cleared.err
    assert "$" not in cleared.err
    assert [message["content"] for message in model.turns[-1].messages] == ["of what?"]
    assert [turn.get("kind", "prompt") for turn in turns] == ["prompt", "compact", "prompt", "clear", "prompt"]
    assert turns[1]["usage"]["usd"] > 0
    assert "usage" not in turns[3]
    assert refused.code == 0
    assert "keeps none" in nothing.err
