"""The script runner: the effect of each line. Only allowed commands run."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from hutch_executor.runners.registry import load_runner
from hutch_executor.runners.script import ScriptRunner
from hutch_executor.runners.script_language import read_script
from hutch_shared import messages as m
from hutch_shared.agents import AGENTS
from hutch_shared.digest import input_digest
from hutch_shared.errors import HutchError, Reason
from hutch_shared.events import EventKind, TurnEnded
from tests.executor.fake_hutchd import WAIT, dead, decision, prepare, prompt
from tests.executor.test_egress import server
from tests.executor.test_sandboxed_command import say_page
from tests.programs import bubblewrap


class FakeDaemon:
    """Keeps the reported events, and decides every request in the same way."""

    def __init__(self, what: m.Decision = "allow", **changes: Any) -> None:
        self.events: list[tuple[EventKind, dict[str, Any], bytes | None]] = []
        self.asked: list[tuple[m.PermissionKind, m.ToolCall, tuple[m.Question, ...], str | None]] = []
        self._what = what
        self._changes = changes

    async def get_api_key(self, provider: str) -> m.KeyGrant:
        raise HutchError(Reason.NO_KEY)

    async def request_permission(
        self,
        kind: m.PermissionKind,
        call: m.ToolCall,
        *,
        cwd: str | None = None,
        questions: tuple[m.Question, ...] = (),
        plan: str | None = None,
    ) -> m.PermissionDecision:
        self.asked.append((kind, call, questions, plan))
        return decision(call, self._what, **self._changes)

    async def judge_reads(self, named: Mapping[str, str], imported: Mapping[str, str]) -> Mapping[str, str]:
        return {}

    async def report(self, kind: EventKind, data: msgspec.Struct, native: bytes | None = None) -> None:
        self.events.append((kind, msgspec.to_builtins(data), native))

    def results(self) -> list[dict[str, Any]]:
        return [data for kind, data, _ in self.events if kind == "tool_result"]


@pytest.fixture
def cwd(tmp_path: Path) -> Path:
    made = tmp_path / "work"
    made.mkdir()
    return made


async def play(cwd: Path, daemon: FakeDaemon, *steps: dict[str, Any]) -> TurnEnded:
    """Play one turn whose prompt is the script."""
    runner = ScriptRunner()
    await runner.open(prepare(cwd), daemon)
    return await runner.run(prompt("\n".join(map(json.dumps, steps))))


async def test_lines_become_events_with_the_line_as_native(cwd: Path) -> None:
    """The events come in the order of the file."""
    daemon = FakeDaemon()

    ended = await play(
        cwd,
        daemon,
        {"delta": "he"},
        {"text": "hello"},
        {"thinking": "hm"},
        {"stderr": "oops"},
        {"usage": {"input_tokens": 3}},
        {"notice": {"word": "w", "message": "m"}},
    )

    assert [kind for kind, _, _ in daemon.events] == ["text_delta", "text", "thinking", "stderr", "usage", "notice"]
    assert daemon.events[1] == ("text", {"text": "hello"}, b'{"text": "hello"}')
    assert ended == TurnEnded(
        "completed", "completed", "The turn completed.", result="hello", agent_session="script-s-0000000000000001"
    )


async def test_an_allowed_command_really_runs(cwd: Path) -> None:
    """The judged input runs in the session's directory; the result has its digest."""
    daemon = FakeDaemon(input={"command": "pwd; echo err >&2"})

    await play(cwd, daemon, {"tool": "Bash", "input": {"command": "touch unjudged"}, "run": True})

    ran = input_digest("Bash", {"command": "pwd; echo err >&2"})
    assert daemon.results() == [{"call_id": daemon.asked[0][1].call_id, "text": f"{cwd}\nerr\n", "digest": ran}]
    assert not (cwd / "unjudged").exists()


async def test_a_child_in_the_background_does_not_hold_the_turn_up(cwd: Path) -> None:
    """The step ends with the command, even if a child still holds its output."""
    daemon = FakeDaemon()

    await play(cwd, daemon, {"tool": "Bash", "input": {"command": "sleep 600 & echo done"}, "run": True})

    assert daemon.results()[0]["text"] == "done\n"


async def test_a_denied_command_does_not_run(cwd: Path) -> None:
    """The agent gets the message instead."""
    daemon = FakeDaemon("deny", message="not today")

    ended = await play(cwd, daemon, {"tool": "Bash", "input": {"command": "touch done"}, "run": True})

    assert (daemon.results()[0]["text"], daemon.results()[0]["is_error"]) == ("not today", True)
    assert not (cwd / "done").exists()
    assert ended.state == "completed"


async def test_a_denial_may_stop_the_turn(cwd: Path) -> None:
    """The rest of the script is not played."""
    daemon = FakeDaemon("deny", message="stop", interrupt=True)

    ended = await play(cwd, daemon, {"tool": "Edit", "input": {"file_path": "a"}}, {"text": "never"})

    assert (ended.state, ended.result) == ("stopped", None)


