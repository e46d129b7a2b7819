"""Every field of every line of the CLI, replaced by every kind of value: the turn ends, and the CLI lives.

The lines are those of the real CLI (`lines/recorded.jsonl`, and a few from its documentation). `lines/player.py` plays
them, one turn after the other, to a real `ClaudeRunner`.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
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
from tests.rehearsal import Steps
from tests.sampling import seed
from tests.system.claude_stage import FakeDaemon, allow, answer, stage

_FOLDER: Final = Path(__file__).with_name("lines")
_ABSENT: Final = object()
_VALUES: Final[tuple[Any, ...]] = (
    _ABSENT,
    *(None, True, False, 0, 1, -1, 12.5, -0.0, 1e308, 10**12, 2**53, 10**30, -(10**30), 10**450, float("inf")),
    *("", "x", "12", "half \ud83d", "\ude00 half", "result", "\x00", "x" * 100_000),
    *(
        [],
        [1],
        ["\ud83d"],
        [None],
        [[]],
        {},
        {"a": 1},
        {"\ud83d": "\ude00"},
        {"type": "result"},
        [{}],
        [{"type": "text"}],
    ),
    json.loads("[" * 90 + "]" * 90),
)
_TOKENS: Final = 100
"""What each turn uses of input tokens, as its result line says before a field is replaced."""
_SILENCE: Final = 0.3


def _timeouts(silence: float) -> ClaudeTimeouts:
    return ClaudeTimeouts(turn_silence=silence, model_silence=silence, probe_after=silence, probe_answer=20, store=0.3)


_TIMEOUTS: Final = _timeouts(_SILENCE)

Line = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Variant:
    """A turn with one line changed. `what` says how, for a message."""

    what: str
    lines: list[bytes]
    loses_end: bool = False
    """Whether the line that ends the turn may be unrecognisable."""


def _scenes() -> dict[str, list[Line]]:
    """Return the lines of each turn by its name."""
    rows = [json.loads(line) for line in (_FOLDER / "recorded.jsonl").read_text().splitlines()]
    scenes = {row["turn"]: row["lines"] for row in rows}
    ending = scenes["text"][-1]
    start = scenes["text"][:2]
    return scenes | {"documented": [*start, *_DOCUMENTED, ending]}


_DOCUMENTED: Final[list[Line]] = [
    {"type": "system", "subtype": "status", "status": "compacting"},
    {"type": "system", "subtype": "status", "status": None, "compact_result": "success", "permissionMode": "plan"},
    {"type": "system", "subtype": "compact_boundary", "compact_metadata": {"trigger": "manual", "pre_tokens": 9}},
    {"type": "system", "subtype": "informational", "content": "Disk is full", "level": "warning", "uuid": "u"},
    {"type": "tool_progress", "tool_use_id": "t-heartbeat-0", "parent_tool_use_id": "t", "elapsed_time_seconds": 30},
    {"type": "rate_limit_event", "rate_limit_info": {"status": "rejected", "resetsAt": 1, "utilization": 0.5}},
    {"type": "command_lifecycle", "command_uuid": "u", "state": "started"},
    {"type": "conversation_reset", "new_conversation_id": "c"},
    {"type": "control_cancel_request", "request_id": "nothing"},
    {"type": "of_tomorrow", "text": "hello"},
]


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*path, key)
        yield from _paths(item, (*path, key))


def _replaced(line: Line, path: tuple[Any, ...], value: Any) -> Line:
    line = copy.deepcopy(line)
    place: Any = line
    for key in path[:-1]:
        place = place[key]
    if value is not _ABSENT:
        place[path[-1]] = value
    else:
        del place[path[-1]]
    return line


def _numbered(lines: list[Line], number: int) -> list[Line]:
    """Return the lines with ids of their own, and with sums of usage that grow from turn to turn."""
    lines = copy.deepcopy(lines)
    for line in lines:
        if line["type"] == "control_request":
            line["request_id"] = f"{number}-{line['request_id']}"
        if line["type"] == "result":
            line["uuid"] = f"{number}-result"
            sums = {"inputTokens": number * _TOKENS, "outputTokens": number, "costUSD": number / 100}
            for usage in line["modelUsage"].values():
                usage |= sums
            line["modelUsage"] = dict([*line["modelUsage"].items()][:1]) or {"opus": dict(_ZERO, **sums)}
            own = {"inputTokens": _TOKENS, "outputTokens": 1, "costUSD": 0.01}
            line["model_usage_since_last_result"] = {model: dict(_ZERO, **own) for model in line["modelUsage"]}
    return lines


_ZERO: Final = {"cacheReadInputTokens": 0, "cacheCreationInputTokens": 0}


def _encoded(line: Line) -> bytes:
    waits = b"?" if line.get("type") == "control_request" else b" "
    return waits + json.dumps(line).replace("Infinity", "1e999").encode()


def variant(random: Random, scenes: dict[str, list[Line]], number: int) -> Variant:
    """Return a random turn with one line changed."""
    name = random.choice(sorted(scenes))
    lines = _numbered(scenes[name], number)
    place = random.randrange(len(lines))
    line = lines[place]
    encoded = [_encoded(one) for one in lines]
    what, is_end = f"{number}: {name}, line {place} ({line['type']})", line["type"] == "result"
    match random.randrange(20):
        case 0:
            encoded[place : place + 1] = [encoded[place]] * 2
            return Variant(f"{what} twice", encoded)
        case 1:
            cut = random.randrange(1, len(encoded[place]))
            encoded[place] = encoded[place][:cut]
            return Variant(f"{what} cut at {cut}", encoded, is_end)
        case 2:
            at = random.randrange(1, len(encoded[place]))
            bad = random.choice((b"\xff", b"\xed\xa0\xbd", b"\x00", b"\\", b'"', b"\\ud83d"))
            encoded[place] = encoded[place][:at] + bad + encoded[place][at:]
            return Variant(f"{what} with {bad!r} at {at}", encoded, is_end)
        case _:
            path = random.choice([*_paths(line)])
            value = random.choice(_VALUES)
            odd = _replaced(line, path, value)
            encoded[place] = encoded[place][:1] + _encoded(odd)[1:]
            shown = "absent" if value is _ABSENT else ascii(value)[:60]
            return Variant(f"{what}, {path} = {shown}", encoded, is_end and path == ("type",))


def _decide(call: m.ToolCall) -> m.PermissionDecision:
    return answer(call, {"Which?": "A"}) if call.agent_tool == "AskUserQuestion" else allow(call)


def _check(daemon: FakeDaemon, end: TurnEnded, odd: Variant) -> None:
    """Check what holds after every turn."""
    for kind, data, native in [*daemon.events, ("turn_ended", end, None)]:
        body = b"{" + event_body(kind, data, native)
        assert is_sound(body), odd.what
        event = msgspec.json.decode(body)
        msgspec.json.decode(msgspec.json.encode(event["data"]), type=DATA_OF_KIND[event["kind"]])
        assert len(body) < 2_000_000, odd.what
    for ask in daemon.asks:
        assert is_sound(msgspec.json.encode(ask.call)) or "[[[[[" in repr(ask.call.input), odd.what
    known = end.usage is not None and end.usage.input_tokens >= _TOKENS and (end.usage.usd or 0) >= 0.0099
    assert known or "usage_unknown" in daemon.notices() or odd.loses_end, odd.what
    assert end.state in ("completed", "failed", "stopped"), odd.what
    assert end.reason != "agent_silent" or odd.loses_end, odd.what


def _player(folder: Path) -> str:
    """Write a CLI that plays `folder/scene`, and return its path."""
    cli = folder / "cli"
    cli.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "{_FOLDER / "player.py"}" "{folder / "scene"}"\n')
    cli.chmod(0o700)
    return str(cli)


async def _play(folder: Path, count: int) -> None:
    random, scenes = Random(seed()), _scenes()
    scene = folder / "scene"
    async with stage(folder, Steps(), decide=_decide, cli=_player(folder), timeouts=_timeouts(2.0)) as s:
        for number in range(1, count + 1):
            odd = variant(random, scenes, number)
            scene.write_bytes(b"\n".join(odd.lines))
            pid = s.pid if s.runner.connection is not None else None
            s.daemon.events.clear()
            s.daemon.asks.clear()
            with anyio.move_on_after(30) as scope:
                end = await s.turn()
            assert not scope.cancelled_caught, f"the turn did not end: {odd.what}"
            _check(s.daemon, end, odd)
            lives = s.runner.connection is not None and s.runner.connection.process.is_ready()
            assert odd.loses_end or (lives and s.pid == (pid or s.pid)), f"{odd.what}: {end.reason} {end.message}"


@pytest.mark.timeout(120)
async def test_no_odd_line_costs_a_turn_or_the_cli(tmp_path: Path) -> None:
    """500 variants; the header of the run prints the seed."""
    await _play(tmp_path, 500)


@pytest.mark.full
@pytest.mark.timeout(3600)
async def test_no_odd_line_of_twenty_thousand_costs_a_turn_or_the_cli(tmp_path: Path) -> None:
    """The same with more variants."""
    await _play(tmp_path, 20_000)


# ---------------------------------------------------------------- silence


def _scene(*lines: Line) -> bytes:
    start, *_ = _scenes()["text"]
    return b"\n".join(map(_encoded, (start, *lines)))


_REQUESTING: Final = {"type": "system", "subtype": "status", "status": "requesting"}
_STOP: Final = {"type": "stream_event", "event": {"type": "message_stop"}}
_CALL: Final = {
    "type": "assistant",
    "message": {"id": "m", "content": [{"type": "tool_use", "id": "t", "name": "mcp__build__all", "input": {}}]},
}
_COMPACTING: Final = {"type": "system", "subtype": "status", "status": "compacting"}


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ((), "agent_silent"),
        ((_REQUESTING, _STOP), "agent_silent"),
        ((_REQUESTING,), "stream_stalled"),
        ((_REQUESTING, _CALL, _STOP), None),
        ((_COMPACTING,), None),
    ],
    ids=["nothing sent", "answer complete", "model request", "tool call", "compacting"],
)
async def test_silence_without_a_reason_ends_the_turn(
    tmp_path: Path, lines: tuple[Line, ...], reason: str | None
) -> None:
    """A model request has a limit of its own; a tool call and the shortening of the conversation have none."""
    (tmp_path / "scene").write_bytes(_scene(*lines))
    async with stage(tmp_path, Steps(), cli=_player(tmp_path), timeouts=_TIMEOUTS) as s:
        end = None
        with anyio.move_on_after(10 if reason else 5 * _SILENCE):
            end = await s.turn()

        assert (end and end.reason) == reason
        if reason is not None and lines:
            assert "usage_unknown" in s.daemon.notices()


_NO_SUMMARY: Final = {"type": "system", "subtype": "status", "status": None, "compact_result": "failed"}


@pytest.mark.parametrize(
    ("usage", "lines", "times"),
    [
        ({"opus": _ZERO | {"inputTokens": 1, "outputTokens": 1, "costUSD": 0.1}}, (), 0),
        ({"opus": _ZERO | {"inputTokens": 1, "outputTokens": 1, "costUSD": 0.1}}, (_COMPACTING, _NO_SUMMARY), 1),
        ({}, (), 1),
        ({}, (_COMPACTING, _NO_SUMMARY), 1),
    ],
    ids=["known", "summary lost", "no sums", "summary lost and no sums"],
)
async def test_unknown_usage_is_reported_once(
    tmp_path: Path, usage: dict[str, Any], lines: tuple[Line, ...], times: int
) -> None:
    """A turn may have more than one reason for it."""
    ending = _scenes()["text"][-1] | {"modelUsage": usage}
    ending.pop("model_usage_since_last_result", None)
    (tmp_path / "scene").write_bytes(_scene(_REQUESTING, *lines, ending))
    async with stage(tmp_path, Steps(), cli=_player(tmp_path), timeouts=_TIMEOUTS) as s:
        await s.turn()

        assert s.daemon.notices().count("usage_unknown") == times


async def test_lines_that_wait_for_us_are_no_silence_of_the_cli(tmp_path: Path) -> None:
    """While hutchd is away and the spool is full, the executor reports nothing, and the agent is not to blame."""
    (tmp_path / "scene").write_bytes(b"\n".join(map(_encoded, _numbered(_scenes()["text"], 1))))
    async with (
        stage(tmp_path, Steps(), cli=_player(tmp_path), timeouts=_TIMEOUTS) as s,
        anyio.create_task_group() as group,
    ):
        ends: list[TurnEnded] = []

        async def play() -> None:
            ends.append(await s.turn())

        s.daemon.takes = anyio.Event()
        group.start_soon(play)
        await anyio.sleep(5 * _SILENCE)
        s.daemon.takes.set()

    assert ends[0].state == "completed"


async def test_a_waiting_permission_request_is_a_reason_to_be_silent(tmp_path: Path) -> None:
    """The user may think for as long as they want."""
    scene = [line for line in _scenes()["bash"] if line.get("request", {}).get("subtype") != "hook_callback"]
    (tmp_path / "scene").write_bytes(b"\n".join(_encoded(line) for line in scene[: scene.index(scene[-1])]))
    async with (
        stage(tmp_path, Steps(), decide=None, cli=_player(tmp_path), timeouts=_TIMEOUTS) as s,
        anyio.create_task_group() as group,
    ):
        group.start_soon(s.turn)
        await s.daemon.until(lambda daemon: bool(daemon.asks))
        await anyio.sleep(5 * _SILENCE)

        assert s.runner.turn is not None
        assert s.runner.turn.cause is None
        group.cancel_scope.cancel()


async def test_the_count_of_unknown_lines_is_reported_at_the_end(tmp_path: Path) -> None:
    """Once per session: the first with its content, then the number."""
    scenes = _scenes()
    lines = [*scenes["text"][:-1], *3 * [{"type": "of_tomorrow", "text": "hello"}], scenes["text"][-1]]
    (tmp_path / "scene").write_bytes(b"\n".join(map(_encoded, lines)))
    async with stage(tmp_path, Steps(), cli=_player(tmp_path), timeouts=_TIMEOUTS) as s:
        for number in range(2):
            lines[-1]["uuid"] = str(number)
            (tmp_path / "scene").write_bytes(b"\n".join(map(_encoded, lines)))
            await s.turn()
        unknown = [notice for notice in s.daemon.of("notice") if notice.details.get("kind") == "of_tomorrow"]
        daemon = s.daemon

    assert len(unknown) == 1
    assert daemon.of("notice")[-1].details == {"counts": {"of_tomorrow": 6}}
