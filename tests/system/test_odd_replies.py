"""What a model, a gateway or an MCP server may send that is unusual, through the real CLI."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any, Final

import anyio
import msgspec
import pytest

from hutch_executor.events.encoding import event_body
from hutch_executor.runners.claude.turn import ClaudeTimeouts
from hutch_shared import messages as m
from hutch_shared.events import DATA_OF_KIND, TurnEnded
from hutch_shared.rpc.envelope import is_sound
from tests.rehearsal import ABSENT, Model, Part, Replace, Reply, Say, Step, Steps, Think, Usage, Use, anything
from tests.rehearsal.odd import ODD_LINES, ODD_REPLIES
from tests.rehearsal.parts import Odd
from tests.sampling import seed
from tests.system.claude_stage import Stage, allow, answer, stage
from tests.system.host import KEY, host, settings_for
from tests.system.log import cli_of, log_of, without_gaps

pytestmark = [pytest.mark.system, pytest.mark.timeout(120)]


def _decide(call: m.ToolCall) -> m.PermissionDecision:
    return answer(call, {"Which?": "A"}) if call.agent_tool == "AskUserQuestion" else allow(call)


def _once(reply: Reply) -> Steps:
    """Return a script that replies once, then says `ok` to every tool result and retry."""
    return Steps(Step("odd", reply), Step(anything, Say("ok"), None))


def _check_events(s: Stage, end: TurnEnded, what: str) -> None:
    """Every event and every permission request has valid text and the shape of its kind."""
    for kind, data, native in [*s.daemon.events, ("turn_ended", end, None)]:
        body = b"{" + event_body(kind, data, native)
        assert is_sound(body), what
        event = msgspec.json.decode(body)
        msgspec.json.decode(msgspec.json.encode(event["data"]), type=DATA_OF_KIND[event["kind"]])
    assert all(is_sound(msgspec.json.encode(ask.call)) for ask in s.daemon.asks), what


async def _play(s: Stage, reply: Reply, what: str) -> TurnEnded:
    """Play one turn with this reply; it ends, and the CLI lives."""
    s.model.script = _once(reply)
    s.daemon.events.clear()
    s.daemon.asks.clear()
    pid = s.pid
    with anyio.move_on_after(60) as scope:
        end = await s.turn("odd")
    assert not scope.cancelled_caught, f"the turn did not end: {what}"
    _check_events(s, end, what)
    assert s.runner.connection is not None, f"{what}: {end.reason} {end.message}"
    assert s.pid == pid, f"{what}: {end.reason} {end.message}"
    return end


async def test_odd_replies_cost_neither_the_turn_nor_the_cli(tmp_path: Path) -> None:
    """Invalid text becomes U+FFFD, what is judged is what runs, and usage that cannot be read is unknown."""
    async with stage(tmp_path, Steps(), decide=_decide) as s:
        for name, reply in ODD_REPLIES.items():
            end = await _play(s, reply, name)

            assert end.state == "completed", f"{name}: {end.reason} {end.message}"
            texts = "".join(text.text for text in s.daemon.of("text"))
            deltas = "".join(delta.text for delta in s.daemon.of("text_delta"))
            match name:
                case "half a character in text":
                    assert end.result == texts == deltas == "half \ufffd and rest"
                case "a character in two deltas":
                    assert texts == deltas == "whole 😀 and rest"
                case "half a character in thinking":
                    assert s.daemon.of("thinking")[0].text == "hm \ufffd"
                case "half a character in a tool's input":
                    assert s.daemon.asks[0].call.command == "echo \ufffd hi"
                    assert s.daemon.of("tool_result")[0].text == "\ufffd hi"
                case "half a character in a question":
                    assert s.daemon.asks[0].questions[0].choices[0].description == "x \ufffd y"
                    assert "A" in s.daemon.of("tool_result")[0].text
                case "usage as text":
                    assert end.usage is None or end.usage.input_tokens >= 12
                    assert end.usage is not None or "usage_unknown" in s.daemon.notices()


_SERVER: Final = r"""
import json, sys
for line in sys.stdin:
    asked = json.loads(line)
    result = {
        "initialize": {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}},
                       "serverInfo": {"name": "odd", "version": "1"}},
        "tools/list": {"tools": [{"name": "do", "description": "d \ud83d", "inputSchema": {"type": "object"}}]},
        "tools/call": {"content": [{"type": "text", "text": "half \ud83d here"}, {"type": "text", "text": "\ude00"}]},
    }.get(asked["method"], {})
    if "id" in asked:
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": result}), flush=True)
"""


async def test_half_a_character_from_an_mcp_server_costs_nothing(tmp_path: Path) -> None:
    """Every MCP server can send one, in a tool's description and in a result."""
    (tmp_path / "server.py").write_text(_SERVER)
    servers = {"odd": {"command": sys.executable, "args": [str(tmp_path / "server.py")]}}
    async with stage(tmp_path, Steps(), decide=_decide, options=m.AgentOptions(mcp_servers=servers)) as s:
        end = await _play(s, Use("mcp__odd__do", {}), "MCP")

        assert end.state == "completed"
        assert s.daemon.of("tool_result")[0].text == "half \ufffd here\n\ufffd"


