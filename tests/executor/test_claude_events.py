"""The translation of the CLI's lines into events."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from hutch_executor.runners.claude.events import EventTranslator
from hutch_executor.runners.claude.lines import ModelUsage, ResultLine
from hutch_executor.runners.claude.turn_end import ended
from hutch_executor.runners.claude.usage import UsageMeter, total
from hutch_shared.events import Notice, Text, UsageSeen


def tell(narrator: EventTranslator, **line: Any) -> list[tuple[str, Any]]:
    return list(narrator.translate(json.dumps(line).encode()))


def stream(narrator: EventTranslator, event: dict[str, Any], parent: str | None = None) -> list[tuple[str, Any]]:
    return tell(narrator, type="stream_event", event=event, parent_tool_use_id=parent, uuid="u", session_id="s")


def delta(index: int, **fields: Any) -> dict[str, Any]:
    return {"type": "content_block_delta", "index": index, "delta": fields}


def assistant(
    narrator: EventTranslator, block: dict[str, Any], parent: str | None = None, **more: Any
) -> list[tuple[str, Any]]:
    message = {"id": "msg_1", "model": "opus", "role": "assistant", "content": [block], "usage": {"input_tokens": 3}}
    return tell(narrator, type="assistant", message=message, parent_tool_use_id=parent, **more)


def start(narrator: EventTranslator) -> None:
    stream(narrator, {"type": "message_start", "message": {"id": "msg_1", "model": "opus", "content": []}})


@pytest.fixture
def narrator() -> EventTranslator:
    return EventTranslator("/proj", {})


def test_deltas_and_their_text_share_a_block(narrator: EventTranslator) -> None:
    """A reader can replace the deltas by the whole text."""
    start(narrator)
    told = [
        *stream(narrator, delta(0, type="thinking_delta", thinking="h")),
        *assistant(narrator, {"type": "thinking", "thinking": "h", "signature": "x"}),
        *stream(narrator, delta(1, type="text_delta", text="a")),
        *stream(narrator, delta(1, type="text_delta", text="b")),
        *assistant(narrator, {"type": "text", "text": "ab"}),
    ]

    assert told == [
        ("thinking_delta", Text("h", "msg_1:0")),
        ("thinking", Text("h", "msg_1:0")),
        ("text_delta", Text("a", "msg_1:1")),
        ("text_delta", Text("b", "msg_1:1")),
        ("text", Text("ab", "msg_1:1")),
    ]


def test_a_sub_agent_speaks_beside_the_main_agent(narrator: EventTranslator) -> None:
    """A sub-agent's text names the call that started it, and does not disturb the main agent's blocks."""
    start(narrator)
    assistant(narrator, {"type": "text", "text": "main"})
    inner = assistant(narrator, {"type": "text", "text": "inner"}, parent="toolu_1")
    outer = assistant(narrator, {"type": "text", "text": "more"})

    assert inner == [("text", Text("inner", "msg_1:0", "toolu_1"))]
    assert outer == [("text", Text("more", "msg_1:1"))]


def test_a_tool_call_and_its_result(narrator: EventTranslator) -> None:
    """The call is in the common vocabulary; the result carries the digest of the input that ran."""
    narrator = EventTranslator("/proj", {"toolu_1": "d" * 64})
    block = {"type": "tool_use", "id": "toolu_1", "name": "Bash", "input": {"command": "ls"}}
    (kind, seen), *_ = assistant(narrator, block)
    result = {
        "type": "tool_result",
        "tool_use_id": "toolu_1",
        "is_error": True,
        "content": [{"type": "text", "text": "no"}, {"type": "image"}],
    }
    told = tell(narrator, type="user", message={"role": "user", "content": [result]}, tool_use_result="Error: no")

    assert kind == "tool_call"
    assert (seen.call["call_id"], seen.call["action"], seen.call["command"]) == ("toolu_1", "run_command", "ls")
    assert [(k, msgspec.to_builtins(d)) for k, d in told] == [
        ("tool_result", {"call_id": "toolu_1", "text": "no\n[image]", "is_error": True, "digest": "d" * 64})
    ]


def test_the_usage_of_a_request_is_reported_at_its_end(narrator: EventTranslator) -> None:
    """The counts of the last delta are the final ones."""
    start(narrator)
    usage = {"input_tokens": 5, "output_tokens": 7, "cache_read_input_tokens": 2, "cache_creation_input_tokens": None}
    told = stream(narrator, {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": usage})

    assert told == [("usage", UsageSeen(5, 7, 2, 0, model="opus"))]


@pytest.mark.parametrize(
    "line",
    [
        {"type": "system", "subtype": "thinking_tokens", "estimated_tokens": 3},
        {"type": "system", "subtype": "status", "status": "requesting"},
        {
            "type": "stream_event",
            "event": {"type": "content_block_start", "index": 0, "content_block": {"type": "text"}},
        },
        {"type": "stream_event", "event": delta(0, type="input_json_delta", partial_json='{"a')},
        {"type": "stream_event", "event": {"type": "a_new_one"}},
        {"type": "rate_limit_event", "rate_limit_info": {"status": "allowed"}},
    ],
)
def test_lines_without_content_become_no_event(narrator: EventTranslator, line: dict[str, Any]) -> None:
    """Counters, starts and stops of blocks, and pieces of inputs become no event."""
    assert tell(narrator, **line) == []


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ({"type": "system", "subtype": "compact_boundary"}, "compacted"),
        ({"type": "system", "subtype": "task_started", "description": "look"}, "subagent_started"),
        ({"type": "system", "subtype": "of_tomorrow"}, "agent_note"),
        ({"type": "of_tomorrow"}, "agent_note"),
        ({"type": "user", "message": {"content": "[Request interrupted by user]"}}, "agent_note"),
        ({"type": "rate_limit_event", "rate_limit_info": {"status": "rejected"}}, "rate_limit"),
    ],
)
def test_other_lines_become_notices(narrator: EventTranslator, line: dict[str, Any], word: str) -> None:
    """Unknown kinds of lines become notices too, so that nothing of a newer CLI is lost."""
    ((kind, notice),) = tell(narrator, **line)

    assert kind == "notice"
    assert notice.word == word


def test_the_summary_of_a_compacted_conversation_is_kept_but_not_shown_whole(narrator: EventTranslator) -> None:
    """The summary may be long: the message gives its size, the details its beginning. The next text is a note again."""
    tell(narrator, type="system", subtype="compact_boundary")
    ((_, summary),) = tell(narrator, type="user", message={"content": "x" * 5000})
    ((_, note),) = tell(narrator, type="user", message={"content": "hello"})

    assert (summary.word, len(summary.message) < 200, summary.details) == (
        "compact_summary",
        True,
        {"text": "x" * 2000},
    )
    assert (note.word, note.message) == ("agent_note", "hello")


def test_a_retry_says_why_and_when(narrator: EventTranslator) -> None:
    """The user sees that the provider causes the wait."""
    retry = {"attempt": 1, "max_retries": 2, "retry_delay_ms": 1500, "error_status": 429, "error": "rate_limit"}
    told = tell(narrator, type="system", subtype="api_retry", **retry)

    message = "The model did not answer (status 429); attempt 1 of 2 in 1.5 s."
    assert told == [("notice", Notice("retrying", message, {"status": 429, "error": "rate_limit"}))]
    assert ended(narrator.awaited(), None).reason == "rate_limited"


@pytest.mark.parametrize(("named", "taken"), [("/tmp/cc-socks/1.sock", "/tmp/cc-socks/1.sock"), ("", None), (7, None)])
def test_the_socket_over_which_the_cli_takes_messages_is_kept(named: Any, taken: str | None) -> None:
    """It names none, or an empty one, if it takes none."""
    narrator = EventTranslator("/proj", {})
    tell(narrator, type="system", subtype="init", messaging_socket_path=named)
    tell(narrator, type="system", subtype="init")

    assert narrator.message_socket == taken


def test_the_init_line_is_reported_once(narrator: EventTranslator) -> None:
    """The CLI repeats the line in every turn. A failed MCP server becomes a notice."""
    line: dict[str, Any] = {"session_id": "s-9", "model": "opus", "claude_code_version": "2", "tools": ["Bash"]}
    line |= {"mcp_servers": [{"name": "db", "status": "failed"}, {"name": "ok", "status": "connected"}]}
    first = tell(narrator, type="system", subtype="init", **line)
    again = tell(narrator, type="system", subtype="init", **line)

    assert [notice.word for _, notice in first] == ["agent_ready", "mcp_failed"]
    assert "db" in first[1][1].message
    assert again == []
    assert narrator.session == "s-9"


@pytest.mark.parametrize("servers", [None, "db", {"db": "failed"}, ["db", 3]])
def test_mcp_servers_in_another_form_are_left_out(narrator: EventTranslator, servers: Any) -> None:
    """A newer CLI may list them differently; the turn goes on."""
    events = tell(narrator, type="system", subtype="init", session_id="s-9", mcp_servers=servers)

    assert [notice.word for _, notice in events] == ["agent_ready"]
    assert narrator.session == "s-9"


@pytest.mark.parametrize("kind", ["user", "assistant", "stream_event", "system", "rate_limit_event", "result", "new"])
@pytest.mark.parametrize(
    "value",
    [
        b'"\xff"',
        100_000 * b"[",
        b"1e999",
        b'"\\ud800"',
        b"nonsense",
        b"",
        b"null",
        b"5",
        b"true",
        b'"x"',
        b"[1]",
        b"{}",
    ],
)
def test_only_the_kind_of_a_line_decides_that_a_turn_ends(narrator: EventTranslator, kind: str, value: bytes) -> None:
    """Whatever the fields hold, a line is translated, its events have valid text, and a `result` ends the turn."""
    names = (b"subtype", b"event", b"message", b"is_error", b"modelUsage", b"errors", b"rate_limit_info", b"origin")
    fields = b",".join(b'"%b":%b' % (name, value) for name in names)
    events = narrator.translate(b'{"type":"%b",%b}' % (kind.encode(), fields))

    assert (narrator.result is not None) == (kind == "result")
    for _, data in events:
        assert msgspec.json.decode(msgspec.json.encode(data), type=type(data)) == data


@pytest.mark.parametrize("line", [b'{"x":%b,"type":"result"}', b'{"type":"result","x":{"type":"user","y":%b}}'])
def test_a_result_that_is_nested_too_deeply_ends_the_turn(narrator: EventTranslator, line: bytes) -> None:
    """It repeats the input of each denied call. What it says is unknown."""
    narrator.translate(line % (5000 * b"[" + 5000 * b"]"))

    assert narrator.result == ResultLine()


def test_halves_of_a_character_in_two_deltas_are_joined(narrator: EventTranslator) -> None:
    """A half waits for the next delta of its block. Without its other half it becomes U+FFFD."""
    start(narrator)
    pieces = ["a\ud83d", "\ude00b", "\ud83d", "\ude00", "\ud83d", "x", "\ude00", "y\ud83d"]
    told = [event for piece in pieces for event in stream(narrator, delta(0, type="text_delta", text=piece))]
    last = stream(narrator, {"type": "content_block_stop", "index": 0})

    texts = ["a", "😀b", "😀", "\ufffdx", "\ufffd", "y", "\ufffd"]
    assert [*told, *last] == [("text_delta", Text(text, "msg_1:0")) for text in texts]


def test_a_half_does_not_wait_for_another_block(narrator: EventTranslator) -> None:
    """The halves of two blocks are no character."""
    start(narrator)
    told = [
        *stream(narrator, delta(0, type="thinking_delta", thinking="a\ud83d")),
        *stream(narrator, delta(1, type="text_delta", text="\ude00b")),
    ]

    assert told == [
        ("thinking_delta", Text("a", "msg_1:0")),
        ("thinking_delta", Text("\ufffd", "msg_1:0")),
        ("text_delta", Text("\ufffdb", "msg_1:1")),
    ]


def test_a_field_of_another_type_counts_as_missing(narrator: EventTranslator) -> None:
    """The rest of the line is read."""
    start(narrator)
    block = {"type": "tool_use", "id": 7, "name": "Bash", "input": {"command": "ls \ud83d", "k\ud83d": 1}, "text": []}
    message = {"id": "msg_1", "model": 3, "content": [None, block, {"type": "text", "text": "hi", "is_error": "no"}]}
    (_, seen), (_, text) = tell(narrator, type="assistant", message=message, parent_tool_use_id=4)

    assert seen.call["input"] == {"command": "ls \ufffd", "k\ufffd": 1}
    assert (seen.call["command"], seen.call["call_id"]) == ("ls \ufffd", "")
    assert (text.text, text.parent) == ("hi", None)


def test_counts_of_another_type_are_unknown(narrator: EventTranslator) -> None:
    """Hutch reports no usage of a request whose counts it cannot read."""
    start(narrator)
    usage = {"input_tokens": "5", "output_tokens": 7}

    assert stream(narrator, {"type": "message_delta", "delta": {}, "usage": usage}) == []


@pytest.mark.parametrize(
    ("origin", "ends"),
    [
        (None, True),
        ({"kind": "human"}, True),
        ({"kind": 4}, True),
        ({"kind": "peer", "verifiedPeerPid": 4}, False),
        ({"kind": "task-notification"}, False),
        ({"kind": "of-tomorrow"}, False),
    ],
)
def test_a_result_from_elsewhere_belongs_to_no_turn(narrator: EventTranslator, origin: Any, ends: bool) -> None:
    """Another session, or a task, may have started a turn of the CLI."""
    tell(narrator, type="result", subtype="success", is_error=False, origin=origin)

    assert (narrator.result is not None) == ends


def test_a_result_that_is_written_twice_ends_one_turn(narrator: EventTranslator) -> None:
    """The line's own id tells that it came before."""
    for uuid, ends in (("u1", True), ("u1", False), ("u2", True)):
        tell(narrator, type="result", subtype="success", is_error=False, uuid=uuid)

        assert (narrator.result is not None) == ends
        narrator.begin_turn()


