"""With a limited network the provider's own tools are refused, by each dialect and by a broker."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hutch_broker.provider_tools import check_network
from hutch_shared import broker_link as link
from tests.broker.stage import ASK, KEY, staged
from tests.rehearsal import Say, serve

SAY = Say("one two", chunks=2)
FUNCTION = {"name": "look", "input_schema": {"type": "object"}}


def said(*content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(content)}]}


ALLOWED: list[tuple[link.DialectName, dict[str, Any]]] = [
    ("anthropic", ASK),
    ("anthropic", {"tools": [FUNCTION, {**FUNCTION, "type": "custom"}], "mcp_servers": [], "container": None}),
    (
        "anthropic",
        {
            "tools": [
                {"type": kind, "name": "x"}
                for kind in (
                    "bash_20250124",
                    "text_editor_20250728",
                    "computer_20250124",
                    "memory_20250818",
                    "tool_search_tool_regex_20251119",
                    "tool_search_tool_bm25",
                )
            ]
        },
    ),
    ("anthropic", said({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}})),
    (
        "anthropic",
        said({"type": "tool_use", "name": "x", "input": {"source": {"type": "url"}, "image_url": "http://x"}}),
    ),
    ("anthropic", said({"type": "tool_result", "content": '{"type": "web_search_20250305"}'})),
    ("anthropic", said({"type": "search_result", "source": "https://example.org", "title": "seen before"})),
    ("vertex", {"tools": [FUNCTION]}),
    ("bedrock", {"toolConfig": {"tools": [{"toolSpec": {"name": "x"}}, {"cachePoint": {"type": "default"}}]}}),
    ("openai", {"tools": [{"type": "function", "name": "x"}, {"type": "custom", "name": "y"}], "prompt": "say"}),
    ("openai", {"tools": [{"type": "local_shell"}, {"type": "apply_patch"}]}),
    ("openai", {"tools": [{"type": "shell", "environment": {"type": "local"}}]}),
    ("openai", {"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "x"}]}]}),
    ("openai", said({"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}})),
    ("gemini", {"tools": [{"functionDeclarations": [FUNCTION]}, {"function_declarations": [FUNCTION]}]}),
    ("gemini", {"contents": [{"parts": [{"functionCall": {"args": {"fileData": {"fileUri": "https://x"}}}}]}]}),
]

REFUSED: list[tuple[link.DialectName, dict[str, Any], str]] = [
    *(
        ("anthropic", {"tools": [FUNCTION, {"type": kind, "name": "x"}]}, kind)
        for kind in (
            "web_search_20250305",
            "web_fetch_20250910",
            "code_execution_20250825",
            "mcp_toolset",
            "teleport_20300101",
            "bash_20250124_remote",
            "custom_20300101",
        )
    ),
    ("anthropic", {"mcp_servers": [{"type": "url", "url": "https://example.org", "name": "x"}]}, "mcp_servers"),
    ("anthropic", {"container": {"skills": [{"type": "anthropic", "skill_id": "pptx"}]}}, "container"),
    ("anthropic", {"tools": [{"type": 7}]}, "of an unknown type"),
    ("anthropic", {"tools": [{"type": "x" * 900 + "\n"}]}, "of an unknown type"),
    ("anthropic", {"tools": {"type": "web_search_20250305"}}, "not a list"),
    ("anthropic", {"tools": ["web_search_20250305"]}, "not an object"),
    ("anthropic", said({"type": "image", "source": {"type": "url", "url": "https://example.org/?it"}}), "address"),
    (
        "anthropic",
        said({"type": "tool_result", "content": [{"type": "document", "source": {"type": "url", "url": "https://x"}}]}),
        "address",
    ),
    ("vertex", {"tools": [{"type": "web_search_20250305", "name": "x"}]}, "web_search_20250305"),
    ("bedrock", {"tools": [{"type": "web_fetch_20250910", "name": "x"}]}, "web_fetch_20250910"),
    ("bedrock", {"toolConfig": {"tools": [{"systemTool": {"name": "nova_grounding"}}]}}, "systemTool"),
    ("bedrock", {"additionalModelRequestFields": {"tools": [{"type": "code_execution_20250825"}]}}, "code_execution"),
    ("bedrock", said({"image": {"source": {"s3Location": {"uri": "s3://bucket/x"}}}}), "address"),
    *(
        ("openai", {"tools": [{"type": kind}]}, kind)
        for kind in (
            "web_search",
            "web_search_preview",
            "mcp",
            "code_interpreter",
            "computer_use_preview",
            "computer",
            "file_search",
            "image_generation",
            "shell",
        )
    ),
    ("openai", {"tools": [{"type": "shell", "environment": {"type": "container_auto"}}]}, "shell"),
    ("openai", {"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "mcp"}]}]}, "mcp"),
    ("openai", {"input": [{"type": "tool_search_output", "tools": [{"type": "mcp"}]}]}, "mcp"),
    ("openai", {"web_search_options": {"search_context_size": "low"}}, "web_search_options"),
    ("openai", {"plugins": [{"id": "web"}]}, "plugins"),
    ("openai", {"prompt": {"id": "pmpt_1"}}, "prompt"),
    ("openai", {"model": "gpt-4o-search-preview"}, "searches"),
    ("openai", {"model": "o4-mini-deep-research"}, "searches"),
    ("openai", said({"type": "image_url", "image_url": {"url": "https://example.org/x.png"}}), "address"),
    ("openai", {"input": [{"content": [{"type": "input_file", "file_url": "https://example.org"}]}]}, "address"),
    *(
        ("gemini", {"tools": [{"functionDeclarations": []}, {name: {}}]}, name)
        for name in ("googleSearch", "google_search", "url_context", "urlContext", "code_execution", "codeExecution")
    ),
    ("gemini", {"tools": [{"functionDeclarations": [], "googleSearch": {}}]}, "googleSearch"),
    ("gemini", {"tools": {"googleSearch": {}}}, "not a list"),
    ("gemini", {"cachedContent": "cachedContents/1"}, "cachedContent"),
    ("gemini", {"contents": [{"parts": [{"fileData": {"fileUri": "https://example.org"}}]}]}, "address"),
    ("gemini", {"contents": [{"parts": [{"file_data": {"file_uri": "https://example.org"}}]}]}, "address"),
]


@pytest.mark.parametrize(("dialect", "body"), ALLOWED)
def test_what_the_client_carries_out_is_allowed(dialect: link.DialectName, body: dict[str, Any]) -> None:
    """A limited network changes nothing for tools of the client and for what tools were given and returned."""
    found = check_network(dialect, "broker-only", json.dumps(body).encode())

    assert found is None


@pytest.mark.parametrize(("dialect", "body", "named"), REFUSED)
def test_what_the_provider_would_carry_out_is_refused(
    dialect: link.DialectName, body: dict[str, Any], named: str
) -> None:
    """Also what Hutch does not know, and whatever would make the provider connect somewhere. The sentence names it."""
    raw = json.dumps(body).encode()
    found = check_network(dialect, "allow-list", raw)
    unknown = check_network(dialect, None, raw)
    full = check_network(dialect, "full", raw)

    assert found is not None
    assert (found.status, found.kind) == (403, "permission_error")
    assert named in found.why
    assert len(found.why) < 300
    assert unknown is not None
    assert full is None


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{",
        b'{"tools": [], "tools": [{"type": "web_search_20250305"}]}',
        b'{"tools": [{"type": "custom", "type": "web_search_20250305"}]}',
        b'{"tools": NaN}',
        json.dumps({"tools": [{"type": "web_search_20250305"}]}).encode("utf-16"),
        b"\xef\xbb\xbf{}",
        b'{"a":' * 100_000,
    ],
)
def test_a_body_that_two_parsers_could_read_differently_is_refused(body: bytes) -> None:
    """A limited network needs a body that is understood. With the full network the provider judges it."""
    limited = check_network("anthropic", "broker-only", body)
    full = check_network("anthropic", "full", body)

    assert limited is not None
    assert (limited.status, limited.kind) == (400, "invalid_request_error")
    assert full is None


def test_half_an_emoji_is_not_refused() -> None:
    """Text that was cut in the middle of a character is JSON, and reaches the provider."""
    found = check_network("anthropic", "broker-only", rb'{"system": "\ud83d"}')

    assert found is None


@pytest.mark.parametrize("network", ["broker-only", "allow-list", None])
async def test_a_limited_lease_has_no_tools_of_the_provider(network: Any) -> None:
    """The refusal comes before the key is asked for, is recorded, and leaves the lease usable."""
    search = {**ASK, "tools": [{"type": "web_search_20250305", "name": "web_search", "max_uses": 8}]}
    large = {**search, "system": "x" * 300_000}
    async with serve(key=KEY, script=lambda _: [SAY]) as model, staged(model.url) as stage:
        _, token = await stage.lease(network=network)
        status, headers, body = await stage.ask(token, search)
        await stage.recorded(1)
        larger, _, _ = await stage.ask(token, large, path="/v1/messages/count_tokens")
        asked = len(stage.asked)
        await stage.recorded(2)
        plain, _, _ = await stage.ask(token)
        records = await stage.recorded(3)

    error = json.loads(body)
    assert (status, larger, plain) == (403, 403, 200)
    assert (error["type"], error["error"]["type"]) == ("error", "permission_error")
    assert "web_search_20250305" in error["error"]["message"]
    assert headers["x-should-retry"] == "false"
    assert asked == 0
    assert len(model.requests) == 1
    assert ["web_search_20250305" in (record.refused or "") for record in records] == [True, True, False]


async def test_a_full_network_forwards_the_providers_tools_unchanged() -> None:
    """With `full` the request reaches the provider as it came."""
    search = {**ASK, "tools": [{"type": "web_search_20250305", "name": "web_search"}]}
    async with serve(key=KEY, script=lambda _: [SAY]) as model, staged(model.url) as stage:
        _, token = await stage.lease(network="full")
        status, _, _ = await stage.ask(token, search)

    assert status == 200
    assert json.loads(model.requests[0].raw) == search


async def test_a_chunked_body_is_searched_whole() -> None:
    """A tool of the provider is found in whichever piece of the body it arrives."""
    raw = json.dumps({**ASK, "tools": [{"type": "web_fetch_20250910", "name": "web_fetch"}]}).encode()
    pieces = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in (raw[:9], raw[9:-30], raw[-30:]))
    async with serve(key=KEY, script=lambda _: [SAY]) as model, staged(model.url) as stage:
        _, token = await stage.lease(network="broker-only")
        head = f"POST /v1/messages HTTP/1.1\r\nHost: broker.invalid\r\nx-api-key: {token}\r\nConnection: close\r\n"
        answer = await stage.send(head.encode() + b"Transfer-Encoding: chunked\r\n\r\n" + pieces + b"0\r\n\r\n")

    assert answer.startswith(b"HTTP/1.1 403 ")
    assert b"web_fetch_20250910" in answer
    assert model.requests == []


async def test_a_lease_of_an_earlier_hutchd_learns_its_network_once() -> None:
    """Until then it is limited. A network that is known does not change, so that nothing is widened."""
    search = {**ASK, "tools": [{"type": "web_search_20250305", "name": "web_search"}]}
    async with serve(key=KEY, script=lambda _: [SAY]) as model, staged(model.url) as stage:
        earlier, token = stage.made()
        lease = link.Lease(**{**_fields(earlier.lease), "network": None})
        statuses = []
        for network in (None, "full", "broker-only"):
            state = link.LeaseState(link.Lease(**{**_fields(lease), "network": network}), 600.0, 100)
            await stage.peer.call("put_lease", state, 30)
            statuses.append((await stage.ask(token, search))[0])

    assert statuses == [403, 200, 200]


def _fields(lease: link.Lease) -> dict[str, Any]:
    return {name: getattr(lease, name) for name in lease.__struct_fields__}
