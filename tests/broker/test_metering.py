"""Token counts of a streamed response, for chunks of any size."""

from __future__ import annotations

import gzip
import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hutch_broker.metering import meter_for
from hutch_broker.prices import PriceTable
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


def counted(style: Any, chunks: list[bytes], kind: str = "text/event-stream", encoding: str = "") -> TokenCount:
    meter = meter_for(style, kind, encoding)
    for chunk in chunks:
        meter.feed(chunk)
    return meter.result()


@pytest.mark.parametrize(("style", "stream", "tokens"), CASES)
@settings(max_examples=50)
@given(cuts=st.lists(st.integers(0, 1000), max_size=12), packed=st.booleans())
def test_pieces_do_not_matter(style: str, stream: bytes, tokens: TokenCount, cuts: list[int], packed: bool) -> None:
    """Chunks of any size, compressed or not, give the same count. Text that looks like usage is not counted."""
    raw = gzip.compress(stream) if packed else stream
    places = [0, *sorted(min(cut, len(raw)) for cut in cuts), len(raw)]
    chunks = [raw[start:end] for start, end in pairwise(places)]

    assert counted(style, chunks, encoding="gzip" if packed else "") == tokens


def test_a_broken_stream_is_counted_up_to_its_end() -> None:
    """A stream that breaks off after its first event has used the input tokens."""
    assert counted("anthropic", [ANTHROPIC[:300]]) == TokenCount(True, "claude-x", 10, 1, 5, 3)


@pytest.mark.parametrize(
    ("kind", "encoding", "body"),
    [
        ("text/html", "", ANTHROPIC),
        ("text/event-stream", "br", ANTHROPIC),
        ("text/event-stream", "gzip", b"no gzip"),
        ("application/json", "", b'{"usage": 1}'),
        ("application/json", "", b"[" * 100_000),
        ("text/event-stream", "", b"data: " + b"a" * (3 << 20)),
    ],
)
def test_an_unreadable_response_has_no_count(kind: str, encoding: str, body: bytes) -> None:
    """An unreadable response has an unknown count, raises nothing, and uses bounded memory."""
    assert not counted("anthropic", [body], kind, encoding).known


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
    prices = PriceTable({"mine": Price(input=1, output=2, cache_read=0.1)})
    mine = prices.usd("anthropic", TokenCount(True, "mine", 1_000_000, 500_000, 1_000_000, 0))
    listed = prices.usd("anthropic", TokenCount(True, "claude-sonnet-4-5", 1_000_000, 0, 0, 0))
    cached = prices.usd("anthropic", TokenCount(True, "claude-sonnet-4-5", 0, 0, 1_000_000, 0))
    unknown = prices.usd("anthropic", TokenCount(True, "nobody-knows", 1, 1, 0, 0))
    unsaid = prices.usd("anthropic", TokenCount())

    assert mine == pytest.approx(2.1)
    assert listed is not None
    assert cached is not None
    assert 0 < cached < listed
    assert (unknown, unsaid) == (None, None)


@pytest.mark.parametrize(
    ("body", "known"), [(b'{"model": "nobody-knows"', False), (b'{"model":"claude-sonnet-4-5"', True), (b"{}", True)]
)
def test_a_model_is_looked_up_by_the_requests_first_bytes(body: bytes, known: bool) -> None:
    """If the first bytes name no model, the request is allowed: the response will name it."""
    assert PriceTable({}).knows("anthropic", body) is known
