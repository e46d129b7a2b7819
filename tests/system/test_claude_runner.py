"""The Claude runner with the real SDK and its real CLI, against a scripted model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import anyio
import pytest
from claude_agent_sdk import PermissionResultDeny, ToolPermissionContext

from hutch_executor.runners.claude.turn import ClaudeTimeouts
from hutch_shared import messages as m
from tests.rehearsal import Drop, Pause, Refuse, Reply, Say, Stall, Step, Steps, Think, Use, anything
from tests.sampling import sample
from tests.system.claude_stage import KEY, allow, answer, deny, gone, stage

pytestmark = [pytest.mark.system, pytest.mark.timeout(120)]

OK = Step(anything, Say("ok"), None)


async def test_a_turn_becomes_events_with_the_native_messages(tmp_path: Path) -> None:
    """Deltas add up to the text of their block, and each line of the CLI is kept whole."""
    script = Steps(("go", [Think("hm"), Say("Grüße 🐑, done", 4)]))
    async with stage(tmp_path, script) as s:
        end = await s.turn()

        assert (end.state, end.reason, end.result) == ("completed", "completed", "Grüße 🐑, done")
        assert s.prepared.agent_session is None
        assert end.agent_session
        assert s.prepared.agent_version
        deltas = s.daemon.of("text_delta")
        assert len(deltas) == 4
        assert "".join(d.text for d in deltas) == "Grüße 🐑, done"
        assert {d.block for d in deltas} == {s.daemon.of("text")[0].block}
        assert s.daemon.of("thinking")[0].text == "hm"
        assert s.daemon.of("thinking_delta")[0].block == s.daemon.of("thinking")[0].block
        natives = [json.loads(native) for _, _, native in s.daemon.events if native is not None]
        assert {"system", "stream_event", "assistant", "result"} <= {n["type"] for n in natives}
        assert s.daemon.notices()[0] == "agent_ready"


async def test_usage_is_of_the_turn_alone(tmp_path: Path) -> None:
    """The CLI counts from its start, or from an earlier conversation; the runner reports each turn's own usage."""
    async with stage(tmp_path, Steps(OK)) as s:
        first, second = await s.turn(), await s.turn()
        session = second.agent_session
    async with stage(tmp_path, Steps(OK), resume=session) as s:
        third = await s.turn()

        costs = [end.usage.usd for end in (first, second, third) if end.usage and end.usage.usd]
        assert len(costs) == 3
        assert max(costs) < 1.5 * min(costs)
        assert s.model.turns[0].calls == []
        assert len(s.model.turns[0].messages) == 5
        assert third.agent_session == session


async def test_every_call_of_any_tool_and_agent_is_judged(tmp_path: Path) -> None:
    """Read-only commands, allowed tools and sub-agents' calls reach the daemon, after their event."""
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "f.txt").write_text("hello\n")
    first = [
        Use("Bash", {"command": "ls"}),
        Use("Read", {"file_path": "f.txt"}),
        Use("Agent", {"description": "d", "prompt": "SUBTASK", "subagent_type": "general-purpose"}),
    ]
    script = Steps(("go", first), ("SUBTASK", Use("Bash", {"command": "echo inner"})), ("inner", Say("sub")), OK)
    async with stage(tmp_path, script, options=m.AgentOptions(allowed_tools=("Bash", "Read"))) as s:
        end = await s.turn()

        assert end.state == "completed"
        assert sorted(ask.call.agent_tool for ask in s.daemon.asks) == ["Agent", "Bash", "Bash", "Read"]
        for ask in s.daemon.asks:
            before = [data.call["call_id"] for kind, data, _ in s.daemon.events[: ask.after] if kind == "tool_call"]
            assert ask.call.call_id in before
        results = s.daemon.of("tool_result")
        assert len(results) == 4
        assert all(result.digest for result in results)
        inner = next(seen for seen in s.daemon.of("tool_call") if seen.call.get("command") == "echo inner")
        assert inner.parent is not None


