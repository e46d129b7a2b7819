"""What an HTTP proxy must read of a request and of its answer: the heads, and no more. Pure.

A connection carries one request. What follows its head goes to the one host that was checked, whatever it is, as it
would in a tunnel; so nothing is gained by a body that is longer than it says, and bodies need not be understood.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

__all__ = ["END", "Asked", "answer", "read_answer", "read_request"]

END: Final = b"\r\n\r\n"

_REQUEST: Final = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]{1,32}) ([!-~]+) HTTP/1\.[01]")
_STATUS: Final = re.compile(rb"HTTP/1\.[01] ([1-5][0-9][0-9])( [^\r\n]*)?")
_FIELD: Final = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):([^\r\n\0]*)")
_AUTHORITY: Final = r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)"
_TUNNEL: Final = re.compile(rf"{_AUTHORITY}:([0-9]{{1,5}})")
_ABSOLUTE: Final = re.compile(rf"http://{_AUTHORITY}(?::([0-9]{{1,5}}))?([/?][^#]*)?", re.IGNORECASE)
_OF_THIS_CONNECTION: Final = frozenset(
    {b"connection", b"keep-alive", b"proxy-connection", b"proxy-authorization", b"proxy-authenticate", b"upgrade"}
)


@dataclass(frozen=True, slots=True)
class Asked:
    """What a client wants: a tunnel to a host, or its request sent there with `head` in place of its own."""

    host: str
    port: int
    head: bytes | None = None


def read_request(head: bytes) -> Asked:
    """Read the head of a request, without its empty line. ValueError, with a sentence, when it is not for a proxy."""
    line, *fields = head.split(b"\r\n")
    if (request := _REQUEST.fullmatch(line)) is None:
        raise ValueError("This is a proxy for HTTP/1.1.")
    method, target = request[1], request[2].decode("ascii")
    given = list(_fields(fields))
    if method == b"CONNECT":
        if (tunnel := _TUNNEL.fullmatch(target)) is None:
            raise ValueError("CONNECT needs host:port.")
        return Asked(tunnel[1], _port(tunnel[2]))
    if (absolute := _ABSOLUTE.fullmatch(target)) is None:
        raise ValueError("A proxy needs CONNECT, or a whole http:// address that names no user.")
    host, port, path = absolute[1], absolute[2], absolute[3] or "/"
    authority = (f"{host}:{port}" if port else host).encode()
    path = path if path.startswith("/") else f"/{path}"
    kept = [field for field in given if field[0].lower() != b"host"]
    sent = _closing(method + b" " + path.encode() + b" HTTP/1.1", [(b"Host", b" " + authority), *kept])
    return Asked(host, _port(port or "80"), sent)


def read_answer(head: bytes) -> tuple[int, bytes]:
    """Return an answer's status, and its head as it goes to the client: the connection ends with it. ValueError."""
    line, *fields = head.split(b"\r\n")
    if (status := _STATUS.fullmatch(line)) is None:
        raise ValueError("The host does not speak HTTP/1.1.")
    if status[1].startswith(b"1"):
        return int(status[1]), head + END
    return int(status[1]), _closing(line, list(_fields(fields)))


def answer(status: int, phrase: str, text: str) -> bytes:
    """Return an answer of the proxy's own."""
    body = f"{text}\n".encode()
    head = f"HTTP/1.1 {status} {phrase}\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Length: {len(body)}\r\n"
    return f"{head}Connection: close\r\n\r\n".encode() + body


def _fields(lines: list[bytes]) -> Iterator[tuple[bytes, bytes]]:
    for line in lines:
        if (field := _FIELD.fullmatch(line)) is None:
            raise ValueError("A header cannot be read.")
        yield field[1], field[2]


def _closing(line: bytes, fields: list[tuple[bytes, bytes]]) -> bytes:
    named = {
        word.strip().lower() for name, value in fields if name.lower() == b"connection" for word in value.split(b",")
    }
    gone = _OF_THIS_CONNECTION | (named - {b"content-length", b"transfer-encoding", b"host"})
    kept = [name + b":" + value for name, value in fields if name.lower() not in gone]
    return b"\r\n".join([line, *kept, b"Connection: close"]) + END


def _port(digits: str) -> int:
    port = int(digits)
    if not 0 < port < 65536:
        raise ValueError(f"{port} is no port.")
    return port
