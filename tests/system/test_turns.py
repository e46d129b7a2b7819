"""The actions of a user in a Claude turn, on real processes: decide, edit, stop, resume, fork."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

from hutch_client.client import HutchClient
from hutch_shared import messages as m
from tests.client.terminal import at_terminal
from tests.rehearsal import Cut, Model, Pause, Reply, Request, Say, Step, Steps, Use, anything
from tests.system import processes
from tests.system.host import Host
from tests.system.log import DEADLINE, allow, executor_of, log_of, wait_for, without_gaps

pytestmark = pytest.mark.system

OK = Step(anything, Say("ok"), None)


async def test_a_denial_reaches_the_model_with_the_users_message(
    claude_host: Host, hutch: HutchClient, model: Model
) -> None:
    """A denied call does not run, and the agent gets the reason."""
    model.script = Steps(("tidy up", Use("Bash", {"command": "rm -r ."})), ("not before lunch", Say("then later")), OK)
    session = await claude_host.claude(hutch, "deny", "ask")
    kept = Path(session.cwd, "kept")
    kept.touch()
    async with log_of(hutch, session) as log:
        turn = await hutch.submit_prompt(session.id, "tidy up")
        asked = await log.asked()
        await claude_host.hutch("deny", asked.id, "-m", "not before lunch")
        end = await log.ended(turn)

        assert (end.state, end.result) == ("completed", "then later")
        assert [(one.state, one.message) for one in log.of("permission_settled")] == [("denied", "not before lunch")]
        assert kept.exists()


async def test_an_input_that_the_user_edited_is_what_runs(claude_host: Host, hutch: HutchClient, model: Model) -> None:
    """`hutch approve --edit` opens the editor; the model's own input does not run, and the record has both digests."""
    model.script = Steps(("go", Use("Bash", {"command": "touch asked"})), OK)
    session = await claude_host.claude(hutch, "changed", "ask")
    editor = claude_host.root / "editor"
    editor.write_text('#!/bin/sh\necho touch judged > "$1"\n')
    editor.chmod(0o700)
    async with log_of(hutch, session) as log:
        turn = await hutch.submit_prompt(session.id, "go")
        asked = await log.asked()
        await claude_host.hutch("approve", asked.id, "--edit", env={"EDITOR": str(editor)})
        end = await log.ended(turn)
        settled = (await hutch.list_permissions(m.ListPermissions(session.id, None)))[0]

        assert end.state == "completed"
        assert [path.name for path in Path(session.cwd).iterdir()] == ["judged"]
        assert settled.decided_digest == log.of("tool_result")[0].digest != settled.digest


async def test_a_call_that_a_rule_allows_needs_no_user(claude_host: Host, model: Model) -> None:
    """`hutch run --allow` completes without a user, with the model that the user named."""
    model.script = Steps(("go", Use("Bash", {"command": "echo allowed"})), ("allowed", Say("by a rule")))
    cwd = str(claude_host.folder("rule"))
    ran = await claude_host.hutch(
        "run", "-C", cwd, "--no-input", "--allow", "Bash(echo:*)", "--model", "claude-of-choice", "-o", "json", "go"
    )

    assert ran.json["result"] == "by a rule"
    assert {request.body["model"] for request in model.turns[-2:]} == {"claude-of-choice"}


async def test_an_interrupt_during_a_tool_stops_the_tool_and_nothing_starts_after_it(
    claude_host: Host, hutch: HutchClient, model: Model
) -> None:
    """After `hutch interrupt` returns the turn starts nothing more, and the session continues with the next prompt."""
    calls = [Use("Bash", {"command": "sleep 611.5"}), Use("Bash", {"command": "touch late"})]
    model.script = Steps(("go", calls), OK)
    session = await claude_host.claude(hutch, "interrupt")
    async with log_of(hutch, session) as log:
        turn = await hutch.submit_prompt(session.id, "go")
        await wait_for(lambda: processes.running("sleep 611.5"))
        await claude_host.hutch("interrupt", session.name)
        requests = len(model.turns)
        end = await log.ended(turn)
        running = processes.running("sleep 611.5")
        again = await log.play(session, "once more")

        assert (end.state, end.reason) == ("stopped", "interrupted")
        assert not running
        assert not Path(session.cwd, "late").exists()
        assert len(model.turns) == requests + 1
        assert again.state == "completed", again
        assert without_gaps(log.events)


