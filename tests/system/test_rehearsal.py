"""The rehearsal model under the real Claude SDK and its real command-line program."""

from __future__ import annotations

import os
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any

import pytest
from claude_agent_sdk import (
    AssistantMessage,
    ClaudeAgentOptions,
    Message,
    ResultError,
    ResultMessage,
    StreamEvent,
    TextBlock,
    ToolResultBlock,
    UserMessage,
    query,
)

from tests.rehearsal import Cut, Drop, Model, Refuse, Say, Steps, Think, Use, anything, serve
from tests.rehearsal.scripts import FIX, demo, echo, write_demo_repository

pytestmark = pytest.mark.system

KEY = "sk-rehearsal-system"


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep only PATH: the SDK passes its environment on."""
    for name in os.environ.keys() - {"PATH", "PYTEST_CURRENT_TEST"}:
        monkeypatch.delenv(name)


def options(model: Model, folder: Path, key: str = KEY, **more: Any) -> ClaudeAgentOptions:
    home = folder / "home"
    work = folder / "work"
    home.mkdir(exist_ok=True)
    work.mkdir(exist_ok=True)
    env = {
        "HOME": str(home),
        "ANTHROPIC_BASE_URL": model.url,
        "ANTHROPIC_API_KEY": key,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_MAX_RETRIES": "1",
    }
    return ClaudeAgentOptions(cwd=work, env=env, setting_sources=[], **more)


async def run(prompt: str, chosen: ClaudeAgentOptions) -> list[Message]:
    """Return all messages of one query. The SDK raises after the result of a failed turn; the result suffices."""
    messages: list[Message] = []
    async with aclosing(query(prompt=prompt, options=chosen)) as stream:  # type: ignore[type-var]
        with suppress(ResultError):
            async for message in stream:
                messages.append(message)  # noqa: PERF401 -- keeps the messages before an error
    return messages


def outcome(messages: list[Message]) -> ResultMessage:
    last = messages[-1]
    assert isinstance(last, ResultMessage)
    return last


def said(messages: list[Message]) -> list[str]:
    return [b.text for m in messages if isinstance(m, AssistantMessage) for b in m.content if isinstance(b, TextBlock)]


def results(messages: list[Message]) -> list[ToolResultBlock]:
    blocks = [b for m in messages if isinstance(m, UserMessage) and isinstance(m.content, list) for b in m.content]
    return [b for b in blocks if isinstance(b, ToolResultBlock)]


async def test_the_agent_receives_text_and_thinking(tmp_path: Path) -> None:
    """Both arrive whole, delta by delta; the model got the right key and the prompt."""
    text = "Grüße, 世界 😀. " * 20
    async with serve(key=KEY, script=Steps(("hello", [Think("hm"), Cut(7), Say(text, chunks=50)]))) as model:
        messages = await run("hello", options(model, tmp_path, include_partial_messages=True))

        deltas = [m.event["delta"] for m in messages if isinstance(m, StreamEvent) and "delta" in m.event]
        assert said(messages) == [text]
        assert sum(d.get("type") == "text_delta" for d in deltas) == 50
        assert [(r.key, r.prompt) for r in model.turns] == [(KEY, "hello")]
        assert not outcome(messages).is_error


async def test_a_tool_call_runs_and_returns_its_result(tmp_path: Path) -> None:
    """The script's next step receives the command's output."""
    steps = Steps(
        ("go", Use("Bash", {"command": "echo $((40 + 2)) apples", "description": "Count"}, chunks=5)),
        ("42 apples", Say("I counted 42.")),
    )
    async with serve(key=KEY, script=steps) as model:
        messages = await run("go", options(model, tmp_path))

        assert said(messages) == ["I counted 42."]
        assert [(r.call and r.call.tool, r.text) for r in model.turns[-1].fresh] == [("Bash", "42 apples")]


async def test_results_of_parallel_calls_return_in_one_request(tmp_path: Path) -> None:
    """The results come in the order in which the calls ended."""
    calls = [Use("Bash", {"command": f"echo {n}", "description": n}) for n in ("first", "second")]
    async with serve(key=KEY, script=Steps(("go", calls), ("second", Say("both")))) as model:
        messages = await run("go", options(model, tmp_path))

        assert said(messages) == ["both"]
        assert sorted(r.text for r in model.turns[-1].fresh) == ["first", "second"]
        assert sorted(str(b.content) for b in results(messages)) == ["first", "second"]


async def test_a_wrong_key_ends_the_turn(tmp_path: Path) -> None:
    """The agent receives the 401, and the script gets no request."""
    async with serve(key=KEY, script=echo) as model:
        messages = await run("hello", options(model, tmp_path, key="sk-wrong"))

        assert (outcome(messages).is_error, outcome(messages).api_error_status) == (True, 401)
        assert {r.key for r in model.requests} == {"sk-wrong"}
        assert model.turns == []


async def test_a_repeated_server_error_ends_the_turn(tmp_path: Path) -> None:
    """The turn's result is the 500, after the request and its retry."""
    async with serve(key=KEY, script=lambda _: Refuse(500)) as model:
        messages = await run("hello", options(model, tmp_path))

        assert (outcome(messages).is_error, outcome(messages).api_error_status) == (True, 500)
        assert len(model.turns) == 2


async def test_a_single_server_error_is_survived(tmp_path: Path) -> None:
    """The retry gets the script's next step."""
    async with serve(key=KEY, script=Steps((anything, Refuse(500)), (anything, Say("better now")))) as model:
        messages = await run("hello", options(model, tmp_path))

    assert said(messages) == ["better now"]
    assert not outcome(messages).is_error


async def test_a_dropped_stream_is_requested_again(tmp_path: Path) -> None:
    """After a reset during the stream, the reply to the second request is used."""
    steps = Steps((anything, [Say("half of the ans"), Drop()]), (anything, Say("the answer")))
    async with serve(key=KEY, script=steps) as model:
        messages = await run("hello", options(model, tmp_path))

        assert said(messages)[-1] == "the answer"
        assert len(model.turns) == 2


async def test_the_demo_repairs_the_repository(tmp_path: Path) -> None:
    """The demo's script and the real tools make the failing test pass."""
    async with serve(key=KEY, script=demo) as model:
        chosen = options(model, tmp_path, permission_mode="acceptEdits", allowed_tools=["Bash"])
        write_demo_repository(tmp_path / "work")
        messages = await run("Make the failing test pass.", chosen)

    assert "all tests pass" in said(messages)[-1]
    assert FIX in (tmp_path / "work" / "till.py").read_text(encoding="utf-8")