def test_a_new_turn_forgets_the_last_ones_end_but_not_what_goes_on(narrator: EventTranslator) -> None:
    """A line of the CLI may still say something about the next one."""
    tell(narrator, type="system", subtype="status", status="requesting")
    tell(narrator, type="system", subtype="status", status="compacting")
    tell(narrator, type="system", subtype="status", status=None, compact_result="failed", compact_error="no room")
    tell(narrator, type="command_lifecycle", command_uuid="p1", state="started")
    tell(narrator, type="result", subtype="success", is_error=False)
    tell(narrator, type="system", subtype="compact_boundary")
    before = narrator.asked, narrator.summary_lost, narrator.compact_error, narrator.started_prompt

    narrator.begin_turn()
    summary = tell(narrator, type="user", message={"role": "user", "content": "All of it."})

    assert before == (True, True, "no room", "p1")
    assert (narrator.asked, narrator.summary_lost, narrator.started_prompt, narrator.result) == (
        False,
        False,
        None,
        None,
    )
    assert narrator.compact_error == "Claude Code wrote no summary."
    assert summary[0][1].word == "compact_summary"


def test_an_unknown_kind_is_reported_once_and_counted(narrator: EventTranslator) -> None:
    """The notice has the beginning of the line; a summary says how often the kind came."""
    told = [event for _ in range(3) for event in tell(narrator, type="of_tomorrow", text="x" * 5000)]
    ((_, notice),) = told
    summary = narrator.unknown.summary()

    assert notice.details["kind"] == "of_tomorrow"
    assert len(notice.details["content"]) == 1000
    assert summary is not None
    assert summary.details == {"counts": {"of_tomorrow": 3}}
    assert narrator.unknown.summary() is None