async def test_a_session_goes_on_after_each_odd_reply(model: Model) -> None:
    """Half a character in text, in a tool's input, in a question; usage as text: each turn completes.

    Clients read every event and every permission request, and what is allowed is what runs.
    """
    async with host(settings_for(model)) as made, made.client() as hutch:
        await made.hutch("key", "add", "anthropic", input=KEY)
        session = await made.claude(hutch, "odd", "ask")
        cli = None

        def decide(asked: m.Permission) -> m.AnswerPermission:
            if asked.kind == "question":
                assert asked.questions[0].choices[0].description == "x \ufffd y"
                return m.AnswerPermission(asked.id, "answer", answers={"Which?": "A"})
            assert asked.call.command == "echo \ufffd hi"
            return m.AnswerPermission(asked.id, "allow")

        async with log_of(hutch, session) as log:
            for name in _THROUGH_HUTCHD:
                model.script = _once(ODD_REPLIES[name])
                end = await log.play(session, "odd", decide)
                assert end.state == "completed", f"{name}: {end.reason} {end.message}"
                pid = await cli_of(hutch, session)
                assert pid == (cli := cli or pid), name

            assert without_gaps(log.events)
            assert [text.text for text in log.of("text")][:1] == ["half \ufffd and rest"]
            assert "\ufffd hi" in [result.text for result in log.of("tool_result")]
            assert end.usage is None
            assert [notice.word for notice in log.of("notice")].count("usage_unknown") == 1
            printed = await made.hutch("logs", session.id, "-o", "jsonl")
            assert len([json.loads(line) for line in printed.out.splitlines()]) == len(log.events)


_THROUGH_HUTCHD: Final = (
    "half a character in text",
    "half a character in a tool's input",
    "half a character in a question",
    "usage as text",
)


# ---------------------------------------------------------------- every field of every event of the model's stream

_EVENTS: Final[dict[str, tuple[tuple[str | int, ...], ...]]] = {
    "message_start": (
        ("type",),
        ("message",),
        *(("message", name) for name in ("id", "type", "role", "model", "content", "stop_reason", "usage")),
        *(("message", "usage", name) for name in ("input_tokens", "output_tokens", "cache_read_input_tokens")),
    ),
    "content_block_start": (
        ("type",),
        ("index",),
        ("content_block",),
        *(("content_block", name) for name in ("type", "text", "thinking", "id", "name", "input")),
    ),
    "content_block_delta": (
        ("type",),
        ("index",),
        ("delta",),
        *(("delta", name) for name in ("type", "text", "thinking", "partial_json", "signature")),
    ),
    "content_block_stop": (("type",), ("index",)),
    "message_delta": (
        ("type",),
        ("delta",),
        ("delta", "stop_reason"),
        ("usage",),
        *(("usage", name) for name in ("input_tokens", "output_tokens", "cache_creation_input_tokens")),
    ),
    "message_stop": (("type",),),
}
_VALUES: Final[tuple[Any, ...]] = (
    *(ABSENT, None, True, False, 0, 1, -1, 12.5, 10**12, 10**30, "", "x", "12", "half \ud83d", "\ude00", "x" * 50_000),
    *([], [1], [{}], {}, {"a": 1}, {"\ud83d": 1}, json.loads("[" * 70 + "]" * 70)),
)
_REPLIES: Final[tuple[Sequence[Part], ...]] = (
    (Think("hm", 2), Say("hello there", 3)),
    (Say("look"), Use("Bash", {"command": "true"}, 2)),
    (Use("mystery", {"x": 1}),),
    (Say("counted"), Usage(10, 5, 3, 2)),
)


def _odd_reply(random: Random) -> tuple[Reply, str]:
    parts = list(random.choice(_REPLIES))
    event = random.choice(sorted(_EVENTS))
    if random.randrange(8) == 0:
        name = random.choice(sorted(ODD_LINES))
        parts.insert(random.randrange(len(parts) + 1), Odd(name))
        return parts, name
    one = Replace(event, random.choice(_EVENTS[event]), random.choice(_VALUES))
    return [*parts, one], f"{event} {one.path} = {'absent' if one.value is ABSENT else ascii(one.value)[:60]}"


async def _play_variants(folder: Path, count: int) -> None:
    random = Random(seed())
    timeouts = ClaudeTimeouts(retries=0, stream_idle=10, turn_silence=60)
    async with stage(folder, Steps(), decide=_decide, timeouts=timeouts) as s:
        for number in range(count):
            reply, what = _odd_reply(random)
            await _play(s, reply, f"{number}: {what}")
            if number % 50 == 49:  # the conversation must not grow without end
                s.model.requests.clear()


async def test_no_odd_event_of_the_models_stream_costs_a_turn_or_the_cli(tmp_path: Path) -> None:
    """40 variants; the header of the run prints the seed."""
    await _play_variants(tmp_path, 40)


@pytest.mark.full
@pytest.mark.timeout(7200)
async def test_no_odd_event_of_two_thousand_costs_a_turn_or_the_cli(tmp_path: Path) -> None:
    """The same with more variants; each hundred in a conversation of their own."""
    for number in range(20):
        folder = tmp_path / str(number)
        folder.mkdir()
        await _play_variants(folder, 100)