async def test_two_sessions_in_one_directory_are_separate_and_warned(
    claude_host: Host, hutch: HutchClient, model: Model
) -> None:
    """Each has its own conversation and its own request; the requests are decided in any order."""

    def script(request: Request) -> Reply:
        if request.fresh:
            return Say(f"{request.fresh[0].text.strip()} of {request.prompt}")
        return Use("Bash", {"command": f"echo {request.prompt} > {request.prompt}; cat {request.prompt}"})

    model.script = script
    first = await claude_host.claude(hutch, "two", "ask")
    second = await claude_host.claude(hutch, "two", "ask")
    async with log_of(hutch, first) as one, log_of(hutch, second) as two:
        turns = [await hutch.submit_prompt(first.id, "left"), await hutch.submit_prompt(second.id, "right")]
        questions = [await one.asked(), await two.asked()]
        for asked in reversed(questions):
            await hutch.answer_permission(allow(asked))
        ends = [await one.ended(turns[0]), await two.ended(turns[1])]

        assert first.warning is None
        assert first.name in (second.warning or "")
        assert [asked.session for asked in questions] == [first.id, second.id]
        assert [end.result for end in ends] == ["left of left", "right of right"]


async def test_a_session_continues_in_a_new_executor(claude_host: Host, hutch: HutchClient, model: Model) -> None:
    """After its executor is killed, the next prompt gets another, and the model gets the whole conversation."""
    model.script = Steps(("remember the sheep", Say("I will")), OK)
    session = await claude_host.claude(hutch, "resume")
    async with log_of(hutch, session) as log:
        await log.play(session, "remember the sheep")
        before = await hutch.get_session(session.id)
        left = processes.family(await executor_of(hutch, session))
        processes.kill(left[:1])
        with anyio.fail_after(DEADLINE):
            while (await hutch.get_session(session.id)).executor is not None:
                await anyio.sleep(0.02)
        end = await log.play(session, "what was it?")
        after = await hutch.get_session(session.id)

        assert end.state == "completed", end
        said = json.dumps(model.turns[-1].messages)
        assert "remember the sheep" in said
        assert "I will" in said
        assert after.executor != before.executor
        assert after.agent_session == before.agent_session
        assert not [one for one in left if processes.alive(one.pid)]


async def test_a_fork_continues_the_conversation_and_leaves_the_original_unchanged(
    claude_host: Host, hutch: HutchClient, model: Model
) -> None:
    """Both sessions know the conversation before the fork, and neither knows the other's later part."""
    model.script = Steps(OK)
    session = await claude_host.claude(hutch, "fork")
    async with log_of(hutch, session) as log:
        await log.play(session, "remember the sheep")
        made = await claude_host.hutch("fork", session.id, "--name", "the fork")
        fork = await hutch.get_session(made.out.strip())
        async with log_of(hutch, fork) as forked:
            end = await forked.play(fork, "only the fork knows")
        told_fork = json.dumps(model.turns[-1].messages)
        await log.play(session, "go on")
        told = json.dumps(model.turns[-1].messages)

        assert (fork.name, fork.forked_from, fork.cwd) == ("the fork", session.id, session.cwd)
        assert end.state == "completed", end
        assert "remember the sheep" in told_fork
        assert "remember the sheep" in told
        assert "only the fork knows" not in told


