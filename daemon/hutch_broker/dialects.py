"""A table of the providers' APIs: base URL, paths of the model API, header for the key. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal

from hutch_shared.broker_link import DialectName, Key

__all__ = ["ALLOWED", "DIALECTS", "UsageStyle", "credential_headers", "is_path_of", "upstream_url"]

UsageStyle = Literal["anthropic", "openai", "gemini"]
_ID: Final = r"[A-Za-z0-9][A-Za-z0-9._:@~-]*"


@dataclass(frozen=True, slots=True)
class Dialect:
    """One provider's API."""

    base_url: str | None
    """The default base URL. None if the credential or the settings must supply it."""
    paths: re.Pattern[str]
    """The requests that the broker forwards, as `METHOD /path` without the query."""
    key_header: str
    usage: UsageStyle | None
    prices: str | None
    """The provider's name in the table of prices; None if the table has no prices for it."""


DIALECTS: Final[dict[DialectName, Dialect]] = {
    "anthropic": Dialect(
        "https://api.anthropic.com",
        re.compile(rf"POST /v1/messages(/count_tokens)?|GET /v1/models(/{_ID})?"),
        "x-api-key",
        "anthropic",
        "anthropic",
    ),
    "openai": Dialect(
        "https://api.openai.com",
        re.compile(rf"POST /v1/(chat/completions|completions|responses|embeddings)|GET /v1/models(/{_ID}(/{_ID})?)?"),
        "authorization",
        "openai",
        "openai",
    ),
    "gemini": Dialect(
        "https://generativelanguage.googleapis.com",
        re.compile(
            r"POST /v1(alpha|beta)?/models/[A-Za-z0-9][A-Za-z0-9._-]*"
            r":(generateContent|streamGenerateContent|countTokens|embedContent)"
            r"|GET /v1(alpha|beta)?/models(/[A-Za-z0-9][A-Za-z0-9._-]*)?"
        ),
        "x-goog-api-key",
        "gemini",
        "google",
    ),
    "bedrock": Dialect(
        None,
        re.compile(r"POST /model/([A-Za-z0-9._:-]|%3[Aa]|%2[Ff])+/(invoke(-with-response-stream)?|converse(-stream)?)"),
        "authorization",
        None,
        "aws",
    ),
    "vertex": Dialect(
        None,
        re.compile(
            rf"POST (/v1)?/projects/{_ID}/locations/{_ID}/publishers/{_ID}/models/{_ID}"
            r":(rawPredict|streamRawPredict|countTokens)|POST (/v1)?/projects/_/count-tokens"
        ),
        "authorization",
        "anthropic",
        "google",
    ),
}
_COMMON: Final = frozenset(("accept", "accept-language", "content-type", "user-agent", "x-app", "x-client-request-id"))
_CLAUDE: Final = ("anthropic-", "x-anthropic-", "x-claude-", "x-stainless-")
ALLOWED: Final[dict[DialectName, tuple[frozenset[str], tuple[str, ...]]]] = {
    "anthropic": (_COMMON | {"x-client-app", "x-session-id"}, _CLAUDE),
    "openai": (
        _COMMON | {"idempotency-key", "openai-beta", "openai-organization", "openai-project"},
        ("x-stainless-",),
    ),
    "gemini": (_COMMON | {"x-goog-api-client"}, ()),
    "bedrock": (_COMMON, (*_CLAUDE, "x-amzn-bedrock-")),
    "vertex": (_COMMON | {"x-goog-api-client"}, _CLAUDE),
}
"""The headers of a request that reach a provider, by their names and the begins of their names in lower case.

Measured of Claude's CLI, and from the documents of the providers' clients.
"""
_OAUTH_BETA: Final = "oauth-2025-04-20"


def is_path_of(dialect: DialectName, method: str, path: str) -> bool:
    """Return whether a request belongs to the dialect's model API. Paths with dot segments or blanks never do."""
    return DIALECTS[dialect].paths.fullmatch(f"{method} {path}") is not None


def upstream_url(dialect: DialectName, base_url: str | None, target: str) -> str | None:
    """Return the provider's URL for a request; None if no base URL is known.

    If both the base URL and `target` contain `/v1`, the result contains it once.
    """
    base = base_url or DIALECTS[dialect].base_url
    if base is None:
        return None
    base = base.rstrip("/")
    if base.endswith("/v1") and target.startswith("/v1/"):
        base = base.removesuffix("/v1")
    return base + target


def credential_headers(dialect: DialectName, key: Key, beta: str | None) -> list[tuple[str, str]]:
    """Return the headers that carry a key. `beta` is the agent's `anthropic-beta` header; its values are kept."""
    header = DIALECTS[dialect].key_header
    if key.kind == "api_key" and header != "authorization":
        return [(header, key.secret)]
    headers = [("authorization", f"Bearer {key.secret}")]
    if key.kind == "oauth" and dialect == "anthropic" and _OAUTH_BETA not in (beta or ""):
        headers.append(("anthropic-beta", f"{beta},{_OAUTH_BETA}" if beta else _OAUTH_BETA))
    return headers