async def test_a_question_gets_its_answers(cwd: Path) -> None:
    """The answers are the result of the call."""
    daemon = FakeDaemon("answer", answers={"Which?": "A"})

    await play(cwd, daemon, {"ask": [{"question": "Which?", "options": [{"label": "A"}]}]})

    kind, call, questions, _ = daemon.asked[0]
    assert (kind, call.action, questions) == ("question", "question", (m.Question("Which?", "", (m.Choice("A"),)),))
    assert json.loads(daemon.results()[0]["text"]) == {"Which?": "A"}


async def test_a_plan_is_asked_about(cwd: Path) -> None:
    """The user sees the plan itself."""
    daemon = FakeDaemon()

    await play(cwd, daemon, {"plan": "first this"})

    assert (daemon.asked[0][0], daemon.asked[0][3]) == ("plan", "first this")


async def test_a_script_may_end_early_and_repeat(cwd: Path) -> None:
    """A script plays a failure with `end`."""
    daemon = FakeDaemon()

    ended = await play(
        cwd,
        daemon,
        {"repeat": {"times": 3, "line": {"delta": "x"}}},
        {"end": {"state": "failed", "reason": "rate_limited", "message": "Too much."}},
        {"text": "never"},
    )

    assert [kind for kind, _, _ in daemon.events] == ["text_delta"] * 3
    assert (ended.state, ended.reason, ended.message) == ("failed", "rate_limited", "Too much.")


async def test_turns_are_played_by_their_number(cwd: Path) -> None:
    """A new executor continues with the session's next part; the last part repeats."""
    (cwd / "s.jsonl").write_text('{"text": "one"}\n{"turn": true}\n{"text": "two"}\n')
    runner, daemon = ScriptRunner(), FakeDaemon()
    await runner.open(prepare(cwd, options=m.AgentOptions(script="s.jsonl")), daemon)

    said = [(await runner.run(prompt("", number=number))).result for number in (2, 3, 1)]

    assert said == ["two", "two", "one"]


async def test_a_plain_prompt_is_echoed(cwd: Path) -> None:
    """Without a script, the agent answers with the prompt."""
    runner, daemon = ScriptRunner(), FakeDaemon()
    await runner.open(prepare(cwd), daemon)

    ended = await runner.run(prompt("good morning"))

    assert ended.result == "good morning"


async def test_an_interrupt_ends_the_command_that_runs(cwd: Path) -> None:
    """After the interrupt the turn has ended, and its process is gone."""
    runner, daemon = ScriptRunner(), FakeDaemon()
    await runner.open(prepare(cwd), daemon)
    command = "echo $$ > pid.new; mv pid.new pid; sleep 600"
    ends: list[TurnEnded] = []

    async def run() -> None:
        ends.append(await runner.run(prompt(json.dumps({"tool": "Bash", "input": {"command": command}, "run": True}))))

    async with anyio.create_task_group() as group:
        group.start_soon(run)
        with anyio.fail_after(WAIT):
            while not (cwd / "pid").exists():
                await anyio.sleep(0.01)
            await runner.interrupt()

    assert [end.state for end in ends] == ["stopped"]
    await dead(int((cwd / "pid").read_text()))


@pytest.mark.parametrize(
    "line",
    ["{", "[]", "{}", '{"text": "a", "delta": "b"}', '{"txet": "a"}', '{"text": 1}', '{"repeat": {"times": 1}}'],
)
def test_an_invalid_line_is_named(line: str) -> None:
    """An invalid line is reported before anything runs."""
    with pytest.raises(HutchError, match="Line 2 of the script"):
        read_script(f'{{"text": "fine"}}\n{line}\n')


async def test_a_missing_script_is_reported(cwd: Path) -> None:
    """The agent cannot be started without it."""
    with pytest.raises(HutchError) as refused:
        await ScriptRunner().open(prepare(cwd, options=m.AgentOptions(script="none.jsonl")), FakeDaemon())

    assert refused.value.reason is Reason.AGENT_UNAVAILABLE


@pytest.mark.parametrize("agent", AGENTS)
def test_every_agent_in_the_table_has_a_runner(agent: str) -> None:
    """`load_runner` returns the class that drives the agent."""
    assert load_runner(agent).agent == agent


def test_an_unknown_agent_is_refused_with_the_names_there_are() -> None:
    """A misspelt agent is `agent_unavailable`; the message names the known agents."""
    with pytest.raises(HutchError, match="script"):
        load_runner("scrpt")


@pytest.fixture
def home(cwd: Path) -> Path:
    """A home with a secret, beside the working directory."""
    made = cwd.parent / "home"
    (made / ".ssh").mkdir(parents=True)
    (made / ".ssh" / "id").write_text("SECRET")
    return made


