"""The form of requests: the broker refuses an ambiguous request before it does anything else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hutch_broker.dialects import credential_headers, is_path_of, upstream_url
from hutch_broker.judge import Refusal, RequestHead, allowed, forwarded, judge
from hutch_broker.mask import AnswerMask, clean_headers
from hutch_shared.broker_link import Key
from hutch_shared.secret_forms import SecretForms

HOST = ("Host", "broker.invalid")
TOKEN = ("X-Api-Key", "hutch-l-1")
PATH = "/v1/messages"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([HOST, TOKEN, ("Content-Length", "3")], None),
        ([HOST, TOKEN, ("Transfer-Encoding", "chunked")], None),
        ([HOST, ("Authorization", "bearer hutch-l-1")], None),
        ([HOST, ("x-goog-api-key", "hutch-l-1")], None),
        ([HOST], 401),
        ([HOST, ("Authorization", "Basic aGk=")], 401),
        ([TOKEN], 400),
        ([HOST, HOST, TOKEN], 400),
        ([HOST, ("host", "other"), TOKEN], 400),
        ([HOST, TOKEN, TOKEN], 400),
        ([HOST, TOKEN, ("Authorization", "Bearer other")], 400),
        ([HOST, TOKEN, ("Upgrade", "websocket")], 400),
        ([HOST, TOKEN, ("Connection", "keep-alive, Upgrade")], 400),
        ([HOST, TOKEN, ("Transfer-Encoding", "gzip, chunked")], 400),
        ([HOST, TOKEN, ("Transfer-Encoding", "chunked"), ("Content-Length", "3")], 400),
        ([HOST, TOKEN, ("Content-Length", "3"), ("Content-Length", "3")], 400),
        ([HOST, TOKEN, ("Content-Length", "+3")], 400),
        ([HOST, TOKEN, ("Content-Length", "1001")], 413),
        ([HOST, TOKEN, ("Expect", "a miracle")], 417),
    ],
)
def test_a_request_is_clear_or_refused(headers: list[tuple[str, str]], status: int | None) -> None:
    """A request needs exactly one host, one credential and one length, and must not ask for an upgrade."""
    verdict = judge("POST", PATH, headers, 1000)

    assert (verdict.status if isinstance(verdict, Refusal) else None) == status


def test_what_goes_on_is_harmless() -> None:
    """Credentials, hop-by-hop headers, headers named by Connection, and cookies are not forwarded."""
    headers = [
        HOST,
        TOKEN,
        ("Authorization", "Bearer x"),
        ("Connection", "close, X-App"),
        ("X-App", "1"),
        ("Cookie", "a=b"),
        ("Accept-Encoding", "gzip"),
        ("TE", "trailers"),
        ("anthropic-version", "2023-06-01"),
        ("Content-Type", "application/json"),
    ]

    for left in (forwarded(headers), allowed("anthropic", headers)):
        assert left == [("anthropic-version", "2023-06-01"), ("Content-Type", "application/json")]


CLI = """
Accept: application/json
Content-Type: application/json
User-Agent: claude-cli/2.1.332 (external, sdk-cli)
X-Claude-Code-Session-Id: 05e6346b-b059-424c-bfc6-86951fe2eb00
X-Stainless-Retry-Count: 0
X-Stainless-Timeout: 600
anthropic-beta: claude-code-20250219,interleaved-thinking-2025-05-14
anthropic-dangerous-direct-browser-access: true
anthropic-version: 2023-06-01
x-app: cli
"""


def test_only_allowed_headers_reach_a_provider() -> None:
    """All that the real CLI sends (measured) passes; what speaks to a gateway or to another host does not."""
    sent = [(name, value) for name, _, value in (line.partition(": ") for line in CLI.split("\n") if line)]
    others = (
        "X-Forwarded-Host X-Original-URL X-HTTP-Method-Override X-Api-Key2 X-Amz-Target Ocp-Apim-Subscription-Key"
        " Helicone-Auth Cf-Aig-Authorization X-Portkey-Api-Key OpenAI-Organization Range If-None-Match Content-Encoding"
    )

    assert allowed("anthropic", sent) == sent
    assert allowed("anthropic", [(name, "x") for name in others.split()]) == []
    assert allowed("openai", [("OpenAI-Organization", "o"), ("anthropic-version", "1")]) == [
        ("OpenAI-Organization", "o")
    ]


@pytest.mark.parametrize(
    ("query", "refused"),
    [
        ("key=k", True),
        ("%6bey=k", True),
        ("%6Bey=k", True),
        ("%256bey=k", True),
        ("KEY=k", True),
        ("beta=true&key=k", True),
        ("beta=true;key=k", True),
        ("beta=true&beta=false&k%65y=k", True),
        ("api_key=k", True),
        ("api-key=k", True),
        ("x%2Dgoog%2Dapi%2Dkey=k", True),
        ("+key=k", True),
        ("key", True),
        ("key%3Dk", True),
        ("access%5Ftoken=k", True),
        ("Authorization=k", True),
        ("X-Amz-Signature=k", True),
        ("beta=true", False),
        ("alt=sse&pageToken=abc&pageSize=10", False),
        ("monkey=1&beta=key", False),
        ("", False),
    ],
)
def test_a_query_carries_no_credential(query: str, refused: bool) -> None:
    """Names are compared after they are decoded, in any case, wherever they stand in the query."""
    verdict = judge("POST", f"{PATH}?{query}" if query else PATH, [HOST, TOKEN], 1000)

    assert isinstance(verdict, Refusal) is refused


@given(st.text(alphabet="/.%2eEfF:?#\\v1mesag\x00\r\n ;@", max_size=30))
def test_no_path_leaves_the_model_api(tail: str) -> None:
    """Every accepted path is one of the table's, without dot segments or escapes."""
    target = "/v1/messages" + tail
    verdict = judge("POST", target, [HOST, TOKEN], 1000)
    if isinstance(verdict, RequestHead) and is_path_of("anthropic", "POST", verdict.path):
        url = upstream_url("anthropic", None, target)
        assert url is not None
        assert url.partition("?")[0] in (
            "https://api.anthropic.com/v1/messages",
            "https://api.anthropic.com/v1/messages/count_tokens",
        )


