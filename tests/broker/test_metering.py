"""Token counts of a streamed response, for chunks of any size."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hutch_broker.metering import meter_for
from hutch_broker.prices import PriceTable, Unpriced
from hutch_broker.usage import TokenCount
from hutch_shared.broker_link import Price


def sse(*values: Any) -> bytes:
    return b"".join(b"event: x\ndata: " + json.dumps(value).encode() + b"\n\n" for value in values)


ANTHROPIC = sse(
    {"type": "message_start", "message": {"model": "claude-x", "usage": {
        "input_tokens": 10, "output_tokens": 1, "cache_read_input_tokens": 5, "cache_creation_input_tokens": 3}}},
    {"type": "content_block_delta", "delta": {"text": 'he said "usage": {"output_tokens": 999} \n data: {"usage": 1}'}},
    {"type": "message_delta", "usage": {"output_tokens": 42}},
)  # fmt: skip
OPENAI_CHAT = sse(
    {"model": "gpt-x", "choices": [{"delta": {"content": '"usage"'}}], "usage": None},
    {"model": "gpt-x", "choices": [], "usage": {
        "prompt_tokens": 10, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 4}}},
)  # fmt: skip
OPENAI_RESPONSES = sse(
    {"type": "response.created", "response": {"model": "gpt-x", "usage": None}},
    {"type": "response.completed", "response": {"model": "gpt-x", "usage": {
        "input_tokens": 10, "output_tokens": 7, "input_tokens_details": {"cached_tokens": 4}}}},
)  # fmt: skip
GEMINI = sse(
    {"modelVersion": "gemini-x", "usageMetadata": {"promptTokenCount": 10}},
    {"modelVersion": "gemini-x", "usageMetadata": {
        "promptTokenCount": 10, "candidatesTokenCount": 5, "thoughtsTokenCount": 2, "cachedContentTokenCount": 4}},
)  # fmt: skip
CASES = [
    ("anthropic", ANTHROPIC, TokenCount(True, "claude-x", 10, 42, 5, 3)),
    ("openai", OPENAI_CHAT, TokenCount(True, "gpt-x", 6, 7, 4, 0)),
    ("openai", OPENAI_RESPONSES, TokenCount(True, "gpt-x", 6, 7, 4, 0)),
    ("gemini", GEMINI, TokenCount(True, "gemini-x", 6, 7, 4, 0)),
]


def counted(style: Any, chunks: list[bytes], kind: str = "text/event-stream") -> TokenCount:
    meter = meter_for(style, kind)
    for chunk in chunks:
        meter.feed(chunk)
    return meter.result()


@pytest.mark.parametrize(("style", "stream", "tokens"), CASES)
@settings(max_examples=50)
@given(cuts=st.lists(st.integers(0, 1000), max_size=12))
def test_pieces_do_not_matter(style: str, stream: bytes, tokens: TokenCount, cuts: list[int]) -> None:
    """Chunks of any size give the same count. Text that looks like usage is not counted."""
    places = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    chunks = [stream[start:end] for start, end in pairwise(places)]

    assert counted(style, chunks) == tokens


def deltas(*texts: str) -> bytes:
    return sse(*({"type": "content_block_delta", "delta": {"type": "text_delta", "text": text}} for text in texts))


BEGUN = ANTHROPIC[: ANTHROPIC.index(b"\n\n") + 2]


def test_a_broken_stream_is_counted_up_to_its_end() -> None:
    """It used its input, and one token of output for each two bytes of text, JSON, thinking and signatures."""
    other = sse(
        {"type": "content_block_start", "content_block": {"type": "redacted_thinking", "data": "x" * 20}},
        {"type": "content_block_delta", "delta": {"type": "input_json_delta", "partial_json": "x" * 10}},
        {"type": "content_block_delta", "delta": {"type": "thinking_delta", "thinking": "x" * 6}},
        {"type": "content_block_delta", "delta": {"type": "signature_delta", "signature": "x" * 4}},
    )

    assert counted("anthropic", [BEGUN]) == TokenCount(True, "claude-x", 10, 1, 5, 3)
    assert counted("anthropic", [BEGUN, deltas("ten bytes!", "\N{SNOWMAN}")]) == TokenCount(
        True, "claude-x", 10, 8, 5, 3
    )
    assert counted("anthropic", [BEGUN, other]) == TokenCount(True, "claude-x", 10, 21, 5, 3)


def test_a_report_replaces_the_estimate() -> None:
    """After a report of usage only what follows it is estimated."""
    report = sse({"type": "message_delta", "usage": {"output_tokens": 3}})

    assert counted("anthropic", [BEGUN, deltas("a" * 100), report]).output == 3
    assert counted("anthropic", [BEGUN, deltas("a" * 100), report, deltas("a" * 100)]).output == 53


@pytest.mark.parametrize(
    ("style", "start", "content"),
    [
        (
            "openai",
            {"usage": {"prompt_tokens": 9, "completion_tokens": 0}},
            {"choices": [{"delta": {"content": "abcd"}}]},
        ),
        ("openai", {"usage": {"prompt_tokens": 9, "completion_tokens": 0}}, {"type": "x.delta", "delta": "abcd"}),
        (
            "gemini",
            {"usageMetadata": {"promptTokenCount": 9}},
            {"candidates": [{"content": {"parts": [{"text": "abcd"}]}}]},
        ),
    ],
)
def test_streams_of_other_apis_are_estimated_too(style: str, start: Any, content: Any) -> None:
    """Four bytes of content are two tokens."""
    assert counted(style, [sse(start, content, content)]) == TokenCount(True, "", 9, 4)


def with_usage(**more: Any) -> TokenCount:
    usage = {"input_tokens": 100, "output_tokens": 20, **more}
    return counted(
        "anthropic", [json.dumps({"model": "claude-sonnet-4-5", "usage": usage}).encode()], "application/json"
    )


PLAIN = (100 * 3 + 20 * 15) / 1e6


@pytest.mark.parametrize(
    ("more", "usd"),
    [
        ({}, PLAIN),
        ({"server_tool_use": {"web_search_requests": 8, "web_fetch_requests": 3}}, PLAIN + 0.08),
        ({"cache_creation_input_tokens": 1000}, PLAIN + 1000 * 3.75 / 1e6),
        (
            {
                "cache_creation_input_tokens": 1000,
                "cache_creation": {"ephemeral_5m_input_tokens": 400, "ephemeral_1h_input_tokens": 600},
            },
            PLAIN + (400 * 3.75 + 600 * 6) / 1e6,
        ),
        ({"cache_creation": {"ephemeral_1h_input_tokens": 600}}, PLAIN + 600 * 6 / 1e6),
        ({"speed": "fast", "server_tool_use": {"web_search_requests": 1}}, PLAIN * 2 + 0.01),
        ({"speed": "standard", "service_tier": "standard", "inference_geo": "not_available"}, PLAIN),
        ({"service_tier": "batch"}, PLAIN / 2),
        ({"inference_geo": "us"}, PLAIN * 1.1),
        ({"output_tokens_details": {"thinking_tokens": 12}}, PLAIN),
        (
            {"iterations": [{"type": "message", "output_tokens": 20}, {"type": "compaction", "input_tokens": 100}]},
            PLAIN + 300 / 1e6,
        ),
    ],
)
def test_everything_that_the_usage_names_is_priced(more: Any, usd: float) -> None:
    """Searches, both kinds of cache writes, speed, tier, region and compactions have prices of their own."""
    assert PriceTable({}).usd("anthropic", with_usage(**more)) == pytest.approx(usd)


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"speed": "turbo"}, "The price of the speed turbo is unknown."),
        ({"service_tier": "priority"}, "The price of the service tier priority is unknown."),
        ({"inference_geo": "mars"}, "The price of the region mars is unknown."),
        ({"video_seconds": 3}, "The price of video_seconds is unknown."),
        ({"server_tool_use": {"code_execution_requests": 1}}, "The price of code_execution_requests is unknown."),
        ({"cache_creation": {"ephemeral_1d_input_tokens": 1}}, "The price of ephemeral_1d_input_tokens is unknown."),
        ({"iterations": [{"type": "advisor", "output_tokens": 2}]}, "The price of iterations.advisor is unknown."),
        ({"more": {"deep": {"things": 1}}}, "The price of things is unknown."),
        (
            {"server_tool_use": {"web_search_requests": "8"}},
            "The provider did not report usage that can be read (web_search_requests).",
        ),
    ],
)
def test_what_has_no_price_makes_the_request_unknown(more: Any, why: str) -> None:
    """The reason names it. A counter that is 0 costs nothing."""
    assert PriceTable({}).usd("anthropic", with_usage(**more)) == Unpriced(why)


@pytest.mark.parametrize("more", [{f"k{at:05}": 1 for at in range(20_000)}, {f"{at:05}" * 40: 1 for at in range(900)}])
def test_a_reason_is_short_however_much_the_provider_names(more: Any) -> None:
    """It names five counters, shortened, and how many more there are."""
    unpriced = PriceTable({}).usd("anthropic", with_usage(**more))

    assert isinstance(unpriced, Unpriced)
    assert f" and {len(more) - 5} more is unknown." in unpriced.why
    assert len(unpriced.why) < 500


def test_counters_that_are_zero_and_times_cost_nothing() -> None:
    """Only whole numbers above 0 count something."""
    assert PriceTable({}).usd("anthropic", with_usage(video_seconds=0, queue_time=0.25, fine=True)) == pytest.approx(
        PLAIN
    )


OPENAI_USAGE = {"input_tokens": 1, "output_tokens": 1}


@pytest.mark.parametrize(
    ("style", "body", "unpriced"),
    [
        ("openai", {"usage": {**OPENAI_USAGE, "input_tokens_details": {"audio_tokens": 1}}}, {"audio_tokens"}),
        ("openai", {"usage": {**OPENAI_USAGE, "output_tokens_details": {"reasoning_tokens": 1}}}, set()),
        (
            "openai",
            {"usage": OPENAI_USAGE, "output": [{"type": "web_search_call"}, {"type": "function_call"}]},
            {"web_search_call"},
        ),
        (
            "gemini",
            {"usageMetadata": {"promptTokenCount": 1, "promptTokensDetails": [{"modality": "AUDIO", "tokenCount": 1}]}},
            {"tokens of AUDIO"},
        ),
        (
            "gemini",
            {
                "usageMetadata": {"promptTokenCount": 1},
                "candidates": [{"groundingMetadata": {"webSearchQueries": ["x"]}}],
            },
            {"webSearchQueries"},
        ),
        (
            "gemini",
            {"usageMetadata": {"promptTokenCount": 1, "promptTokensDetails": [{"modality": "TEXT", "tokenCount": 1}]}},
            set(),
        ),
    ],
)
def test_other_apis_name_what_has_no_price(style: str, body: Any, unpriced: set[str]) -> None:
    """Audio, and tools that the provider runs, are not counted in tokens of text."""
    assert counted(style, [json.dumps(body).encode()], "application/json").unpriced == unpriced


def test_searches_of_a_broken_stream_count() -> None:
    """Each begun search of the provider counts until a report of usage says how many were made."""
    search = sse({"type": "content_block_start", "content_block": {"type": "server_tool_use", "name": "web_search"}})
    report = sse(
        {"type": "message_delta", "usage": {"output_tokens": 3, "server_tool_use": {"web_search_requests": 1}}}
    )

    assert counted("anthropic", [BEGUN, search, search]).searches == 2
    assert counted("anthropic", [BEGUN, search, search, report]).searches == 1


@pytest.mark.parametrize("depth", range(100, 1300, 50))
def test_nesting_hides_no_usage_and_raises_nothing(depth: int) -> None:
    """The count ends each request, so it must not fail on any body that the provider sends."""
    deep = b'{"a":' * depth + b"1" + b"}" * depth
    content = b'data: {"choices":[{"delta":' + deep.replace(b"1", b'"abcd"') + b"}]}"
    usage = b'{"usage":{"input_tokens":1,"output_tokens":2,"more":' + deep + b"}}"

    streamed = counted("openai", [sse({"usage": {"prompt_tokens": 9, "completion_tokens": 0}}), content])
    whole = counted("anthropic", [usage], "application/json")

    assert streamed.output >= 2
    assert whole.unpriced == {"a"} or not whole.known


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("text/html", ANTHROPIC),
        ("text/event-stream", b"no events"),
        ("application/json", b'{"usage": 1}'),
        ("application/json", b"[" * 100_000),
        ("text/event-stream", b"data: " + b"a" * (3 << 20)),
    ],
)
def test_an_unreadable_response_has_no_count(kind: str, body: bytes) -> None:
    """An unreadable response has an unknown count, raises nothing, and uses bounded memory."""
    assert not counted("anthropic", [body], kind).known


START: dict[str, Any] = {"input_tokens": 10, "output_tokens": 1, "cache_read_input_tokens": 5}
ODD: list[Any] = ["12", -1, 1.5, True, [], {}, 10**30]


@pytest.mark.parametrize("value", ODD)
@pytest.mark.parametrize("name", sorted(START))
def test_a_count_that_cannot_be_read_makes_the_request_unknown(name: str, value: Any) -> None:
    """The last value of a count is the final one: a later one that can be read mends it."""
    start = {"type": "message_start", "message": {"model": "claude-x", "usage": {**START, name: value}}}
    end = {"type": "message_delta", "usage": {"output_tokens": 42}}
    mended = {"type": "message_delta", "usage": {"output_tokens": 42, name: 7}}

    assert counted("anthropic", [sse(start, end)]).known == (name == "output_tokens")
    assert counted("anthropic", [sse(start, mended)]).known
    assert not counted("anthropic", [sse({**start, "message": {"usage": START}}, {"usage": {name: value}})]).known


NO_COUNTS: list[Any] = ["12", [], 3, {}, None]


@pytest.mark.parametrize(
    ("style", "usage"),
    [
        *((style, usage) for style in ("anthropic", "openai", "gemini") for usage in NO_COUNTS),
        *((style, {name: 4}) for style in ("anthropic", "openai") for name in ("input_tokens", "output_tokens")),
        *(("openai", {name: 4}) for name in ("prompt_tokens", "completion_tokens", "total_tokens")),
        ("openai", {"prompt_tokens": None, "completion_tokens": 4}),
        ("openai", {"prompt_tokens": 4, "total_tokens": 9}),
        ("openai", {"input_tokens": 4, "output_tokens": None}),
        *(("gemini", {name: 4}) for name in ("candidatesTokenCount", "thoughtsTokenCount", "totalTokenCount")),
        ("gemini", {"promptTokenCount": None, "candidatesTokenCount": 4}),
    ],
)
def test_usage_without_its_counts_is_unknown(style: str, usage: Any) -> None:
    """A request has all counts that its dialect must send, or none that counts."""
    name = "usageMetadata" if style == "gemini" else "usage"
    body = json.dumps({name: usage}).encode()

    assert not counted(style, [body], "application/json").known
    assert not counted(style, [b"data: " + body + b"\n"]).known


@pytest.mark.parametrize(
    ("style", "body"),
    [
        ("openai", {"usage": {"prompt_tokens": 8, "total_tokens": 8}}),
        ("gemini", {"usageMetadata": {"promptTokenCount": 8, "totalTokenCount": 8}}),
    ],
)
def test_an_answer_without_output_is_known(style: str, body: Any) -> None:
    """Embeddings and blocked answers have no count of their output."""
    assert counted(style, [json.dumps(body).encode()], "application/json") == TokenCount(True, "", 8, 0)


def test_counts_of_one_stream_may_come_apart() -> None:
    """A later event keeps the counts that it does not repeat."""
    first = sse({"usage": {"prompt_tokens": 10}})
    last = sse({"usage": {"completion_tokens": 7}})

    assert not counted("openai", [first]).known
    assert counted("openai", [first, last]) == TokenCount(True, "", 10, 7)


@pytest.mark.parametrize(("style", "stream", "tokens"), CASES)
@pytest.mark.parametrize("value", ODD)
def test_no_odd_count_of_any_dialect_counts_as_known(style: str, stream: bytes, tokens: TokenCount, value: Any) -> None:
    """Each dialect's last event, with each count replaced."""
    *before, last = [line for line in stream.split(b"\n") if b'"usage' in line and b"he said" not in line]
    event = json.loads(last[5:])
    usage = event.get("usage") or event.get("usageMetadata") or event["response"]["usage"]
    for name in [name for name, count in usage.items() if isinstance(count, int) and "ache" not in name]:
        right, usage[name] = usage[name], value

        assert not counted(style, [*(line + b"\n" for line in before), b"data:" + json.dumps(event).encode()]).known
        usage[name] = right