async def test_a_call_is_judged_in_its_own_directory(tmp_path: Path) -> None:
    """A sub-agent has a working tree of its own, from which its relative paths are judged."""
    work = tmp_path / "work"
    work.mkdir()
    (work / "f.txt").write_text("hello\n")
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "x"]):
        subprocess.run(["git", "-c", "user.name=t", "-c", "user.email=t@t", *words], cwd=work, check=True)
    apart = {"description": "d", "prompt": "SUBTASK", "subagent_type": "general-purpose", "isolation": "worktree"}
    script = Steps(
        ("go", [Use("Bash", {"command": "cat f.txt"}), Use("Agent", apart)]),
        ("SUBTASK", [Use("Bash", {"command": "pwd"}), Use("Write", {"file_path": "new.txt", "content": "x"})]),
        OK,
    )
    async with stage(tmp_path, script) as s:
        await s.turn()

        here, inside = str(s.cwd.resolve()), next(r.text for r in s.daemon.of("tool_result") if "worktrees" in r.text)
        asked = {ask.call.command or ask.call.agent_tool: ask for ask in s.daemon.asks}
        assert {name: ask.cwd for name, ask in asked.items()} == {
            "cat f.txt": here, "Agent": here, "pwd": inside, "Write": inside
        }  # fmt: skip
        assert asked["Write"].call.paths == (f"{inside}/new.txt",)


async def test_a_denial_reaches_the_model_with_its_message(tmp_path: Path) -> None:
    """The denied call does not run, and the model gets the reason."""
    script = Steps(("go", Use("Bash", {"command": "touch made"})), ("not in this house", Say("understood")))
    async with stage(tmp_path, script, decide=lambda c: deny(c, "not in this house")) as s:
        end = await s.turn()

        assert end.result == "understood"
        assert not (s.cwd / "made").exists()


async def test_a_denial_with_interrupt_ends_the_turn(tmp_path: Path) -> None:
    """The session continues with the next prompt."""
    script = Steps(("go", Use("Bash", {"command": "touch made"})), OK)
    async with stage(tmp_path, script, decide=lambda c: deny(c, "stop", interrupt=True)) as s:
        stopped, again = await s.turn(), await s.turn("again")

        assert (stopped.state, stopped.reason) == ("stopped", "interrupted")
        assert again.state == "completed", again
        assert not (s.cwd / "made").exists()


async def test_the_judged_input_is_what_runs(tmp_path: Path) -> None:
    """An input changed by the decision replaces the model's."""
    script = Steps(("go", Use("Bash", {"command": "touch asked"})), OK)
    async with stage(tmp_path, script, decide=lambda c: allow(c, {"command": "touch judged"})) as s:
        end = await s.turn()

        assert end.state == "completed"
        assert sorted(p.name for p in s.cwd.iterdir()) == ["judged"]


async def test_a_decision_about_another_input_lets_nothing_run(tmp_path: Path) -> None:
    """A decision whose digest differs from the input's is a denial."""

    def forged(call: m.ToolCall) -> m.PermissionDecision:
        return m.PermissionDecision("allow", "allowed", call.input, "0" * 64)

    async with stage(tmp_path, Steps(("go", Use("Bash", {"command": "touch made"})), OK), decide=forged) as s:
        await s.turn()

        assert not (s.cwd / "made").exists()


async def test_parallel_calls_are_decided_in_any_order(tmp_path: Path) -> None:
    """Two requests wait at once; the later one may be decided first."""
    (tmp_path / "work").mkdir()
    for name in "ab":
        (tmp_path / "work" / name).write_text(f"content of {name}\n")
    script = Steps(("go", [Use("Read", {"file_path": "a"}), Use("Read", {"file_path": "b"})]), OK)
    async with stage(tmp_path, script, decide=None) as s, anyio.create_task_group() as group:
        group.start_soon(s.turn)
        await s.daemon.until(lambda d: len(d.asks) == 2)
        first, second = s.daemon.asks
        second.settle(deny(second.call, "no"))
        first.settle(allow(first.call))
        await s.model.until(lambda model: len(model.turns) == 2)

        results = {r.call.id: r for r in s.model.turns[1].results if r.call}
        assert "content of" in results[first.call.call_id].text
        assert results[second.call.call_id].text == "no"