def test_a_thousand_unknown_kinds_do_not_fill_the_record(narrator: EventTranslator) -> None:
    """After twenty kinds all others share one notice."""
    told = [event for n in range(1000) for event in tell(narrator, type=f"kind {n}")]

    assert len(told) == 21
    assert told[-1][1].details["kind"] == "other kinds"


def test_progress_becomes_no_event(narrator: EventTranslator) -> None:
    """The CLI sends a heartbeat each 30 s of a call."""
    beat = {"tool_use_id": "toolu_1-heartbeat-0", "parent_tool_use_id": "toolu_1", "elapsed_time_seconds": 30}

    assert tell(narrator, type="tool_progress", tool_name="Bash", heartbeat=True, **beat) == []


def test_a_warning_keeps_its_content(narrator: EventTranslator) -> None:
    """The CLI wrote it for a person."""
    told = tell(narrator, type="system", subtype="informational", content="Disk is full", level="warning", uuid="u")

    assert told == [("notice", Notice("agent_note", "Disk is full", {"subtype": "informational", "level": "warning"}))]


def test_the_cli_may_be_silent_while_something_is_in_flight(narrator: EventTranslator) -> None:
    """A model request, a call without a result, and the shortening of the conversation."""
    moments = [narrator.in_flight]
    use = {"type": "tool_use", "id": "toolu_1", "name": "Bash", "input": {}}
    done = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "ok"}
    for line in (
        {"type": "system", "subtype": "status", "status": "requesting"},
        {"type": "assistant", "message": {"id": "m", "content": [use]}},
        {"type": "stream_event", "event": {"type": "message_stop"}},
        {"type": "user", "message": {"content": [done]}},
        {"type": "system", "subtype": "status", "status": "compacting"},
        {"type": "system", "subtype": "status", "status": None},
    ):
        tell(narrator, **line)
        moments.append(narrator.in_flight)

    assert moments == [False, True, True, True, False, True, False]