async def test_closing_a_session_ends_the_processes_of_its_tools(
    claude_host: Host, hutch: HutchClient, model: Model
) -> None:
    """When `hutch stop` returns, even an orphan in its own session is gone."""
    leave = "(setsid sleep 612.5 < /dev/null > /dev/null 2>&1 &)"
    model.script = Steps(("go", Use("Bash", {"command": leave})), OK)
    session = await claude_host.claude(hutch, "stop")
    async with log_of(hutch, session) as log:
        await log.play(session, "go")
        await wait_for(lambda: processes.running("sleep 612.5"))
        await claude_host.hutch("stop", session.id)
        running = processes.running("sleep 612.5")

        assert not running
        assert (await hutch.get_session(session.id)).state == "closed"


async def test_an_agents_question_gets_the_users_answer(claude_host: Host, hutch: HutchClient, model: Model) -> None:
    """`hutch answer` takes numbers and words, one for each question, in every mode."""
    choices = [{"label": name, "description": name} for name in ("Sheep", "Goats")]
    asked_for = [
        {"question": "Which animals?", "header": "Animals", "options": choices, "multiSelect": False},
        {"question": "Which colours?", "header": "Colours", "options": choices, "multiSelect": True},
    ]
    model.script = Steps(("go", Use("AskUserQuestion", {"questions": asked_for})), OK)
    session = await claude_host.claude(hutch, "question")
    async with log_of(hutch, session) as log:
        turn = await hutch.submit_prompt(session.id, "go")
        asked = await log.asked()
        await claude_host.hutch("approve", asked.id, code=2)
        await claude_host.hutch("answer", asked.id, "2", "blue, 1")
        end = await log.ended(turn)

        assert (asked.kind, [one.several for one in asked.questions]) == ("question", [False, True])
        assert end.state == "completed"
        told = model.turns[-1].results[-1].text
        assert '"Which animals?"="Goats"' in told
        assert "blue, Sheep" in told


async def test_a_plan_waits_for_approval(claude_host: Host, hutch: HutchClient, model: Model) -> None:
    """In plan mode the permission request contains the plan; once approved, the agent continues."""

    def write_plan(request: Request) -> Reply:
        path = re.search(r"/[^\s\"'`\\]*/plans/[^\s\"'`\\]*\.md", request.raw.decode())
        assert path is not None
        return Use("Write", {"file_path": path[0], "content": "# Shear the sheep"})

    model.script = Steps(("plan it", write_plan), ("created", Use("ExitPlanMode", {})), OK)
    session = await claude_host.claude(hutch, "plan", "plan")
    async with log_of(hutch, session) as log:
        end = await log.play(session, "plan it", allow)
        questions = await hutch.list_permissions(m.ListPermissions(session.id, None))
        plans = [asked for asked in questions if asked.kind == "plan"]

        assert end.state == "completed", end
        assert [(asked.plan, asked.state) for asked in plans] == [("# Shear the sheep", "allowed")]
        assert "approved" in model.turns[-1].results[-1].text


async def test_ten_megabytes_pass_whole(claude_host: Host, hutch: HutchClient, model: Model) -> None:
    """The result of an edit contains the whole file, in the agent's own message."""
    session = await claude_host.claude(hutch, "big")
    big = Path(session.cwd, "big.txt")
    big.write_text("first\n" + ("x" * 99 + "\n") * 100_000)
    model.script = Steps(
        ("go", Use("Read", {"file_path": str(big), "limit": 1})),
        ("first", Use("Edit", {"file_path": str(big), "old_string": "first", "new_string": "1st"})),
        OK,
    )
    async with log_of(hutch, session) as log:
        end = await log.play(session, "go")
        page: m.EventsPage = await hutch.call("read_events", m.ReadEvents(session.id))

        assert end.state == "completed", end
        assert max(len(bytes(event.native or b"")) for event in log.events) > 10_000_000
        assert sum(len(event) for event in page.events) > 10_000_000
        assert without_gaps(log.events)


async def test_a_prompt_of_200_kilobytes_arrives_unchanged(claude_host: Host, model: Model) -> None:
    """The prompt goes from standard input to the model, byte for byte."""
    prompt = "".join(f"{n} sheep 🐑 ünd\n" for n in range(10_000))
    model.script = Steps(OK)
    cwd = claude_host.folder("long")
    ran = await claude_host.hutch("run", "-C", str(cwd), "-o", "json", "-", input=prompt)

    assert len(prompt.encode()) > 200_000
    assert ran.json["state"] == "completed"
    assert model.turns[-1].heard == prompt.strip()


