"""The variables and sockets that a service manager passes to hutchd, tested without a manager."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from hutch_daemon.service import VARIABLES, Service, take
from hutch_shared.errors import HutchError
from hutch_shared.unix import listen, take_over

GIVEN = {
    "NOTIFY_SOCKET": "/run/notify",
    "WATCHDOG_USEC": "3000000",
    "WATCHDOG_PID": "7",
    "LISTEN_PID": "7",
    "LISTEN_FDS": "0",
    "LISTEN_FDNAMES": "",
}


def _bound(path: Path, kind: socket.SocketKind = socket.SOCK_STREAM) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, kind)
    sock.bind(str(path))
    path.chmod(0o600)
    return sock


def test_the_managers_variables_are_removed_from_the_environment() -> None:
    """Variables for another process are removed too: no child of hutchd sees them."""
    for pid in (7, 8):
        environ = {**GIVEN, "PATH": "/bin"}

        service = take(environ, pid)

        assert environ == {"PATH": "/bin"}
        assert set(GIVEN) == set(VARIABLES)
        assert (service.address, service.watchdog) == ("/run/notify", 3.0 if pid == 7 else None)


def test_sockets_meant_for_another_process_are_not_ours() -> None:
    """hutchd touches no descriptor, whatever the variables say."""
    assert take({**GIVEN, "LISTEN_FDS": "2", "LISTEN_FDNAMES": "client:executor"}, 8).sockets == {}


def test_descriptors_that_are_not_open_are_refused() -> None:
    """The error names the variable."""
    with pytest.raises(HutchError, match="LISTEN_FDS"):
        take({**GIVEN, "LISTEN_FDS": "1", "LISTEN_FDNAMES": "client"}, 7, first=10**6)


def test_without_a_manager_nothing_is_sent() -> None:
    """A manager that is gone causes no error."""
    Service().say("READY=1")
    Service("/nonexistent/notify").say("READY=1")


async def test_a_dead_writer_stops_the_watchdog_messages(tmp_path: Path) -> None:
    """The messages mean that the record can be written, so they end with the writer's thread."""
    lives = iter([True, True, False])
    with _bound(tmp_path / "notify", socket.SOCK_DGRAM) as manager:
        manager.setblocking(False)

        await Service(str(tmp_path / "notify"), watchdog=0.002).beat(lambda: next(lives))

        assert [manager.recv(100) for _ in range(2)] == [b"WATCHDOG=1"] * 2
        with pytest.raises(BlockingIOError):
            manager.recv(100)


def test_a_passed_socket_keeps_its_file_and_holds_the_lock(tmp_path: Path) -> None:
    """Another hutchd cannot listen there while the socket is in use; a client that connects later waits."""
    path = tmp_path / "client.sock"
    with _bound(path) as passed:
        passed.listen()
        with take_over(path, os.dup(passed.fileno())) as listener:
            assert not os.get_inheritable(listener.socket.fileno())
            with pytest.raises(HutchError, match="Another process listens"):
                listen(path)

        with socket.socket(socket.AF_UNIX) as late:
            late.connect(str(path))


def test_a_passed_socket_without_its_file_is_replaced(tmp_path: Path) -> None:
    """Nobody could connect to it, so hutchd makes its own socket there."""
    path = tmp_path / "client.sock"
    with _bound(path) as passed:
        passed.listen()
        path.unlink()

        with take_over(path, os.dup(passed.fileno())), socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
        assert not path.exists()


def test_an_unsuitable_socket_is_refused(tmp_path: Path) -> None:
    """Examples: another type, another path, not listening, too permissive a mode."""
    path, other = tmp_path / "client.sock", tmp_path / "other.sock"
    reasons = []

    def refuse(sock: socket.socket) -> None:
        with pytest.raises(HutchError) as refused:
            take_over(path, os.dup(sock.fileno()))
        reasons.append(refused.value.message.removeprefix(f"The socket that was passed for {path} "))

    with socket.socket(socket.AF_INET) as sock:
        refuse(sock)
    with _bound(other) as sock:
        sock.listen()
        refuse(sock)
    with _bound(path) as sock:
        refuse(sock)
        sock.listen()
        path.chmod(0o666)
        refuse(sock)

    assert reasons == [
        "is not a Unix stream socket.",
        f"listens elsewhere: '{other}'.",
        "does not listen.",
        "has the mode 0666; the limit is 0600.",
    ]
    with (tmp_path / "file").open("w") as file, pytest.raises(HutchError, match="is not a socket"):
        take_over(path, os.dup(file.fileno()))
