"""What a request must look like, before anybody is asked for a key. Pure.

A request that two readers could understand differently is refused, not repaired: what is refused here was not looked
at by the provider. The parser before it has refused broken headers and `Content-Length` with `Transfer-Encoding`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

__all__ = ["Refusal", "RequestHead", "forwarded", "judge"]

Header = tuple[str, str]

_TARGET: Final = re.compile(r"(/[A-Za-z0-9._~:@%+-]+)+(\?[A-Za-z0-9._~:@%+/,;=&!$'()*-]*)?")
_DOTS: Final = re.compile(r"/\.\.?(/|\?|$)|%2[eE]|\?(.*&)?(key|access_token|api_key)=")
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
    "x-amz-security-token",
    "via",
    "forwarded",
}


@dataclass(frozen=True, slots=True)
class Refusal:
    """The status and a sentence that answer instead of the provider; `kind` is its API's word for it."""

    status: int
    kind: str
    why: str


@dataclass(frozen=True, slots=True)
class RequestHead:
    """A request that may be looked at further."""

    token: str
    path: str
    length: int | None
    """Bytes of the body; None when they are not known beforehand, 0 when there is none."""
    expects: bool
    """It waits for `100 Continue`."""


def judge(method: str, target: str, headers: Sequence[Header], limit: int) -> RequestHead | Refusal:
    """Tell what a request wants, or why it is refused. `headers` as they came, names in any case."""
    named: dict[str, list[str]] = {}
    for name, value in headers:
        named.setdefault(name.lower(), []).append(value)
    if method not in ("GET", "POST"):
        return _bad(405, f"{method[:20]} is no method of a model API.")
    if not _TARGET.fullmatch(target) or _DOTS.search(target):
        return _bad(400, "The request's target is not a plain path of a model API.")
    if len(named.get("host", ())) != 1:
        return _bad(400, "A request has exactly one Host.")
    if "upgrade" in named or "upgrade" in ",".join(named.get("connection", ())).lower():
        return _bad(400, "There is nothing to upgrade to here.")
    expects = [value.lower() for value in named.get("expect", ())]
    if expects not in ([], ["100-continue"]):
        return _bad(417, "Only 100-continue can be expected.")
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
        return _bad(400, "More than one credential is shown.")
    if not shown:
        return Refusal(401, "authentication_error", "No lease is shown.")
    name, value = shown[0]
    if name == "authorization":
        scheme, _, value = value.partition(" ")
        if scheme.lower() != "bearer":
            return Refusal(401, "authentication_error", "A lease is shown as Bearer or as the provider's key.")
    return RequestHead(value.strip(), target.partition("?")[0], length, bool(expects))


def forwarded(headers: Iterable[Header]) -> list[Header]:
    """Return the headers that go on: none of the connection, none with a credential, none that asks to compress."""
    kept = [(name, value) for name, value in headers if name.lower() not in _LEFT_OUT]
    named = {
        word.strip().lower() for name, value in headers if name.lower() == "connection" for word in value.split(",")
    }
    return [(name, value) for name, value in kept if name.lower() not in named]


def _bad(status: int, why: str) -> Refusal:
    return Refusal(status, "invalid_request_error", why)
