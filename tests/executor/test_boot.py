"""The boot line is read completely and in time, and no message quotes it."""

from __future__ import annotations

import os
import select
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from hutch_executor.account.environment import ALLOWED_ENVIRONMENT
from hutch_executor.link.boot import LINE_LIMIT, read_boot
from hutch_executor.process.hardening import READY, announce
from hutch_shared.errors import HutchError, Reason
from tests.executor.fake_hutchd import boot

Pipe = tuple[int, int]


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    reading, writing = os.pipe()
    yield reading, writing
    os.close(reading)
    os.close(writing)


def test_it_announces_itself_on_a_socket_only(pipe: Pipe) -> None:
    """`announce` sends one byte on a socket, and nothing on a pipe. It returns False if the other side is gone."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        told = announce(theirs.fileno())
        theirs.shutdown(socket.SHUT_WR)
        said = ours.recv(10)
        ours.close()
        nobody = announce(theirs.fileno())
    on_a_pipe = announce(pipe[0])

    assert (told, said, nobody) == (True, READY, False)
    assert on_a_pipe
    assert not select.select([pipe[0]], [], [], 0)[0]


def test_the_line_is_read(pipe: Pipe) -> None:
    """It is read up to its newline; later bytes are ignored."""
    wanted = boot(Path("/run/x.sock"))
    os.write(pipe[1], msgspec.json.encode(wanted) + b"\nrest")

    assert read_boot(pipe[0]) == wanted


def test_a_line_in_pieces_is_one_line(pipe: Pipe) -> None:
    """A pipe may deliver the line in pieces."""
    wanted = boot(Path("/run/x.sock"))
    line = msgspec.json.encode(wanted) + b"\n"
    os.write(pipe[1], line[:10])
    later = threading.Timer(0.01, os.write, (pipe[1], line[10:]))
    later.start()

    assert read_boot(pipe[0]) == wanted
    later.join()


def test_waiting_for_the_line_has_a_deadline(pipe: Pipe) -> None:
    """Without a boot line the executor ends."""
    with pytest.raises(HutchError) as refused:
        read_boot(pipe[0], deadline=0.0)

    assert refused.value.reason is Reason.TIMED_OUT


@pytest.mark.parametrize(
    "line",
    [
        b"{}\n",
        b"not json, with a token-of-the-test\n",
        b"\xff\n",
        b'{"executor":"\xff"}\n',
        b'{"x":' + 8000 * b"[" + b"\n",
    ],
    ids=["no fields", "not JSON", "not UTF-8", "a field that is not UTF-8", "too deeply nested"],
)
def test_an_invalid_line_is_not_quoted(pipe: Pipe, line: bytes) -> None:
    """The line may hold the token, so no message quotes it."""
    os.write(pipe[1], line)

    with pytest.raises(HutchError) as refused:
        read_boot(pipe[0])

    assert refused.value.reason is Reason.INVALID_PARAMS
    assert "token" not in str(refused.value)
    assert refused.value.__suppress_context__


def test_without_standard_input_nothing_is_announced() -> None:
    """A closed descriptor means that the process that started this one is gone."""
    reading, writing = os.pipe()
    os.close(writing)
    os.close(reading)

    assert not announce(reading)


def test_a_hutchd_that_ends_before_the_line_is_an_ordinary_end() -> None:
    """The socket's end is a reset if the ready byte was not read there, and a close if it was."""
    for is_read in (False, True):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            assert announce(theirs.fileno())
            if is_read:
                ours.recv(1)
            ours.close()
            with pytest.raises(HutchError) as ended:
                read_boot(theirs.fileno())

        assert ended.value.reason is Reason.CONNECTION_LOST


def test_the_length_of_the_line_is_limited(pipe: Pipe) -> None:
    """Standard input cannot fill up the memory."""
    os.write(pipe[1], b"x" * (LINE_LIMIT + 1))

    with pytest.raises(HutchError) as refused:
        read_boot(pipe[0])

    assert refused.value.reason is Reason.FRAME_TOO_LARGE


def test_another_protocol_is_refused(pipe: Pipe) -> None:
    """The error comes before the executor dials anything."""
    os.write(pipe[1], msgspec.json.encode(boot(Path("/x"), protocol=99)) + b"\n")

    with pytest.raises(HutchError) as refused:
        read_boot(pipe[0])

    assert refused.value.reason is Reason.PROTOCOL_MISMATCH


@pytest.mark.parametrize(
    ("name", "is_allowed"),
    [
        ("PATH", True),
        ("LC_ALL", True),
        ("XDG_RUNTIME_DIR", True),
        ("HUTCH_EXECUTOR_ID", True),
        ("ANTHROPIC_API_KEY", False),
        ("HUTCH_STATE_DIR", False),
        ("SSH_AUTH_SOCK", False),
        ("LD_PRELOAD", False),
        ("PATHS", False),
        ("MYHOME", False),
    ],
)
def test_only_listed_variables_are_kept(name: str, is_allowed: bool) -> None:
    """A variable that is not on the list does not reach an agent."""
    assert bool(ALLOWED_ENVIRONMENT.fullmatch(name)) is is_allowed
