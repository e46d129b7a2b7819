"""hutchd is killed at busy moments of Claude's turns: nothing is lost, nothing runs twice."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from hutch_shared import messages as m
from tests.rehearsal import Pause, Say, Step, Steps, Use, anything, serve
from tests.system import processes
from tests.system.host import KEY, host, settings_for
from tests.system.log import log_of, wait_for, without_gaps

pytestmark = pytest.mark.system


async def test_a_killed_hutchd_loses_neither_the_turn_nor_its_request() -> None:
    """The next hutchd adopts the executor, the decision reaches it, and the record has each event once."""
    script = Steps(
        ("go", [Say("I ask first.", chunks=3), Use("Bash", {"command": "echo once >> ran; cat ran"})]),
        ("once", Say("It ran.", chunks=3)),
    )
    async with serve(key=KEY, script=script) as model, host(settings_for(model), double=True) as made:
        await made.hutch("key", "add", "anthropic", input=KEY)
        async with made.client() as hutch:
            session = await made.claude(hutch, "killed", "ask")
            async with log_of(hutch, session) as log:
                turn = await hutch.submit_prompt(session.id, "go")
                asked = await log.asked()
                await made.kill()
                await made.start()
                waiting = await hutch.list_permissions(m.ListPermissions(session.id))
                await made.hutch("approve", asked.id)
                end = await log.ended(turn)
                logged = await made.hutch("logs", session.id, "-o", "jsonl")
                status = await hutch.get_status()

        record = [json.loads(line) for line in logged.out.splitlines()]
        assert [one.id for one in waiting] == [asked.id]
        assert (end.state, end.result) == ("completed", "It ran.")
        assert Path(session.cwd, "ran").read_text() == "once\n"
        assert without_gaps(log.events)
        assert [event["seq"] for event in record] == [event.seq for event in log.events]
        assert [event["kind"] for event in record].count("tool_call") == 1
        assert "".join(one.text for one in log.of("text_delta")) == "I ask first.It ran."
        assert [one.adopted for one in status.executors if one.session == session.id] == [True]
        assert len(model.turns) == 2


async def test_events_while_hutchd_is_down_are_not_lost() -> None:
    """The executor keeps the events and sends them later; the turn may even end meanwhile."""
    pause = Pause()
    script = Steps(
        ("go", [Say("before, ", chunks=4), pause, Say("meanwhile", chunks=40)]), Step(anything, Say("ok"), None)
    )
    async with serve(key=KEY, script=script) as model, host(settings_for(model), double=True) as made:
        await made.hutch("key", "add", "anthropic", input=KEY)
        async with made.client() as hutch:
            session = await made.claude(hutch, "down")
            async with log_of(hutch, session) as log:
                turn = await hutch.submit_prompt(session.id, "go")
                queued = await hutch.submit_prompt(session.id, "and then")
                await log.until(lambda log: len(log.of("text_delta")) == 4)
                await made.kill()
                pause.release.set()
                await wait_for(lambda: any(b"meanwhile" in path.read_bytes() for path in _files(made.state / "spool")))
                await made.start()
                end = await log.ended(turn)
                then = await log.ended(queued)

                assert end.result == "before, meanwhile"
                assert "".join(one.text for one in log.of("text_delta")) == "before, meanwhileok"
                assert then.state == "completed"
                assert without_gaps(log.events)
                assert [one.heard for one in model.turns] == ["go", "and then"]


async def test_after_an_orderly_restart_the_conversation_goes_on() -> None:
    """hutchd ended its executors; a new one starts, and the model gets the earlier conversation."""
    script = Steps(("remember the sheep", Say("I will")), Step(anything, Say("ok"), None))
    async with serve(key=KEY, script=script) as model, host(settings_for(model), double=True) as made:
        await made.hutch("key", "add", "anthropic", input=KEY)
        await made.hutch("run", "--name", "sheep", "remember the sheep")
        code = await made.stop()
        left = [one for one in processes.marked(made.mark) if "hutch_broker" not in one.command]
        await made.start()
        await made.hutch("run", "--session", "sheep", "what was it?")

        assert code == 0
        assert left == []
        assert "remember the sheep" in json.dumps(model.turns[-1].messages)
        assert "I will" in json.dumps(model.turns[-1].messages)


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file())
