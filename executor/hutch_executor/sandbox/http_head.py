"""The heads that an HTTP proxy reads and writes; h11 parses them. Pure: bytes in, heads out.

A connection carries one request. All bytes after its head go to the one host that was checked, as in a tunnel. So
bodies need not be parsed: a body longer than its head claims still reaches only that host.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final, TypeVar

import h11

__all__ = ["HEAD_LIMIT", "BadHeadError", "ProxyRequest", "RequestReader", "ResponseReader", "response"]

HEAD_LIMIT: Final = 64 * 1024
"""Bytes of one head; also of one read while a head is incomplete."""

_AUTHORITY: Final = r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)"
_TUNNEL: Final = re.compile(rf"{_AUTHORITY}:([0-9]{{1,5}})")
_ABSOLUTE: Final = re.compile(rf"http://{_AUTHORITY}(?::([0-9]{{1,5}}))?([/?][^#]*)?", re.IGNORECASE)
_VERSIONS: Final = (b"1.0", b"1.1")
_OF_THIS_CONNECTION: Final = frozenset(
    {b"connection", b"keep-alive", b"proxy-connection", b"proxy-authorization", b"proxy-authenticate", b"upgrade"}
)
_FRAMING: Final = frozenset({b"content-length", b"transfer-encoding", b"host"})
"""Headers that a Connection header cannot remove."""

Field = tuple[bytes, bytes]
E = TypeVar("E", bound=h11.Event)


class BadHeadError(Exception):
    """A head that cannot be used. The message is a sentence; `status` is the HTTP status for the client."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class ProxyRequest:
    """A client's request: a tunnel to a host, or a request to send there with `head` in place of the client's."""

    host: str
    port: int
    head: bytes | None = None


class RequestReader:
    """Reads the one request head of a connection."""

    def __init__(self) -> None:
        """Start before the first byte."""
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=HEAD_LIMIT)
        self._size = 0

    def feed(self, data: bytes) -> ProxyRequest | None:
        """Take the next bytes, HEAD_LIMIT at most; return the request once its head is complete. BadHeadError."""
        event = _feed(self._http, data, h11.Request)
        self._size += len(data)
        if self._size - len(self.rest) > HEAD_LIMIT:
            raise BadHeadError(f"The request's head is longer than {HEAD_LIMIT} bytes.", 431)
        return None if event is None else _request(event)

    @property
    def rest(self) -> bytes:
        """The bytes that came after the head."""
        return self._http.trailing_data[0]


class ResponseReader:
    """Reads the heads that a host sends before the body of its response: any number of 1xx, then the final one."""

    def __init__(self) -> None:
        """Start before the first byte."""
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=HEAD_LIMIT)
        self._size = 0
        self._http.send(h11.Request(method=b"GET", target=b"/", headers=[(b"Host", b"host")]))

    def feed(self, data: bytes) -> list[tuple[int, bytes]]:
        """Take the next bytes, HEAD_LIMIT at most; return the heads completed, each a status and bytes for the client.

        BadHeadError with status 502 if they are not HTTP/1. Not to be called after the final head (status 200 or more).
        """
        heads: list[tuple[int, bytes]] = []
        event = _feed(self._http, data, h11.InformationalResponse, h11.Response)
        while event is not None:
            start = b"HTTP/1.1 %d %b" % (event.status_code, event.reason)
            if isinstance(event, h11.Response):
                heads.append((event.status_code, _head(start, _closing(event.headers.raw_items()))))
                break
            heads.append((event.status_code, _head(start, event.headers.raw_items())))
            event = _feed(self._http, b"", h11.InformationalResponse, h11.Response)
        self._size += len(data)
        if self._size - len(self.rest) > HEAD_LIMIT:
            raise BadHeadError(f"The host's heads are longer than {HEAD_LIMIT} bytes.", 502)
        return heads

    @property
    def rest(self) -> bytes:
        """The bytes that came after the final head."""
        return self._http.trailing_data[0]


def response(status: int, text: str, phrase: str = "") -> bytes:
    """Return a response of the proxy's own; `phrase` defaults to the status's usual one."""
    body = f"{text}\n".encode()
    start = f"HTTP/1.1 {status} {phrase or HTTPStatus(status).phrase}".encode()
    kind, size = (b"Content-Type", b"text/plain; charset=utf-8"), (b"Content-Length", b"%d" % len(body))
    return _head(start, [kind, size, (b"Connection", b"close")]) + body


def _feed(http: h11.Connection, data: bytes, *kinds: type[E]) -> E | None:
    """Return the next event, which is of one of `kinds`; None if more data is needed."""
    ours = http.our_role is h11.SERVER
    try:
        if data:
            http.receive_data(data)
        event = http.next_event()
    except h11.RemoteProtocolError as error:
        if ours:
            raise BadHeadError(f"This is a proxy for HTTP/1.1: {error}.", error.error_status_hint) from error
        raise BadHeadError(f"The host does not speak HTTP/1.1: {error}.", 502) from error
    if event is h11.NEED_DATA:
        return None
    if not isinstance(event, kinds) or event.http_version not in _VERSIONS:  # type: ignore[attr-defined]
        raise BadHeadError(f"{'The client' if ours else 'The host'} does not speak HTTP/1.1.", 400 if ours else 502)
    return event


def _request(event: h11.Request) -> ProxyRequest:
    target = event.target.decode("ascii")
    if event.method == b"CONNECT":
        if (tunnel := _TUNNEL.fullmatch(target)) is None:
            raise BadHeadError("CONNECT needs host:port.")
        return ProxyRequest(tunnel[1], _port(tunnel[2]))
    if (absolute := _ABSOLUTE.fullmatch(target)) is None:
        raise BadHeadError("A proxy needs CONNECT, or a whole http:// address that names no user.")
    host, port, path = absolute[1], absolute[2], absolute[3] or "/"
    authority = (f"{host}:{port}" if port else host).encode()
    path = path if path.startswith("/") else f"/{path}"
    fields = [field for field in _closing(event.headers.raw_items()) if field[0].lower() != b"host"]
    head = _head(event.method + b" " + path.encode() + b" HTTP/1.1", [(b"Host", authority), *fields])
    return ProxyRequest(host, _port(port or "80"), head)


def _closing(fields: Iterable[Field]) -> list[Field]:
    """Return the fields for the next hop, without those of this connection, and with `Connection: close`."""
    fields = list(fields)
    lists = [value for name, value in fields if name.lower() == b"connection"]
    named = {word.strip().lower() for value in lists for word in value.split(b",")}
    dropped = _OF_THIS_CONNECTION | (named - _FRAMING)
    return [*(field for field in fields if field[0].lower() not in dropped), (b"Connection", b"close")]


def _head(start: bytes, fields: Iterable[Field]) -> bytes:
    return b"\r\n".join([start, *(name + b": " + value for name, value in fields), b"", b""])


def _port(digits: str) -> int:
    port = int(digits)
    if not 0 < port < 65536:
        raise BadHeadError(f"{port} is not a port.")
    return port