async def test_utf8_text_survives_writes_of_one_byte(claude_host: Host, hutch: HutchClient, model: Model) -> None:
    """Characters of one to four bytes arrive unchanged."""
    text = "aé€🐑 " * 8 + "\u0000\u2028\x85\ufeff𐍈"
    model.script = Steps(("go", [Cut(1), Say(text, chunks=20)]))
    session = await claude_host.claude(hutch, "widths")
    async with log_of(hutch, session) as log:
        end = await log.play(session, "go")

        assert end.result == text
        assert [one.text for one in log.of("text")] == [text]
        assert "".join(one.text for one in log.of("text_delta")) == text


async def test_a_client_that_returns_during_a_turn_sees_each_event_once(
    claude_host: Host, hutch: HutchClient, model: Model
) -> None:
    """The client continues from its cursor, first in history and then live."""
    pause = Pause()
    model.script = Steps(("go", [Say("first half, ", chunks=6), pause, Say("second half", chunks=6)]))
    session = await claude_host.claude(hutch, "reconnect")
    turn = await hutch.submit_prompt(session.id, "go")
    async with claude_host.client() as gone, log_of(gone, session) as before:
        await before.until(lambda log: len(log.of("text_delta")) == 3)
    async with claude_host.client() as back, log_of(back, session, after=before.events[-1].seq) as after:
        await after.until(lambda log: len(log.of("text_delta")) == 3)
        pause.release.set()
        end = await after.ended(turn)

    events = before.events + after.events
    assert end.state == "completed", end
    assert without_gaps(events)
    assert "".join(one.text for one in before.of("text_delta") + after.of("text_delta")) == "first half, second half"


async def test_a_user_at_a_terminal_decides_inline(claude_host: Host, model: Model) -> None:
    """`hutch run` shows the call, asks, and continues; the cost is shown at the end."""
    model.script = Steps(
        ("go", [Say("First I make it."), Use("Bash", {"command": "touch made"})]), ("", Say("All made."))
    )
    cwd = claude_host.folder("terminal")

    def person() -> tuple[int, str]:
        with at_terminal("run", "-C", str(cwd), "go", environment=claude_host.env) as terminal:
            terminal.wait_for("touch made", "[y]es")
            assert not (cwd / "made").exists()
            terminal.type("y\n")
            return terminal.wait(), terminal.screen

    code, screen = await anyio.to_thread.run_sync(person)

    assert code == 0
    assert (cwd / "made").exists()
    assert screen.index("First I make it.") < screen.index("touch made") < screen.index("All made.")
    assert "$" in screen.partition("All made.")[2]


async def test_ctrl_c_leaves_the_turn_running_and_twice_stops_it(claude_host: Host, model: Model) -> None:
    """The first Ctrl-C prints how to return; the second, soon after, interrupts the turn."""
    pause = Pause()
    model.script = Steps(("go", [Say("working"), pause]), OK)
    cwd = str(claude_host.folder("ctrl-c"))
    async with claude_host.hutch_beside("run", "-C", cwd, "--name", "ctrl-c", "-o", "jsonl", "go") as process:
        await pause.reached.wait()
        process.send_signal(signal.SIGINT)
        left = await process.wait()
    inspected = await claude_host.hutch("inspect", "ctrl-c", "-o", "json")
    async with claude_host.hutch_beside("attach", "ctrl-c", "-o", "jsonl") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        await process.stdout.receive()
        process.send_signal(signal.SIGINT)
        with anyio.fail_after(DEADLINE):
            said = b""
            while b"Ctrl-C again" not in said:
                said += await process.stderr.receive()
        process.send_signal(signal.SIGINT)
        stopped = await process.wait()
    waited = await claude_host.hutch("wait", "ctrl-c", code=None)

    assert (left, stopped, waited.code) == (130, 130, 130)
    assert inspected.json["active_state"] == "running"