async def test_a_question_gets_its_answers(tmp_path: Path) -> None:
    """AskUserQuestion becomes a question with choices; its answers reach the model."""
    asked = [
        {"question": "Which?", "header": "W", "options": [_option("A"), _option("B")], "multiSelect": False},
        {"question": "Many?", "header": "M", "options": [_option("C"), _option("D")], "multiSelect": True},
    ]
    script = Steps(("go", Use("AskUserQuestion", {"questions": asked})), OK)
    async with stage(tmp_path, script, decide=lambda c: answer(c, {"Which?": "B", "Many?": ["C", "D"]})) as s:
        await s.turn()

        ask = s.daemon.asks[0]
        assert ask.kind == "question"
        assert [q.several for q in ask.questions] == [False, True]
        assert [c.label for c in ask.questions[0].choices] == ["A", "B"]
        told = s.model.turns[1].results[0].text
        assert '"Which?"="B"' in told
        assert '"Many?"="C, D"' in told
        assert "input_mismatch" not in s.daemon.notices()


def _option(label: str) -> dict[str, str]:
    return {"label": label, "description": label.lower()}


async def test_a_plan_is_asked_about_and_its_approval_ends_planning(tmp_path: Path) -> None:
    """In plan mode the CLI plans, and the permission request contains the plan."""

    def write_plan(request: object) -> Reply:
        path = _after(str(getattr(request, "raw", b"")), "/plans/")
        return Use("Write", {"file_path": path, "content": "# The plan"})

    script = Steps(("go", write_plan), ("created", Use("ExitPlanMode", {})), OK)
    async with stage(tmp_path, script, mode="plan") as s:
        end = await s.turn()

        assert end.state == "completed"
        plan = s.daemon.asks[-1]
        assert (plan.kind, plan.plan) == ("plan", "# The plan")
        assert "approved" in s.model.turns[-1].results[-1].text
        assert "input_mismatch" not in s.daemon.notices()


def _after(text: str, mark: str) -> str:
    """Return the path in `text` that contains `mark`."""
    at = text.index(mark)
    start = max(text.rfind(c, 0, at) for c in " \"'`(\n") + 1
    return text[start : text.index(".md", at) + 3]


async def test_an_interrupt_during_a_tool_stops_the_tool_and_the_turn(tmp_path: Path) -> None:
    """After the interrupt returns the turn starts nothing more; the session continues."""
    script = Steps(
        ("go", [Use("Bash", {"command": "echo $$ > pid; sleep 600"}), Use("Bash", {"command": "touch late"})]), OK
    )
    async with stage(tmp_path, script) as s:
        ends = []
        async with anyio.create_task_group() as group:

            async def play() -> None:
                ends.append(await s.turn())

            group.start_soon(play)
            pid = await _number_in(s.cwd / "pid")
            await s.runner.interrupt()
            asked = len(s.daemon.asks)
        again = await s.turn("again")

        assert (ends[0].state, ends[0].reason) == ("stopped", "interrupted")
        assert await gone(pid)
        assert len(s.daemon.asks) == asked
        assert not (s.cwd / "late").exists()
        assert again.state == "completed", again


async def test_a_decision_that_comes_after_the_interrupt_lets_nothing_start(tmp_path: Path) -> None:
    """A call whose request was pending is denied, even if it is then allowed."""
    script = Steps(("go", [Say("x"), Pause()]), OK)
    async with stage(tmp_path, script, decide=None) as s:
        results = []
        async with anyio.create_task_group() as group:

            async def ask() -> None:
                context = ToolPermissionContext(tool_use_id="c-1")
                results.append(await s.runner._hooks.may_use("Bash", {"command": "touch late"}, context))

            group.start_soon(s.turn)
            await s.daemon.until(lambda d: bool(d.of("text_delta")))
            group.start_soon(ask)
            await s.daemon.until(lambda d: bool(d.asks))
            await s.runner.interrupt()
            asked = s.daemon.asks[0]
            asked.settle(allow(asked.call))

        assert results == [PermissionResultDeny(message="This was not allowed.", interrupt=True)]


async def _number_in(path: Path) -> int:
    with anyio.fail_after(60):
        while True:
            if path.exists() and (text := path.read_text().strip()):
                return int(text)
            await anyio.sleep(0.02)


