"""Requests that two HTTP parsers could read differently, sent as raw bytes to the broker's socket."""

from __future__ import annotations

import pytest

from tests.broker.stage import KEY, staged, upstream

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Type: application/json\r\n\r\n{}"
HEAD = b"POST /v1/messages HTTP/1.1\r\nHost: a\r\nX-Api-Key: TOKEN\r\n"
SECOND = b"GET /v1/models HTTP/1.1\r\nHost: a\r\nX-Api-Key: TOKEN\r\n\r\n"


@pytest.mark.parametrize(
    "raw",
    [
        HEAD + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + SECOND,
        HEAD + b"Content-Length: 3\r\nContent-Length: 5\r\n\r\nabcde",
        HEAD + b"Content-Length: 3, 3\r\n\r\nabc",
        HEAD + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n",
        HEAD + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
        HEAD + b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
        HEAD + b"Host: b\r\nContent-Length: 0\r\n\r\n",
        HEAD + b"Authorization: Bearer TOKEN\r\nContent-Length: 0\r\n\r\n",
        HEAD + b"Upgrade: h2c\r\nConnection: Upgrade\r\nContent-Length: 0\r\n\r\n",
        HEAD + b"X: a\r\n folded\r\nContent-Length: 0\r\n\r\n",
        HEAD + b"X: a\x00b\r\nContent-Length: 0\r\n\r\n",
        HEAD + b"X: a\nContent-Length: 0\r\n\r\n",
        HEAD + b"X: a\rb\r\nContent-Length: 0\r\n\r\n",
        b"CONNECT api.anthropic.com:443 HTTP/1.1\r\nHost: a\r\nX-Api-Key: TOKEN\r\n\r\n",
        b"GET http://127.0.0.1:1/v1/models HTTP/1.1\r\nHost: a\r\nX-Api-Key: TOKEN\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nX-Api-Key: TOKEN\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01",
    ],
)
async def test_an_unclear_request_goes_nowhere(raw: bytes) -> None:
    """An ambiguous request is refused and not forwarded; later bytes on the connection are no new request."""
    async with upstream(ANSWER) as provider, staged(provider.url, header_timeout=0.5) as stage:
        _, token = await stage.lease()
        answer = await stage.send(raw.replace(b"TOKEN", token.encode()))

        assert provider.got == []
        assert answer == b"" or answer.startswith((b"HTTP/1.1 4", b"HTTP/1.0 4"))
        assert answer.count(b"HTTP/1.") <= 1
        assert KEY.encode() not in answer


async def test_trailers_and_extensions_stay_behind() -> None:
    """Trailers and chunk extensions of a chunked body are not forwarded."""
    async with upstream(ANSWER) as provider, staged(provider.url) as stage:
        _, token = await stage.lease()
        body = b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n2;x=y\r\n{}\r\n0\r\nX-Api-Key: trailer\r\n\r\n"
        answer = await stage.send(HEAD.replace(b"TOKEN", token.encode()) + body)

        assert answer.startswith(b"HTTP/1.1 200")
        assert len(provider.got) == 1
        assert b"trailer" not in provider.got[0]
        assert b"x=y" not in provider.got[0]
