"""Checks the form of a request before the broker asks hutchd for a key. Pure.

The broker refuses a request that two HTTP parsers could read differently; it never repairs one. The HTTP parser has
already refused malformed headers, and `Content-Length` together with `Transfer-Encoding`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote_plus

from hutch_broker.dialects import ALLOWED
from hutch_shared.broker_link import DialectName

__all__ = ["Refusal", "RequestHead", "allowed", "forwarded", "judge"]

Header = tuple[str, str]

_TARGET: Final = re.compile(r"(/[A-Za-z0-9._~:@%+-]+)+(\?[A-Za-z0-9._~:@%+/,;=&!$'()*-]*)?")
_DOTS: Final = re.compile(r"/\.\.?(/|\?|$)|%2[eE]")
_CREDENTIAL_NAMES: Final = frozenset(
    (
        "accesstoken",
        "apikey",
        "auth",
        "authorization",
        "authtoken",
        "awsaccesskeyid",
        "bearer",
        "bearertoken",
        "clientsecret",
        "credential",
        "credentials",
        "idtoken",
        "key",
        "oauthtoken",
        "password",
        "secret",
        "sig",
        "signature",
        "token",
        "xamzcredential",
        "xamzsecuritytoken",
        "xamzsignature",
        "xapikey",
        "xauthorization",
        "xgoogapikey",
    )
)
"""The names of query parameters that carry a credential, in lower case, without punctuation."""
_DECODED: Final = 4
"""How many times the name of a query parameter is decoded before it is compared."""
_CREDENTIALS: Final = frozenset(("authorization", "x-api-key", "x-goog-api-key", "api-key"))
_LEFT_OUT: Final = _CREDENTIALS | {
    "connection",
    "keep-alive",
    "proxy-connection",
    "proxy-authenticate",
    "proxy-authorization",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
    "host",
    "content-length",
    "expect",
    "cookie",
    "set-cookie",
    "accept-encoding",
    "content-encoding",
    "x-amz-security-token",
    "via",
    "forwarded",
}


@dataclass(frozen=True, slots=True)
class Refusal:
    """The broker's own error response: HTTP status, error type in the provider API's terms, and a sentence."""

    status: int
    kind: str
    why: str


@dataclass(frozen=True, slots=True)
class RequestHead:
    """The checked head of a request."""

    token: str
    path: str
    length: int | None
    """The length of the body in bytes. 0 without a body, None if the body is chunked."""
    expects: bool
    """True if the agent waits for `100 Continue` before it sends the body."""


def judge(method: str, target: str, headers: Sequence[Header], limit: int) -> RequestHead | Refusal:
    """Return the checked head, or a refusal.

    `headers` are those received, with names in any case. `limit` is the largest body, in bytes.
    """
    named: dict[str, list[str]] = {}
    for name, value in headers:
        named.setdefault(name.lower(), []).append(value)
    if method not in ("GET", "POST"):
        return _bad(405, f"{method[:20]} is not a method of a model API.")
    if not _TARGET.fullmatch(target) or _DOTS.search(target.partition("?")[0]):
        return _bad(400, "The request's target is not a plain path of a model API.")
    if name := _credential_in(target.partition("?")[2]):
        return _bad(400, f"The query may not carry a credential ({name}): the broker adds the key.")
    if len(named.get("host", ())) != 1:
        return _bad(400, "A request needs exactly one Host.")
    if "upgrade" in named or "upgrade" in ",".join(named.get("connection", ())).lower():
        return _bad(400, "Connections cannot be upgraded here.")
    expects = [value.lower() for value in named.get("expect", ())]
    if expects not in ([], ["100-continue"]):
        return _bad(417, "Expect can only be 100-continue.")
    coding = [value.lower() for value in named.get("transfer-encoding", ())]
    if coding not in ([], ["chunked"]) or (coding and "content-length" in named):
        return _bad(400, "The length of the body is not clear.")
    length: int | None = None if coding else 0
    if "content-length" in named:
        if len(named["content-length"]) != 1 or not named["content-length"][0].isdecimal():
            return _bad(400, "The length of the body is not clear.")
        length = int(named["content-length"][0])
    if length is not None and length > limit:
        return _bad(413, f"A request has at most {limit} bytes.")
    shown = [(name, value) for name in _CREDENTIALS & named.keys() for value in named[name]]
    if len(shown) > 1:
        return _bad(400, "The request has more than one credential.")
    if not shown:
        return Refusal(401, "authentication_error", "The request has no lease.")
    name, value = shown[0]
    if name == "authorization":
        scheme, _, value = value.partition(" ")
        if scheme.lower() != "bearer":
            return Refusal(401, "authentication_error", "Send the lease as Bearer token or as the provider's key.")
    return RequestHead(value.strip(), target.partition("?")[0], length, bool(expects))


def _credential_in(query: str) -> str:
    """Return the name of a query parameter that carries a credential; "" if there is none.

    Names are compared after they are decoded, again and again, since a provider may decode more often than once.
    """
    for parameter in re.split("[&;]", query):
        name = parameter.partition("=")[0]
        for _ in range(_DECODED):
            plain = re.sub("[^a-z0-9]", "", name.lower())
            if plain in _CREDENTIAL_NAMES:
                return plain
            name = unquote_plus(name).partition("=")[0]
    return ""


def allowed(dialect: DialectName, headers: Iterable[Header]) -> list[Header]:
    """Return the headers of a request that may reach a provider of this dialect.

    The rest says nothing to a model API, or says something to a gateway before it.
    """
    names, prefixes = ALLOWED[dialect]
    named = _named_by_connection(headers := list(headers))
    return [
        (name, value)
        for name, value in headers
        if (lower := name.lower()) not in named and (lower in names or lower.startswith(prefixes))
    ]


def forwarded(headers: Iterable[Header]) -> list[Header]:
    """Return the headers of an answer to forward: all except those of the connection, credentials and compression."""
    left_out = _LEFT_OUT | _named_by_connection(headers := list(headers))
    return [(name, value) for name, value in headers if name.lower() not in left_out]


def _named_by_connection(headers: Iterable[Header]) -> set[str]:
    return {
        word.strip().lower() for name, value in headers if name.lower() == "connection" for word in value.split(",")
    }


def _bad(status: int, why: str) -> Refusal:
    return Refusal(status, "invalid_request_error", why)