@sample(2)
@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (Refuse(401), "auth_failed"),
        (Refuse(403), "auth_failed"),
        (Refuse(400), "bad_request"),
        (Refuse(429, retry_after=0), "rate_limited"),
        (Refuse(500), "provider_error"),
        (Refuse(529), "overloaded"),
        ([Say("half"), Drop()], "stream_broken"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_a_failing_provider_fails_the_turn_with_a_reason(tmp_path: Path, reply: Reply, reason: str) -> None:
    """Each failure of the model's API has a word and a sentence, and the CLI lives on."""
    async with stage(tmp_path, Steps(Step(anything, reply, None))) as s:
        end = await s.turn()
        s.model.script = Steps(OK)
        again = await s.turn("again")

        assert (end.state, end.reason) == ("failed", reason)
        assert end.message
        assert again.state == "completed", again
        if reason in ("rate_limited", "provider_error", "overloaded"):
            assert "retrying" in s.daemon.notices()


async def test_a_stalled_stream_fails_the_turn_and_the_conversation_goes_on(tmp_path: Path) -> None:
    """The runner limits the model's silence, and replaces the CLI that waits for it."""
    timeouts = ClaudeTimeouts(model_silence=4, probe_after=0.5)
    script = Steps(("first", Say("one")), Step("stall", [Say("x"), Stall()], None), OK)
    async with stage(tmp_path, script, timeouts=timeouts) as s:
        first = await s.turn("first")
        end = await s.turn("stall")
        again = await s.turn("again")

        assert (end.state, end.reason) == ("failed", "stream_stalled")
        assert again.state == "completed", again
        assert again.agent_session == first.agent_session
        assert any("one" in str(message) for message in s.model.turns[-1].messages)


async def test_a_long_retry_after_fails_the_turn(tmp_path: Path) -> None:
    """The limit holds for a retry too; the reason comes from the provider."""
    timeouts = ClaudeTimeouts(retries=1, model_silence=4, probe_after=0.5)
    async with stage(tmp_path, Steps(Step(anything, Refuse(429, retry_after=600), None)), timeouts=timeouts) as s:
        end = await s.turn()

        assert (end.state, end.reason) == ("failed", "rate_limited")


@sample(1)
@pytest.mark.parametrize(
    ("last", "reason"),
    [
        ("", "no_result"),
        (
            'print(*(150 * [\'{"type":"assistant","mess\']), sep=chr(10), flush=True); sys.stdin.readline()',
            "agent_broken",
        ),
        ("print('it hurts', file=sys.stderr); sys.exit(3)", "agent_died"),
    ],
    ids=["silent", "broken", "failing"],
)
async def test_a_cli_that_ends_without_a_result_fails_the_turn(tmp_path: Path, last: str, reason: str) -> None:
    """Each has its own reason: output that stops, output that has no lines of JSON any more, an exit code."""
    cli = tmp_path / "cli"
    _stand_in(cli, last)
    async with stage(tmp_path, Steps(OK), cli=str(cli)) as s:
        end = await s.turn()
        again = await s.turn("again")

        assert (end.state, end.reason) == (again.state, again.reason) == ("failed", reason)
        if reason == "agent_died":
            assert "it hurts" in end.message
            assert s.daemon.of("stderr")[0].text == "it hurts"


def _stand_in(path: Path, last: str) -> None:
    """Write a program that connects like the CLI, takes a prompt, and then does `last`."""
    path.write_text(
        f"#!{sys.executable}\n"
        "import json, sys\n"
        "def say(**message):\n"
        "    print(json.dumps(message), flush=True)\n"
        "def ask(**request):\n"
        "    say(type='control_request', request_id=request['subtype'], request=request)\n"
        "    return json.loads(sys.stdin.readline())\n"
        "number = json.loads(sys.stdin.readline())['request_id']\n"
        "response = {'hook_on_failure_supported': True}\n"
        "say(type='control_response', response={'subtype': 'success', 'request_id': number, 'response': response})\n"
        f"sys.stdin.readline()\n{last}\n"
    )
    path.chmod(0o700)


@pytest.mark.parametrize(
    ("asked", "ran", "word"),
    [("ls", "ls", None), ("ls", "rm -rf .", "input_mismatch"), (None, "ls", "unasked_tool")],
    ids=["as decided", "another input", "never asked"],
)
async def test_a_cli_that_runs_an_undecided_call_is_stopped(
    tmp_path: Path, asked: str | None, ran: str, word: str | None
) -> None:
    """The turn fails, and its message says that a call ran without a decision."""
    bash = "tool_name='Bash', tool_use_id='c'"
    _stand_in(
        tmp_path / "cli",
        (f"ask(subtype='can_use_tool', input={{'command': {asked!r}}}, {bash})\n" if asked else "")
        + f"ran = {{'tool_name': 'Bash', 'tool_input': {{'command': {ran!r}}}}}\n"
        "answer = ask(subtype='hook_callback', callback_id='hook_1', tool_use_id='c', input=ran)\n"
        "say(type='system', subtype='status', status='requesting')\n"
        "said = json.dumps(answer['response']['response'])\n"
        "say(type='result', subtype='success', is_error=False, result=said)\n"
        "sys.stdin.readline()\n",
    )
    async with stage(tmp_path, Steps(OK), cli=str(tmp_path / "cli")) as s:
        end = await s.turn()

        if word is None:
            assert (end.state, end.result) == ("completed", "{}")
        else:
            assert (end.state, end.reason) == ("failed", word)
            assert s.daemon.notices()[0] == word


async def test_processes_of_a_dead_cli_are_ended(tmp_path: Path) -> None:
    """A tool in its own session survives the CLI's sudden death, but not the end of the turn."""
    script = Steps(("go", Use("Bash", {"command": "echo $$ > pid; sleep 600"})))
    async with stage(tmp_path, script) as s, anyio.create_task_group() as group:
        ends = []

        async def play() -> None:
            ends.append(await s.turn())
            group.cancel_scope.cancel()

        group.start_soon(play)
        tool = await _number_in(s.cwd / "pid")
        os.kill(s.pid, signal.SIGKILL)
        await anyio.sleep_forever()

    assert ends[0].reason == "agent_died"
    assert await gone(tool)


async def test_a_long_tool_or_question_is_not_a_stall(tmp_path: Path) -> None:
    """Silence does not count while a user thinks or a tool runs."""
    timeouts = ClaudeTimeouts(model_silence=3, turn_silence=3, probe_after=0.2)
    script = Steps(("go", Use("Bash", {"command": "sleep 4"})), OK)
    async with stage(tmp_path, script, timeouts=timeouts, decide=None) as s, anyio.create_task_group() as group:
        ends = []

        async def play() -> None:
            ends.append(await s.turn())
            group.cancel_scope.cancel()

        group.start_soon(play)
        await s.daemon.until(lambda d: len(d.asks) == 1)
        await anyio.sleep(4)
        s.daemon.asks[0].settle(allow(s.daemon.asks[0].call))
        await anyio.sleep_forever()

    assert ends[0].state == "completed"


@pytest.mark.parametrize(
    ("number", "reason"), [(signal.SIGKILL, "agent_died"), (signal.SIGSTOP, "agent_stuck")], ids=["killed", "stopped"]
)
async def test_a_cli_that_dies_or_hangs_fails_the_turn_and_is_replaced(
    tmp_path: Path, number: signal.Signals, reason: str
) -> None:
    """The next prompt goes to a new CLI, which resumes the conversation."""
    script = Steps(("first", Say("one")), ("go", [Say("x"), Pause()]), OK)
    async with stage(tmp_path, script, timeouts=ClaudeTimeouts(probe_after=0.5, probe_answer=5)) as s:
        first = await s.turn("first")
        ends = []
        pid = s.pid
        async with anyio.create_task_group() as group:

            async def play() -> None:
                ends.append(await s.turn())

            group.start_soon(play)
            await s.daemon.until(lambda d: len(d.of("text_delta")) == 2)
            os.kill(pid, number)
        again = await s.turn("again")

        assert (ends[0].state, ends[0].reason) == ("failed", reason)
        assert await gone(pid)
        assert again.state == "completed", again
        assert again.agent_session == first.agent_session


async def test_a_cli_that_dies_before_its_first_write_is_replaced_by_a_new_conversation(tmp_path: Path) -> None:
    """There is no conversation to resume, and a notice says so."""
    async with stage(tmp_path, Steps(("go", Pause()), OK)) as s:
        ends = []
        async with anyio.create_task_group() as group:

            async def play() -> None:
                ends.append(await s.turn())

            group.start_soon(play)
            await s.daemon.until(lambda d: "agent_ready" in d.notices())
            os.kill(s.pid, signal.SIGKILL)
        again = await s.turn("again")

        assert ends[0].reason == "agent_died"
        assert ends[0].agent_session is None
        assert again.state == "completed", again


async def test_a_cli_that_died_between_turns_costs_no_turn(tmp_path: Path) -> None:
    """The next prompt goes to a new CLI, which resumes the conversation."""
    async with stage(tmp_path, Steps(OK)) as s:
        first = await s.turn()
        process = s.runner.connection.process if s.runner.connection else None
        assert process is not None
        os.kill(s.pid, signal.SIGKILL)
        with anyio.fail_after(30):
            while process.is_ready():
                await anyio.sleep(0.01)
        again = await s.turn("again")

        assert again.state == "completed", again
        assert again.agent_session == first.agent_session
        assert len(s.model.turns[-1].messages) == 3


async def test_an_interrupt_of_a_cli_that_hangs_kills_it(tmp_path: Path) -> None:
    """The interrupt returns in time, and no process is left that could start anything."""
    script = Steps(("go", [Say("x"), Pause()]), OK)
    async with stage(tmp_path, script, timeouts=ClaudeTimeouts(interrupt=0.5)) as s:
        ends = []
        async with anyio.create_task_group() as group:

            async def play() -> None:
                ends.append(await s.turn())

            group.start_soon(play)
            await s.daemon.until(lambda d: bool(d.of("text_delta")))
            pid = s.pid
            os.kill(pid, signal.SIGSTOP)
            await s.runner.interrupt()

        assert ends[0].state == "stopped"
        assert await gone(pid)


async def test_closing_during_a_turn_leaves_no_process(tmp_path: Path) -> None:
    """The CLI and its tools' processes are gone."""
    script = Steps(("go", Use("Bash", {"command": "echo $$ > pid; sleep 600"})))
    async with stage(tmp_path, script) as s:
        async with anyio.create_task_group() as group:
            group.start_soon(s.turn)
            tool = await _number_in(s.cwd / "pid")
            cli = s.pid
            await s.runner.close()

        assert await gone(cli)
        assert await gone(tool)


async def test_the_limit_of_model_requests_is_enforced(tmp_path: Path) -> None:
    """The turn fails, and its message names the limit."""
    script = Steps(Step(anything, Use("Bash", {"command": "true"}), None))
    async with stage(tmp_path, script, limits=m.Limits(max_turns=2)) as s:
        end = await s.turn()

        assert (end.state, end.reason) == ("failed", "max_turns")


async def test_the_key_is_in_no_environment_and_no_command_line(tmp_path: Path) -> None:
    """It reaches the model, but neither the agent's shell nor a process list shows it."""
    script = Steps(
        ("go", Use("Bash", {"command": "env; cat /proc/$PPID/environ /proc/$PPID/cmdline | tr '\\0' '\\n'"})), OK
    )
    mcp = {"none": {"command": sys.executable, "args": ["-c", ""], "env": {"TOKEN": "a-secret-of-mcp"}}}
    async with stage(tmp_path, script, options=m.AgentOptions(mcp_servers=mcp)) as s:
        await s.turn()

        seen = s.daemon.of("tool_result")[0].text
        assert "PATH=" in seen
        assert "--mcp-config" in seen
        assert KEY not in seen
        assert "a-secret-of-mcp" not in seen
        assert {request.key for request in s.model.requests} == {KEY}


async def test_a_bearer_token_is_sent_as_one(tmp_path: Path) -> None:
    """The grant names the form in which the provider expects its credential."""
    async with stage(tmp_path, Steps(OK), auth="bearer") as s:
        await s.turn()

        assert s.model.requests[0].headers["authorization"] == f"Bearer {KEY}"


async def test_settings_of_the_project_run_nothing(tmp_path: Path) -> None:
    """Hooks, env and allow rules of the repository have no effect, but its instructions reach the model."""
    settings = tmp_path / "work" / ".claude" / "settings.json"
    settings.parent.mkdir(parents=True)
    hook = {"hooks": [{"type": "command", "command": f"touch {tmp_path}/hooked"}]}
    settings.write_text(
        json.dumps(
            {
                "hooks": {name: [hook] for name in ("PreToolUse", "SessionStart", "UserPromptSubmit", "Stop")},
                "env": {"PLANTED": "yes"},
                "permissions": {"allow": ["Bash"]},
            }
        )
    )
    (tmp_path / "work" / "CLAUDE.md").write_text("Speak like a shepherd.")
    script = Steps(("go", Use("Bash", {"command": "echo planted=$PLANTED."})), OK)
    async with stage(tmp_path, script, options=m.AgentOptions(allowed_tools=("Bash",))) as s:
        await s.turn()

        assert not (tmp_path / "hooked").exists()
        assert len(s.daemon.asks) == 1
        assert s.daemon.of("tool_result")[0].text.strip() == "planted=."
        assert "Speak like a shepherd." in str(s.model.turns[0].body["system"])


async def test_the_cli_offers_only_known_tools(tmp_path: Path) -> None:
    """A new tool of a newer CLI must be reviewed before it is added to this list."""
    async with stage(tmp_path, Steps(OK), options=m.AgentOptions(disallowed_tools=("WebSearch",))) as s:
        await s.turn()

        offered = {tool["name"] for tool in s.model.turns[0].body["tools"]}
        assert offered <= {
            "Agent", "AskUserQuestion", "Bash", "Edit", "EnterPlanMode", "ExitPlanMode", "NotebookEdit", "Read",
            "ReportFindings", "TaskStop", "WebFetch", "Write",
        }  # fmt: skip


async def test_a_prompt_is_text_only(tmp_path: Path) -> None:
    """`@path` reads no file, and 200 KB arrive unchanged."""
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "private.txt").write_text("the secret of the file")
    prompt = "look at @private.txt " + "w" * 200_000
    async with stage(tmp_path, Steps(OK)) as s:
        end = await s.turn(prompt)

        assert end.state == "completed"
        assert s.model.turns[0].heard == prompt
        assert b"the secret of the file" not in s.model.turns[0].raw