def test_a_line_of_a_lax_writer_is_counted() -> None:
    """Half a character beside the counts hides none of them."""
    text = b"""data: {"delta":{"stop_sequence":"\\ud83d"},"usage":{"input_tokens":9,"output_tokens":50}}\n"""

    assert counted("anthropic", [text]) == TokenCount(True, "", 9, 50)
    assert not counted("anthropic", [text, b'data: {"usage":{"output_tokens":9\n']).known


def test_a_line_that_is_too_long_costs_itself_only() -> None:
    """Counting continues with the next line."""
    long = b"data: " + b"a" * (1 << 19)

    assert counted("anthropic", [long, long, long, b"\n\n" + ANTHROPIC]) == CASES[0][2]


def test_a_price_is_the_settings_own_or_the_tables() -> None:
    """A model in neither has no price; cached tokens have their own price."""
    prices = PriceTable({"mine": Price(input=1, output=2, cache_read=0.1, search=0.5)})
    mine = prices.usd("anthropic", TokenCount(True, "mine", 1_000_000, 500_000, 1_000_000, 0))
    written = prices.usd("anthropic", TokenCount(True, "mine", 0, 0, 0, 1_000_000, 400_000, searches=1))
    listed = prices.usd("anthropic", TokenCount(True, "claude-sonnet-4-5", 1_000_000, 0, 0, 0))
    cached = prices.usd("anthropic", TokenCount(True, "claude-sonnet-4-5", 0, 0, 1_000_000, 0))
    unknown = prices.usd("anthropic", TokenCount(True, "nobody-knows", 1, 1, 0, 0))
    unsaid = prices.usd("anthropic", TokenCount())

    assert mine == pytest.approx(2.1)
    assert written == pytest.approx(0.6 * 1.25 + 0.4 * 2 + 0.5)
    assert listed == pytest.approx(6.0)
    assert cached == pytest.approx(0.6)
    assert unknown == Unpriced("The price of the model nobody-knows is unknown.", "nobody-knows")
    assert unsaid == Unpriced("The provider did not report usage that can be read.")


@pytest.mark.parametrize(
    ("provider", "model", "known"),
    [
        ("anthropic", "claude-opus-4-6", True),
        ("anthropic", "claude-opus-4-6-20260101", True),
        ("anthropic", "claude-sonnet-4-20250514", True),
        ("google", "claude-sonnet-4-5@20250929", True),
        ("google", "gemini-2.5-pro-preview-05-06", True),
        ("openai", "gpt-5-2025-08-07", True),
        ("anthropic", "claude-opus-4-60", False),
        ("anthropic", "claude-opus-4-1-large", False),
        ("anthropic", "opus", False),
        ("google", "new-claude-sonnet-4-5", False),
        ("openai", "gpt-5-nano-large", False),
        (None, "claude-opus-4-6", False),
    ],
)
def test_no_model_is_priced_as_another(provider: str | None, model: str, known: bool) -> None:
    """A version of a model has its price; a longer or shorter name is another model."""
    usd = PriceTable({}).usd(provider, TokenCount(True, model, 1_000_000))

    assert isinstance(usd, Unpriced) is not known
