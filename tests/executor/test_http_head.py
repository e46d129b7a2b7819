"""What the proxy reads of requests and answers."""

from __future__ import annotations

import pytest

from hutch_executor.sandbox.http_head import Asked, answer, read_answer, read_request


def head(*lines: str) -> bytes:
    return "\r\n".join(lines).encode("latin-1")


@pytest.mark.parametrize(
    ("target", "host", "port"),
    [("example.com:443", "example.com", 443), ("[::1]:8080", "[::1]", 8080), ("a_b.example:1", "a_b.example", 1)],
)
def test_a_tunnel_names_host_and_port(target: str, host: str, port: int) -> None:
    """Whatever its Host header says."""
    assert read_request(head(f"CONNECT {target} HTTP/1.1", "Host: other:1")) == Asked(host, port)


def test_a_request_is_sent_on_as_the_server_expects_it() -> None:
    """With the path, the host that was checked, and nothing that was for the proxy; the connection ends with it."""
    asked = read_request(
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

    assert (asked.host, asked.port) == ("Example.com", 8080)
    assert asked.head is not None
    assert asked.head.split(b"\r\n") == [
        b"POST /?q=1 HTTP/1.1",
        b"Host: Example.com:8080",
        b"Content-Length: 3",
        b"Accept: */*",
        b"Connection: close",
        b"",
        b"",
    ]


@pytest.mark.parametrize(
    "lines",
    [
        ("GET / HTTP/1.1", "Host: example.com"),
        ("GET https://example.com/ HTTP/1.1",),
        ("GET http://user@example.com/ HTTP/1.1",),
        ("GET http://example.com@evil.net/ HTTP/1.1",),
        ("GET http://example.com\\@evil.net/ HTTP/1.1",),
        ("GET http://example.com:99999/ HTTP/1.1",),
        ("GET http://example.com/#x HTTP/1.1",),
        ("GET http://[::1/ HTTP/1.1",),
        ("GET http://ex%61mple.com/ HTTP/1.1",),
        ("CONNECT example.com HTTP/1.1",),
        ("CONNECT example.com:0 HTTP/1.1",),
        ("CONNECT example.com:443/x HTTP/1.1",),
        ("CONNECT example.com:443 HTTP/2",),
        ("GET  http://example.com/ HTTP/1.1",),
        ("GET http://example.com/ HTTP/1.1", "Broken header: x"),
        ("GET http://example.com/ HTTP/1.1", " folded: x"),
        ("GET http://example.com/ HTTP/1.1", "A: x\nB: y"),
        ("GET http://example.com/ HTTP/1.1", "A: x\0"),
        ("",),
    ],
)
def test_what_is_not_for_a_proxy_is_refused(lines: tuple[str, ...]) -> None:
    """What some would read in another way too."""
    with pytest.raises(ValueError, match=r"\.$"):
        read_request(head(*lines))


def test_an_answer_says_that_the_connection_ends() -> None:
    """So that no client sends its next request on it, which may be for another host. What comes before is as it was."""
    status, sent = read_answer(head("HTTP/1.1 200 OK", "Connection: keep-alive", "Keep-Alive: 5", "Content-Length: 2"))

    assert (status, sent) == (200, b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n")
    assert read_answer(b"HTTP/1.1 100 Continue") == (100, b"HTTP/1.1 100 Continue\r\n\r\n")
    with pytest.raises(ValueError, match="does not speak"):
        read_answer(b"SSH-2.0-OpenSSH")


def test_an_answer_of_its_own_is_whole() -> None:
    """Its length is that of its bytes."""
    said = answer(403, "No", "é")

    assert said.startswith(b"HTTP/1.1 403 No\r\n")
    assert b"Content-Length: 3\r\n" in said
    assert said.endswith("\r\n\r\né\n".encode())
