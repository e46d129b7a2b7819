"""Which hutchd a command talks to, by the command line and the environment."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Final

import anyio
import pytest

from hutch_client import connection, endpoint
from hutch_client.__main__ import main
from hutch_client.blocking import BlockingConnection
from hutch_client.endpoint import find_endpoint, private_chosen
from hutch_shared.host_mark import leave_mark

pytestmark = pytest.mark.usefixtures("clean_environment")


@pytest.fixture
def marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A state directory that a host's hutchd has marked, and that HUTCH_STATE_DIR names."""
    state = tmp_path / "host"
    state.mkdir()
    leave_mark(state, state / "run" / "client.sock")
    monkeypatch.setenv("HUTCH_STATE_DIR", str(state))
    return state


def test_a_marked_state_directory_is_a_hosts(marked: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Then nothing is started: the commands say that the host's hutchd is not running."""
    codes = [main(words) for words in (["run", "hi"], ["daemon", "start"], ["ps"], ["daemon", "run"])]

    assert find_endpoint() == (marked / "run" / "client.sock", "host")
    said = capsys.readouterr().err
    assert codes == [3, 3, 3, 1]
    assert said.count("hutch: The host's hutchd is not running: nothing answers at ") == 3
    assert said.endswith("`hutch --private daemon run` runs one of yours.\n")
    assert sorted(path.name for path in marked.iterdir()) == ["serves-this-host"]


@pytest.mark.parametrize("words", [["ps"], ["daemon", "stop"], ["daemon", "stop", "--stop"]])
def test_a_hutchd_that_does_not_greet_is_not_called_stopped(
    marked: Path, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    """It lives, though the caller sees none of its locks: the answer names its pid.

    It gets longer if it uses processor time, as this process may, which stands for it.
    """
    socket_path = marked / "run" / "client.sock"
    socket_path.parent.mkdir()
    with socket.socket(socket.AF_UNIX) as mute:
        mute.bind(str(socket_path))
        mute.listen()
        code = main(words)

    assert code == 3
    said = capsys.readouterr().err
    assert re.match(rf"hutch: hutchd \(pid {os.getpid()}\) is busy: it did not answer in \d+ s\.", said), said


_LATE: Final = """
import json, socket, sys, time
with socket.socket(socket.AF_UNIX) as listening:
    listening.bind(sys.argv[1])
    listening.listen()
    print("listens", flush=True)
    line, _ = listening.accept()
    while time.process_time() < float(sys.argv[2]):
        pass
    for frame in line.makefile("rb"):
        result = {"version": "x", "protocol": 1, "mode": "private"}
        answer = {"jsonrpc": "2.0", "id": json.loads(frame)["id"], "result": result}
        line.sendall(json.dumps(answer).encode() + b"\\n")
"""
"""A server that uses CPU time before it answers."""


async def test_a_hutchd_that_works_may_greet_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine its turn comes late: only one that stands still gets no more time."""
    monkeypatch.setattr(endpoint, "GREETING", 0.1)
    monkeypatch.setattr(connection, "GREETING", 0.1)
    path = tmp_path / "late.sock"
    for greet in (_greet, _greet_blocking):
        with subprocess.Popen([sys.executable, "-c", _LATE, path, "0.6"], stdout=subprocess.PIPE) as server:
            assert server.stdout is not None
            await anyio.to_thread.run_sync(server.stdout.readline)
            await greet(path)
        path.unlink()


async def _greet(path: Path) -> None:
    async with connection.connected_peer(path, None, {}):
        pass


async def _greet_blocking(path: Path) -> None:
    def greet() -> None:
        with BlockingConnection(path) as hutch:
            assert hutch.server["version"] == "x"

    await anyio.to_thread.run_sync(greet)


def test_a_hutchd_elsewhere_is_not_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """HUTCH_HOST names a socket at which a hutchd of the caller would not listen."""
    monkeypatch.setenv("HUTCH_HOST", str(tmp_path / "there"))

    assert [main(words) for words in (["run", "hi"], ["daemon", "start"])] == [3, 3]
    assert find_endpoint() == (tmp_path / "there" / "client.sock", "named")
    assert capsys.readouterr().err.count("which HUTCH_HOST names, and yours would listen elsewhere") == 2


@pytest.mark.parametrize("words", [["--private", "ps"], ["ps", "--private"], ["--private", "--private", "key", "ls"]])
def test_private_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    """Before or after the command, over HUTCH_HOST too, and for this one command."""
    monkeypatch.setenv("HUTCH_HOST", str(tmp_path / "there"))
    own = tmp_path / ".local" / "state" / "hutch" / "run" / "client.sock"

    code = main(words)

    assert code == 3
    assert f"No hutchd answers at {own}." in capsys.readouterr().err
    assert find_endpoint().kind == "named"
    with private_chosen():
        assert find_endpoint() == (own, "private")


def test_the_directories_of_ones_own_are_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """HUTCH_RUNTIME_DIR and HUTCH_STATE_DIR let several hutchds run side by side."""
    monkeypatch.setenv("HUTCH_STATE_DIR", str(tmp_path / "mine"))

    assert find_endpoint() == (tmp_path / "mine" / "run" / "client.sock", "private")
