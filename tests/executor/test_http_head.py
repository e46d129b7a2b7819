"""The heads that the proxy reads and writes: each head of one side becomes a head for the other side."""

from __future__ import annotations

import pytest

from hutch_executor.sandbox.http_head import (
    HEAD_LIMIT,
    BadHeadError,
    ProxyRequest,
    RequestReader,
    ResponseReader,
    response,
)


def head(*lines: str) -> bytes:
    return "\r\n".join((*lines, "", "")).encode("latin-1")


def read(data: bytes) -> ProxyRequest:
    """Return the request in `data`, which is fed in pieces of HEAD_LIMIT at most."""
    reader = RequestReader()
    for start in range(0, len(data), HEAD_LIMIT):
        if (request := reader.feed(data[start : start + HEAD_LIMIT])) is not None:
            return request
    raise AssertionError("the head is not complete")


@pytest.mark.parametrize(
    ("target", "host", "port"),
    [("example.com:443", "example.com", 443), ("[::1]:8080", "[::1]", 8080), ("a_b.example:1", "a_b.example", 1)],
)
def test_a_tunnel_names_host_and_port(target: str, host: str, port: int) -> None:
    """The target of CONNECT decides, whatever the Host header is."""
    assert read(head(f"CONNECT {target} HTTP/1.1", "Host: other:1")) == ProxyRequest(host, port)


def test_a_request_is_sent_on_as_the_server_expects_it() -> None:
    """The sent request has the path and the checked host, no header for the proxy, and closes the connection."""
    request = read(
        head(
            "POST http://Example.com:8080?q=1 HTTP/1.1",
            "Host: evil.net",
            "Proxy-Authorization: Basic eA==",
            "proxy-connection: keep-alive",
            "Connection: Keep-Alive, X-Hop, content-length",
            "X-Hop: 1",
            "Content-Length: 3",
            "Accept: */*",
        )
    )

    assert (request.host, request.port) == ("Example.com", 8080)
    assert request.head is not None
    assert request.head.split(b"\r\n") == [
        b"POST /?q=1 HTTP/1.1",
        b"Host: Example.com:8080",
        b"Content-Length: 3",
        b"Accept: */*",
        b"Connection: close",
        b"",
        b"",
    ]


def test_a_folded_header_is_sent_on_as_one_line() -> None:
    """No later server can read the continuation as a header of its own (RFC 9112, 5.2)."""
    request = read(head("GET http://example.com/ HTTP/1.1", "Host: example.com", "A: x", " Host: evil.net"))

    assert request.head == head("GET / HTTP/1.1", "Host: example.com", "A: x Host: evil.net", "Connection: close")


def test_a_head_may_come_in_pieces_and_with_more_behind_it() -> None:
    """Bytes after the head are kept for the host."""
    reader = RequestReader()
    data = head("CONNECT example.com:443 HTTP/1.1", "Host: example.com:443") + b"\x16\x03"

    assert [reader.feed(data[at : at + 1]) for at in range(len(data) - 3)] == [None] * (len(data) - 3)
    assert reader.feed(data[-3:]) == ProxyRequest("example.com", 443)
    assert reader.rest == b"\x16\x03"


@pytest.mark.parametrize(
    "lines",
    [
        ("GET / HTTP/1.1", "Host: example.com"),
        ("GET https://example.com/ HTTP/1.1", "Host: x"),
        ("GET http://user@example.com/ HTTP/1.1", "Host: x"),
        ("GET http://example.com@evil.net/ HTTP/1.1", "Host: x"),
        ("GET http://example.com\\@evil.net/ HTTP/1.1", "Host: x"),
        ("GET http://example.com:99999/ HTTP/1.1", "Host: x"),
        ("GET http://example.com/#x HTTP/1.1", "Host: x"),
        ("GET http://[::1/ HTTP/1.1", "Host: x"),
        ("GET http://ex%61mple.com/ HTTP/1.1", "Host: x"),
        ("CONNECT example.com HTTP/1.1", "Host: x"),
        ("CONNECT example.com:0 HTTP/1.1", "Host: x"),
        ("CONNECT example.com:443/x HTTP/1.1", "Host: x"),
        ("CONNECT http://example.com:443/ HTTP/1.1", "Host: x"),
        ("CONNECT example.com:443 HTTP/2", "Host: x"),
        ("CONNECT example.com:443 HTTP/2.0", "Host: x"),
        ("GET  http://example.com/ HTTP/1.1", "Host: x"),
        ("GET http://example.com/ HTTP/1.1", "Host: x", "Broken header: x"),
        ("GET http://example.com/ HTTP/1.1", " folded: x"),
        ("GET http://example.com/ HTTP/1.1", "Host: x", "A: x\0"),
        ("GET http://example.com/ HTTP/1.1", "Host: example.com", "Host: evil.net"),
        ("GET http://example.com/ HTTP/1.1",),
        ("POST http://example.com/ HTTP/1.1", "Host: x", "Content-Length: 1", "Content-Length: 2"),
        ("\x16\x03\x01 TLS",),
        (" ",),
    ],
)
def test_a_request_that_is_not_for_a_proxy_is_refused(lines: tuple[str, ...]) -> None:
    """A request that another reader could understand differently is refused too."""
    with pytest.raises(BadHeadError, match=r"\.$") as refused:
        read(head(*lines))

    assert refused.value.status == 400


@pytest.mark.parametrize("size", [HEAD_LIMIT, HEAD_LIMIT + 100, 3 * HEAD_LIMIT])
def test_a_huge_head_is_refused(size: int) -> None:
    """The status is 431, whether the head ends or not."""
    with pytest.raises(BadHeadError) as refused:
        read(head("GET http://example.com/ HTTP/1.1", "Host: example.com", "A: " + "x" * size))

    assert refused.value.status == 431


def test_a_response_closes_the_connection() -> None:
    """So no client sends a request for another host on it. A 1xx before it is not changed."""
    reader = ResponseReader()
    final = head("HTTP/1.1 200 OK", "Connection: keep-alive", "Keep-Alive: 5", "Content-Length: 2")
    heads = reader.feed(head("HTTP/1.1 100 Continue") + final + b"ok")

    assert heads == [
        (100, head("HTTP/1.1 100 Continue")),
        (200, head("HTTP/1.1 200 OK", "Content-Length: 2", "Connection: close")),
    ]
    assert reader.rest == b"ok"


@pytest.mark.parametrize("data", [b"SSH-2.0-OpenSSH\r\n\r\n", head("HTTP/1.1 200 OK", "A: " + "x" * HEAD_LIMIT)])
def test_a_host_that_does_not_speak_http_is_a_bad_gateway(data: bytes) -> None:
    """The client gets 502."""
    reader = ResponseReader()

    def feed() -> None:
        for start in range(0, len(data), HEAD_LIMIT):
            reader.feed(data[start : start + HEAD_LIMIT])

    with pytest.raises(BadHeadError) as refused:
        feed()

    assert refused.value.status == 502


def test_a_response_of_the_proxys_own_is_whole() -> None:
    """Its Content-Length is in bytes, not in characters."""
    sent = response(403, "é", "No")

    assert sent.startswith(b"HTTP/1.1 403 No\r\n")
    assert b"Content-Length: 3\r\n" in sent
    assert sent.endswith("\r\n\r\né\n".encode())
