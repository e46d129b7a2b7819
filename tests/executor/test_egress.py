"""The egress proxy, on real sockets: the test passes it a listening socket, as `netns_bridge` does inside a sandbox."""

from __future__ import annotations

import logging
import os
import re
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest

from hutch_executor.sandbox.egress import CONNECTION_LIMIT, EgressProxy, NetworkBridge
from hutch_executor.sandbox.programs import bridge_argv
from hutch_shared.allow_list import Address, AllowList

WAIT = 30.0
"""Seconds after which a test gives up."""


@contextmanager
def server(answer: Callable[[socket.socket], None], path: str | None = None) -> Iterator[int]:
    """Serve connections on loopback, or at a Unix socket, each in a thread; yields the port."""
    family = socket.AF_INET if path is None else socket.AF_UNIX
    with socket.socket(family) as listener:
        listener.bind(("127.0.0.1", 0) if path is None else path)
        listener.listen(CONNECTION_LIMIT)

        def serve() -> None:
            while True:
                try:
                    client, _ = listener.accept()
                except OSError:
                    return
                threading.Thread(target=run, args=(client,), daemon=True).start()

        def run(client: socket.socket) -> None:
            with client:
                client.settimeout(WAIT)
                with suppress(OSError):
                    answer(client)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listener.getsockname()[1] if path is None else 0
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(WAIT)


def echo(client: socket.socket) -> None:
    """Send back all received bytes until the client's end."""
    while chunk := client.recv(65536):
        client.sendall(chunk)