@pytest.mark.parametrize(
    ("dialect", "request_", "answers"),
    [
        ("openai", "POST /v1/responses", True),
        ("openai", "POST /v1/chat/completions", True),
        ("openai", "GET /v1/files", False),
        ("openai", "POST /v1/fine_tuning/jobs", False),
        ("gemini", "POST /v1beta/models/gemini-2.5-pro:streamGenerateContent", True),
        ("gemini", "POST /v1beta/files:upload", False),
        ("bedrock", "POST /model/anthropic.claude-v1%3A0/invoke-with-response-stream", True),
        ("bedrock", "POST /foundation-models", False),
        ("vertex", "POST /v1/projects/p/locations/l/publishers/anthropic/models/c@1:streamRawPredict", True),
        ("vertex", "GET /v1/projects/p", False),
    ],
)
def test_each_api_has_its_paths(dialect: str, request_: str, answers: bool) -> None:
    """A dialect's model paths are allowed; its paths of files, jobs and accounts are not."""
    method, path = request_.split()

    assert is_path_of(dialect, method, path) is answers  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("base_url", "target", "url"),
    [
        (None, "/v1/models", "https://api.openai.com/v1/models"),
        ("https://gateway.example/v1", "/v1/models", "https://gateway.example/v1/models"),
        ("https://gateway.example/openai/", "/v1/models", "https://gateway.example/openai/v1/models"),
    ],
)
def test_a_version_that_both_have_stands_once(base_url: str | None, target: str, url: str) -> None:
    """If both the base URL and the path contain `/v1`, the URL contains it once."""
    assert upstream_url("openai", base_url, target) == url


@pytest.mark.parametrize(
    ("dialect", "kind", "header"),
    [
        ("anthropic", "api_key", ("x-api-key", "s")),
        ("anthropic", "gateway", ("authorization", "Bearer s")),
        ("openai", "api_key", ("authorization", "Bearer s")),
        ("gemini", "api_key", ("x-goog-api-key", "s")),
        ("bedrock", "gateway", ("authorization", "Bearer s")),
    ],
)
def test_a_key_stands_where_its_provider_wants_it(dialect: str, kind: str, header: tuple[str, str]) -> None:
    """An API key is sent in the provider's header, a token as bearer token."""
    assert credential_headers(dialect, Key(secret="s", kind=kind), None) == [header]  # type: ignore[arg-type]


@given(st.lists(st.sampled_from([b"secret", b"sec", b"ret", b"se", b"s", b"x", b"secretsecret", b"\n"]), max_size=30))
def test_a_key_never_comes_through_the_mask(chunks: list[bytes]) -> None:
    """A short key is masked as it is, in chunks of any size, and no other byte is changed or lost."""
    mask = AnswerMask(SecretForms("secret"), "text/plain", "", "")
    out = b"".join([*(mask.feed(chunk) for chunk in chunks), mask.end()])
    whole = b"".join(chunks)

    assert out == whole.replace(b"secret", b"******")


def test_headers_of_an_answer_are_cleaned() -> None:
    """A value is masked, a header whose name is the key is left out."""
    forms = SecretForms("sk-rehearsal-0123456789")

    assert clean_headers(forms, [("a", "b"), ("sk-rehearsal-0123456789", "1"), ("c", "<sk-rehearsal-0123456789>")]) == [
        ("a", "b"),
        ("c", f"<{'*' * 23}>"),
    ]