def test_the_model_is_awaited_from_the_request_to_the_end_of_its_message(narrator: EventTranslator) -> None:
    """Only in that time does a silent CLI mean a silent model."""
    moments = [narrator.awaits_model]
    for line in (
        {"type": "system", "subtype": "status", "status": "requesting"},
        {"type": "stream_event", "event": {"type": "message_start", "message": {"id": "m"}}},
        {"type": "stream_event", "event": {"type": "message_stop"}},
    ):
        tell(narrator, **line)
        moments.append(narrator.awaits_model)

    assert moments == [False, True, True, False]


@pytest.mark.parametrize(
    ("result", "state", "reason"),
    [
        (ResultLine("success", is_error=False, result="done", terminal_reason="completed"), "completed", "completed"),
        (ResultLine("success", is_error=True, api_error_status=401), "failed", "auth_failed"),
        (ResultLine("success", is_error=True, api_error_status=413), "failed", "bad_request"),
        (ResultLine("success", is_error=True, api_error_status=503), "failed", "provider_error"),
        (ResultLine("success", is_error=True, api_error_status=529), "failed", "overloaded"),
        (ResultLine("success", is_error=True, api_error="connection_failed"), "failed", "stream_broken"),
        (ResultLine("success", is_error=True, api_error="stream_idle_timeout"), "failed", "stream_stalled"),
        (
            ResultLine("success", is_error=True, terminal_reason="api_error", result="Request timed out."),
            "failed",
            "stream_stalled",
        ),
        (ResultLine("error_max_turns", is_error=True), "failed", "max_turns"),
        (
            ResultLine("error_during_execution", is_error=True, terminal_reason="aborted_tools"),
            "stopped",
            "interrupted",
        ),
        (
            ResultLine("error_during_execution", is_error=True, errors=["No conversation found with session ID: x"]),
            "failed",
            "resume_unknown",
        ),
        (ResultLine("error_during_execution", is_error=True), "failed", "agent_error"),
        (ResultLine("error_of_tomorrow"), "failed", "agent_error"),
        (ResultLine("success"), "failed", "no_result"),
        (ResultLine(), "failed", "no_result"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_how_a_turn_ended(result: ResultLine, state: str, reason: str) -> None:
    """`is_error` takes precedence over the subtype."""
    end = ended(result, None)

    assert (end.state, end.reason) == (state, reason)
    assert end.message
    assert end.result == (result.result if state == "completed" else None)


def opus(tokens: int, usd: float) -> ModelUsage:
    return ModelUsage(tokens, 1, 0, 0, usd)


def sums(usage: dict[str, ModelUsage | None] | None, own: dict[str, ModelUsage | None] | None = None) -> ResultLine:
    return ResultLine(model_usage=usage, usage_of_turn=own)


def used(tokens: int, usd: float) -> list[UsageSeen]:
    return [UsageSeen(tokens, 0, 0, 0, usd, "opus", total=True)]


def test_the_usage_of_a_turn_is_the_difference_of_the_sums() -> None:
    """The CLI's sums continue over turns and resumed conversations."""
    meter = UsageMeter({"opus": ModelUsage(10, 1, 0, 0, 0.5)})
    first = meter.turn(sums({"opus": ModelUsage(30, 3, 4, 0, 1.25), "haiku": ModelUsage(5, 5, 0, 0, 0.01)}))
    second = meter.turn(sums({"opus": ModelUsage(31, 4, 4, 0, 1.5), "haiku": ModelUsage(5, 5, 0, 0, 0.01)}))

    assert first == [UsageSeen(20, 2, 4, 0, 0.75, "opus", total=True), UsageSeen(5, 5, 0, 0, 0.01, "haiku", total=True)]
    assert total(first) == UsageSeen(25, 7, 4, 0, 0.76, None, total=True)
    assert second == [UsageSeen(1, 1, 0, 0, 0.25, "opus", total=True)]
    assert total([]) is None


def test_dollars_of_a_model_without_a_known_price_are_not_taken() -> None:
    """The CLI would price it as another model. The sum over all models is unknown then."""
    meter = UsageMeter({})
    now: dict[str, ModelUsage | None] = {"opus": opus(30, 1.0), "mine": ModelUsage(5, 5, 0, 0, 0.5, "unknown")}
    seen = meter.turn(sums(now))

    assert seen == [UsageSeen(30, 1, 0, 0, 1.0, "opus", total=True), UsageSeen(5, 5, 0, 0, None, "mine", total=True)]
    assert total(seen) == UsageSeen(35, 6, 0, 0, None, None, total=True)


@pytest.mark.parametrize(
    "odd", [None, {}, {"opus": None}, {"opus": opus(5, 0.5)}, {"opus": opus(10, 0.4)}, {"x": None}]
)
def test_unknown_usage_is_counted_with_the_next_readable_sums(odd: dict[str, ModelUsage | None] | None) -> None:
    """Sums that are missing, cannot be read or became smaller are unknown; no token is lost, and none counts twice."""
    meter = UsageMeter({"opus": opus(10, 0.5)})

    assert meter.turn(sums(odd)) is None
    assert meter.turn(sums({"opus": opus(30, 1.0)})) == used(20, 0.5)


def test_sums_that_stay_smaller_are_the_new_start() -> None:
    """Either the first sum was wrong, or the CLI began to count again; the turn in between stays unknown."""
    meter = UsageMeter({"opus": opus(0, 0.0)})

    assert meter.turn(sums({"opus": opus(10**12, 0.5)})) is not None
    assert meter.turn(sums({"opus": opus(30, 1.0)})) is None
    assert meter.turn(sums({"opus": opus(40, 1.5)})) == used(10, 0.5)


def test_without_readable_sums_the_count_of_the_turn_counts() -> None:
    """One count of a gateway that is text makes the CLI's sums text for ever."""
    meter = UsageMeter({})

    assert meter.turn(sums({"opus": None}, {"opus": None})) is None
    assert meter.turn(sums({"opus": None}, {"opus": ModelUsage(7, 0, 0, 0, 0.25)})) == used(7, 0.25)
    assert meter.turn(sums({"opus": ModelUsage(20, 0, 0, 0, 1.0)})) == used(13, 0.75)


def test_sums_that_grow_again_after_a_wrong_one_count_before_the_turns_own() -> None:
    """Otherwise one wrong sum would leave every later turn to a count that nothing confirms."""
    meter = UsageMeter({})
    own: dict[str, ModelUsage | None] = {"opus": opus(100, 0.25)}

    assert meter.turn(sums({"opus": opus(10**12, 0.25)}, own)) is not None
    assert total(meter.turn(sums({"opus": opus(200, 0.5)}, own)) or []) == UsageSeen(
        100, 1, 0, 0, 0.25, "opus", total=True
    )
    assert meter.turn(sums({"opus": opus(300, 0.75)}, {"opus": opus(1, 0.25)})) == used(100, 0.25)


def test_a_turn_that_asked_no_model_used_nothing() -> None:
    """Empty sums say so; missing ones say nothing."""
    assert UsageMeter({}).turn(sums({}), asked=False) == []
    assert UsageMeter({}).turn(sums(None), asked=False) is None


def test_with_unknown_starting_sums_counting_begins_with_the_next_turn() -> None:
    """With unknown starting sums the first turn's usage is unknown, unless the CLI counts it by itself."""
    meter, other = UsageMeter(None), UsageMeter(None)

    assert meter.turn(sums({"opus": opus(30, 0.5)})) is None
    assert meter.turn(sums({"opus": opus(31, 0.5)})) == used(1, 0.0)
    assert other.turn(sums({"opus": opus(30, 0.5)}, {"opus": ModelUsage(2, 0, 0, 0, 0.1)})) == used(2, 0.1)
    assert other.turn(sums({"opus": opus(31, 0.5)})) == used(1, 0.0)


def test_a_prompt_that_reached_no_model_is_not_completed() -> None:
    """The CLI took it for something else."""
    end = ended(ResultLine("success", is_error=False, result="Status: fine"), None, asked=False)

    assert (end.state, end.reason, end.result) == ("failed", "not_asked", None)