def mirror(client: socket.socket) -> None:
    """Answer a request with the request's own head; then wait for the end."""
    head = until(client, b"\r\n\r\n")
    client.sendall(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nConnection: keep-alive\r\n\r\n" + head)


def until(sock: socket.socket, end: bytes) -> bytes:
    said = b""
    while end not in said:
        chunk = sock.recv(65536)
        assert chunk, f"it ended after {said!r}"
        said += chunk
    return said


def all_of(sock: socket.socket) -> bytes:
    said = b""
    while chunk := sock.recv(65536):
        said += chunk
    return said


class Anywhere(AllowList):
    """Treats every address as public."""

    def reaches(self, address: Address, port: int) -> bool:
        """Return True."""
        return True


class Inside:
    """The inside of a sandbox: the address of the listening socket that the proxy received."""

    def __init__(self, *allow: str, kind: type[AllowList] = AllowList) -> None:
        self.egress = EgressProxy(kind.read(allow))
        self.bridge, self.port = self.open()

    def open(self) -> tuple[NetworkBridge, int]:
        bridge = self.egress.open_bridge()
        with socket.create_server(("127.0.0.1", 0), backlog=CONNECTION_LIMIT) as listener:
            with socket.socket(fileno=os.dup(bridge.descriptor)) as through:
                socket.send_fds(through, [b"\n"], [listener.fileno()])
            return bridge, listener.getsockname()[1]

    def dial(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), WAIT)

    def ask(self, line: str, *fields: str) -> bytes:
        """Return the whole answer to a request."""
        with self.dial() as sock:
            host = () if any(field.lower().startswith("host:") for field in fields) else ("Host: other",)
            sock.sendall("\r\n".join((line, *host, *fields, "", "")).encode())
            return all_of(sock)

    @contextmanager
    def tunnel(self, port: int, host: str = "127.0.0.1") -> Iterator[socket.socket]:
        with self.dial() as sock:
            sock.sendall(f"CONNECT {host}:{port} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            assert until(sock, b"\r\n\r\n") == b"HTTP/1.1 200 Connection established\r\n\r\n"
            yield sock


@pytest.fixture
def inside() -> Iterator[Callable[..., Inside]]:
    """Yield a function that opens insides; end them afterwards."""
    made: list[Inside] = []

    def make(*allow: str, kind: type[AllowList] = AllowList) -> Inside:
        made.append(Inside(*allow, kind=kind))
        return made[-1]

    yield make
    for one in made:
        one.bridge.close()
        one.egress.close()


def test_a_tunnel_passes_bytes_both_ways_and_each_end_by_itself(inside: Callable[..., Inside]) -> None:
    """Bytes that one side sent before it half-closed arrive at the other."""
    with server(echo) as port, inside(f"127.0.0.1:{port}").tunnel(port) as sock:
        sock.sendall(b"\x16\x03" * 500_000)
        sock.shutdown(socket.SHUT_WR)
        said = all_of(sock)

    assert said == b"\x16\x03" * 500_000


@pytest.mark.parametrize("begun", [b"", b"CONNECT 127.0.0.1"], ids=["nothing", "half a head"])
def test_a_client_that_leaves_before_its_head_is_complete_cuts_no_other(
    inside: Callable[..., Inside], begun: bytes
) -> None:
    """Only that client's connection ends."""
    with server(echo) as port:
        made = inside(f"127.0.0.1:{port}")
        with made.tunnel(port) as other:
            for _ in range(5):
                with made.dial() as sock:
                    sock.sendall(begun)
                with made.tunnel(port):
                    pass
            other.sendall(b"still here")

            assert until(other, b"still here") == b"still here"


def test_a_host_that_leaves_before_it_answers_cuts_no_other_connection(inside: Callable[..., Inside]) -> None:
    """The client gets 502."""
    with server(echo) as port, server(lambda _: None) as silent:
        made = inside(f"127.0.0.1:{port}", f"127.0.0.1:{silent}")
        with made.tunnel(port) as other:
            answers = [made.ask(f"GET http://127.0.0.1:{silent}/ HTTP/1.1", f"Host: 127.0.0.1:{silent}")[:12]]
            other.sendall(b"still here")

            assert until(other, b"still here") == b"still here"
    assert answers == [b"HTTP/1.1 502"]


def test_bytes_after_the_head_are_passed_on_too(inside: Callable[..., Inside]) -> None:
    """A client need not wait until the tunnel is ready."""
    with server(echo) as port, inside(f"127.0.0.1:{port}").dial() as sock:
        sock.sendall(f"CONNECT 127.0.0.1:{port} HTTP/1.1\r\nHost: x\r\n\r\nearly".encode())
        said = until(sock, b"early")

    assert said.endswith(b"\r\n\r\nearly")


def test_a_plain_request_reaches_its_host_and_the_connection_ends_with_it(inside: Callable[..., Inside]) -> None:
    """The connection ends even if both sides want to keep it."""
    with server(mirror) as port:
        said = inside(f"127.0.0.1:{port}").ask(f"GET http://127.0.0.1:{port}/x HTTP/1.1", "Host: other", "Cookie: c")

    assert said.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
    sent = f"GET /x HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nCookie: c\r\nConnection: close\r\n\r\n"
    assert said.endswith(sent.encode())


@pytest.mark.parametrize("line", ["CONNECT {0}:{1} HTTP/1.1", "GET http://{0}:{1}/ HTTP/1.1"])
@pytest.mark.parametrize(
    ("host", "why"),
    [
        ("127.0.0.2", b"[sandbox] allow"),
        ("localhost", b"not an address of the public internet"),
        ("LOCALHOST.", b"not an address of the public internet"),
        ("[::1]", b"[sandbox] allow"),
        ("169.254.169.254", b"[sandbox] allow"),
        ("evil.example", b"[sandbox] allow"),
    ],
)
def test_a_host_off_the_list_is_not_dialled_and_the_response_names_the_setting(
    inside: Callable[..., Inside], line: str, host: str, why: bytes
) -> None:
    """This holds for a host off the list, and for an allowed name with an address of this machine."""
    dialled = threading.Event()
    with server(lambda _: dialled.set()) as port:
        said = inside(f"127.0.0.1:{port + 1 if port < 65535 else 1}", f"localhost:{port}").ask(line.format(host, port))

    assert said.startswith(b"HTTP/1.1 403 ")
    assert why in said
    assert not dialled.is_set()


def test_a_name_leads_to_this_machine_where_its_address_is_allowed_too(inside: Callable[..., Inside]) -> None:
    """Hosts of a private network can be allowed this way."""
    with server(echo) as port, inside(f"localhost:{port}", f"127.0.0.1:{port}").tunnel(port, "localhost") as sock:
        sock.sendall(b"here")
        said = sock.recv(10)

    assert said == b"here"


def test_an_address_of_this_machine_is_not_reached_although_it_looks_public(inside: Callable[..., Inside]) -> None:
    """An address that the kernel would use as source address belongs to this machine, whatever its range."""
    with server(echo) as port:
        said = inside(f"localhost:{port}", kind=Anywhere).ask(f"CONNECT localhost:{port} HTTP/1.1")

    assert b"403 Not a public address" in said


def test_an_unreachable_host_is_a_bad_gateway(inside: Callable[..., Inside]) -> None:
    """The status is 502; an unknown name gets the same status."""
    with server(echo) as port:
        pass
    made = inside(f"127.0.0.1:{port}", "nowhere.invalid")

    assert made.ask(f"CONNECT 127.0.0.1:{port} HTTP/1.1").startswith(b"HTTP/1.1 502 ")
    assert made.ask("GET http://nowhere.invalid/ HTTP/1.1").startswith(b"HTTP/1.1 502 ")


@pytest.mark.parametrize(
    ("said", "status"),
    [(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", 400), (b"A" * 70_000, 431), (b"\x16\x03\x01\r\n\r\n", 400)],
)
def test_a_request_that_is_not_for_a_proxy_is_refused(inside: Callable[..., Inside], said: bytes, status: int) -> None:
    """A head that never ends is refused too, and is not stored."""
    with inside("example.com").dial() as sock:
        sock.sendall(said)
        answer = sock.recv(65536)

    assert answer.startswith(b"HTTP/1.1 %d " % status)


def test_a_host_that_does_not_speak_http_is_reported(inside: Callable[..., Inside]) -> None:
    """The error is for a plain request; a tunnel passes any bytes."""
    with server(lambda client: client.sendall(b"SSH-2.0-x\r\n\r\n")) as port:
        said = inside(f"127.0.0.1:{port}").ask(f"GET http://127.0.0.1:{port}/ HTTP/1.1")

    assert said.startswith(b"HTTP/1.1 502 ")


def test_connections_over_the_limit_wait(inside: Callable[..., Inside]) -> None:
    """A connection that ends makes room for the next."""
    with server(echo) as port:
        made = inside(f"127.0.0.1:{port}")
        held = [made.dial() for _ in range(CONNECTION_LIMIT)]
        with made.dial() as beyond:
            for sock in held:
                sock.sendall(f"CONNECT 127.0.0.1:{port} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
                until(sock, b"\r\n\r\n")
            beyond.sendall(f"CONNECT 127.0.0.1:{port} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            beyond.setblocking(False)
            with pytest.raises(BlockingIOError):
                beyond.recv(10)
            beyond.settimeout(WAIT)
            held.pop().close()
            said = until(beyond, b"\r\n\r\n")
        for sock in held:
            sock.close()

    assert said.startswith(b"HTTP/1.1 200 ")


def test_closing_a_bridge_cuts_only_its_own_connections(inside: Callable[..., Inside]) -> None:
    """Each command of an agent has a bridge of its own."""
    with server(echo) as port:
        made = inside(f"127.0.0.1:{port}")
        with made.tunnel(port) as first:
            bridge, made.port = made.open()
            with made.tunnel(port) as second:
                made.bridge.close()
                made.bridge.close()
                assert all_of(first) == b""
                second.sendall(b"on")
                assert second.recv(10) == b"on"
                bridge.close()


def test_its_end_ends_its_thread_and_all_connections(inside: Callable[..., Inside]) -> None:
    """No thread and no connection is left; closing again does nothing."""
    with server(echo) as port:
        made = inside(f"127.0.0.1:{port}")
        with made.tunnel(port) as sock:
            made.egress.close()
            made.egress.close()
            made.bridge.close()
            assert sock.recv(10) == b""

    assert not [one for one in threading.enumerate() if one.name == "egress"]


def test_a_bridge_that_passes_no_listening_socket_serves_nobody(inside: Callable[..., Inside]) -> None:
    """The bridge passes nothing, connected sockets, a pipe, or both. The proxy closes them; other bridges go on."""
    with server(echo) as port:
        made = inside(f"127.0.0.1:{port}")
        a, b = socket.socketpair()
        reading, writing = os.pipe()
        with a, b, open(writing, "wb", buffering=0) as pipe:
            with open(reading, "rb"):
                for passed in ([], [a.fileno()], [a.fileno(), b.fileno()], [reading], [a.fileno(), reading]):
                    bridge = made.egress.open_bridge()
                    with socket.socket(fileno=os.dup(bridge.descriptor)) as through:
                        socket.send_fds(through, [b"\n"], passed)
                        through.settimeout(WAIT)
                        assert through.recv(1) == b""
                    bridge.close()
            a.close()
            with pytest.raises(BrokenPipeError):
                pipe.write(b"x")
            assert b.recv(1) == b""
        with made.tunnel(port) as sock:
            sock.sendall(b"on")
            assert sock.recv(10) == b"on"


def test_a_bridge_whose_sandbox_ends_at_once_is_an_ordinary_end(inside: Callable[..., Inside]) -> None:
    """The bridge's socket closes before a listening socket was passed. Other bridges go on."""
    with server(echo) as port:
        made = inside(f"127.0.0.1:{port}")
        bridge = made.egress.open_bridge()
        with socket.socket(fileno=os.dup(bridge.descriptor)) as through:
            through.shutdown(socket.SHUT_RDWR)
        bridge.close()
        with made.tunnel(port) as sock:
            sock.sendall(b"on")
            assert sock.recv(10) == b"on"


def test_without_its_executor_a_sandboxed_command_does_not_start() -> None:
    """The bridge program cannot pass its listening socket on, and exits with one sentence."""
    ours, theirs = socket.socketpair()
    ours.close()
    with theirs:
        done = subprocess.run(
            [*bridge_argv(theirs.fileno()), "/bin/echo", "started"],
            pass_fds=[theirs.fileno()],
            capture_output=True,
            timeout=WAIT,
            check=False,
        )

    assert (done.returncode, done.stdout) == (1, b"")
    assert re.fullmatch(rb"hutch: the sandbox's network bridge could not be made: [^\n]+\n", done.stderr)


def test_a_refused_host_is_logged_once_and_nothing_else(
    inside: Callable[..., Inside], caplog: pytest.LogCaptureFixture
) -> None:
    """The log contains no header, path or content."""
    caplog.set_level(logging.DEBUG, "hutch_executor")
    made = inside("example.com")
    for _ in range(3):
        made.ask("GET http://other.example/SECRET HTTP/1.1", "Authorization: Bearer SECRET")

    assert caplog.messages == ["the agent may not reach other.example:80"]