async def test_a_message_of_ten_megabytes_passes_whole(tmp_path: Path) -> None:
    """The result of an edit contains the whole file."""
    (tmp_path / "work").mkdir()
    big = tmp_path / "work" / "big.txt"
    big.write_text("first\n" + ("x" * 99 + "\n") * 100_000)
    script = Steps(
        ("go", Use("Read", {"file_path": str(big), "limit": 1})),
        ("first", Use("Edit", {"file_path": str(big), "old_string": "first", "new_string": "1st"})),
        OK,
    )
    async with stage(tmp_path, script) as s:
        end = await s.turn()

        assert end.state == "completed"
        assert max(len(native) for _, _, native in s.daemon.events if native is not None) > 10_000_000


async def test_the_cli_dies_with_its_executor(tmp_path: Path) -> None:
    """A killed executor leaves no running CLI."""
    if sys.platform != "linux":
        pytest.skip("only Linux can bind a child's life to its parent's")
    program = (
        "import os, sys, anyio\n"
        "from hutch_executor.runners.claude.process import ClaudeProcess, Launch\n"
        "async def main():\n"
        "    process = ClaudeProcess(Launch(('sleep', '600'), '/', {'PATH': os.environ['PATH']}))\n"
        "    await process.connect()\n"
        "    print(process.pid, flush=True)\n"
        "    await anyio.sleep_forever()\n"
        "anyio.run(main)\n"
    )
    executor = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert executor.stdout is not None
    pid = int(executor.stdout.readline())
    with anyio.fail_after(30):
        while Path(f"/proc/{pid}/comm").read_text() != "sleep\n":
            await anyio.sleep(0.02)
    executor.kill()
    executor.wait()
    executor.stdout.close()

    assert await gone(pid)


async def test_the_mode_can_change_between_turns(tmp_path: Path) -> None:
    """The CLI is given no mode except planning."""
    async with stage(tmp_path, Steps(OK), mode="ask") as s:
        await s.turn()
        await s.runner.set_mode("plan")
        await s.turn("now plan")

        assert "Plan mode is active" not in s.model.turns[0].raw.decode()
        assert "plan mode" in s.model.turns[1].raw.decode().lower()