@asynccontextmanager
async def sandboxed_runner(cwd: Path, home: Path, daemon: FakeDaemon, **spec: Any) -> AsyncIterator[ScriptRunner]:
    """Yield an open runner with a sandbox."""
    runner = ScriptRunner()
    sandbox = m.SandboxSpec(**{"program": bubblewrap()} | spec)
    try:
        await runner.open(prepare(cwd, home=str(home), sandbox=sandbox), daemon)
        yield runner
    finally:
        await runner.close()


def run(command: str) -> m.ExecutePrompt:
    return prompt(json.dumps({"tool": "Bash", "input": {"command": command}, "run": True}))


async def test_commands_run_in_the_sandbox_of_the_session(
    cwd: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They see the working directory, only an agent's variables, no secret and no other process."""
    monkeypatch.setenv("HUTCH_TEST_KEPT_OUT", "x")
    monkeypatch.setenv("TMPDIR", "/var/elsewhere")
    daemon, left = FakeDaemon(), Path(f"/tmp/left-{os.getpid()}")
    look = (
        "pwd; echo $HOME; cat ~/.ssh/id; env | grep -c -e KEPT_OUT -e ^TMPDIR; echo made > made;"
        f" ls /proc | grep -cx {os.getpid()}; echo x > {left}; [ $$ -lt 16 ] && echo small"
    )
    async with sandboxed_runner(cwd, home, daemon, hide=(str(home / "hidden"),)) as runner:
        ended = await runner.run(run(look))
        await runner.run(run(f"cat {left}"))
    said = [one["text"].split("\n") for one in daemon.results()]

    assert ended.state == "completed"
    assert [said[0][0], said[0][1], *said[0][3:]] == [str(cwd), str(home), "0", "0", "small", ""]
    assert "SECRET" not in "".join(said[0])
    assert "No such file" in said[1][0]
    assert (cwd / "made").read_text() == "made\n"
    assert not left.exists()


@pytest.mark.parametrize("network", ["broker-only", "allow-list"])
async def test_commands_reach_the_network_of_the_session(cwd: Path, home: Path, network: str) -> None:
    """The commands have the network of any agent."""
    daemon = FakeDaemon()
    with server(say_page) as named, server(say_page) as other:
        asks = "; ".join(f"curl -sS http://127.0.0.1:{port}/" for port in (named, other))
        async with sandboxed_runner(cwd, home, daemon, network=network, allow=(f"127.0.0.1:{named}",)) as runner:
            await runner.run(run(asks))
    said = daemon.results()[0]["text"]

    assert said.count("PAGE") == (1 if network == "allow-list" else 0)


async def test_a_command_ends_with_all_that_it_started(cwd: Path, home: Path) -> None:
    """Background processes, even in sessions of their own, end with the command's sandbox.

    The turn does not wait for them.
    """
    daemon = FakeDaemon()
    mark = f"611.{os.getpid()}"
    async with sandboxed_runner(cwd, home, daemon) as runner:
        await runner.run(run(f"(setsid setsid sleep {mark} &) ; (trap '' TERM HUP; sleep {mark}) & echo done"))
        with anyio.fail_after(WAIT):
            while any(mark.encode() in _cmdline(path) for path in Path("/proc").glob("[0-9]*/cmdline")):
                await anyio.sleep(0.02)

    assert daemon.results()[0]["text"] == "done\n"


def _cmdline(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


@pytest.mark.parametrize(
    ("program", "why"), [("/nowhere/bwrap", "No such file"), ("/bin/false", "exit code 1"), ("/etc/passwd", "denied")]
)
async def test_without_a_sandbox_the_session_cannot_be_opened(cwd: Path, home: Path, program: str, why: str) -> None:
    """The error has the reason, and no command runs."""
    with pytest.raises(HutchError, match=why) as refused:
        async with sandboxed_runner(cwd, home, FakeDaemon(), program=program):
            pass

    assert refused.value.reason is Reason.ISOLATION_UNAVAILABLE


async def test_a_sandbox_that_disappears_fails_the_turn(cwd: Path, home: Path) -> None:
    """The command does not run if bubblewrap is a broken link or a program that does nothing."""
    daemon = FakeDaemon()
    program = cwd.parent / "bwrap"
    program.symlink_to(bubblewrap())
    async with sandboxed_runner(cwd, home, daemon, program=str(program)) as runner:
        first = await runner.run(run("touch one"))
        program.unlink()
        second = await runner.run(run("touch two"))
        program.symlink_to("/bin/false")
        third = await runner.run(run("touch three"))

    assert [one.name for one in cwd.iterdir()] == ["one"]
    assert first.state == "completed"
    assert {(end.state, end.reason) for end in (second, third)} == {("failed", "isolation_unavailable")}
    assert "The sandbox could not be made" in second.message
