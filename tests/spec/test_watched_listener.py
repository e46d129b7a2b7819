"""Watched listeners: a socket stays reachable by its path."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import anyio
import pytest

from hutch_shared import unix
from hutch_shared.paths import make_private
from hutch_shared.watched_listener import WatchedListener

BOUND = 30.0


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A private directory."""
    place = tmp_path / "run"
    place.mkdir(0o700)
    return place


async def test_connections_arrive_before_and_after_the_directory_is_removed(home: Path) -> None:
    """One task accepts throughout; those that waited at the lost socket are accepted too."""
    path = home / "s.sock"
    accepted: list[bytes] = []

    async def accept(watched: WatchedListener) -> None:
        while True:
            with await watched.accept() as sock:
                accepted.append(sock.recv(1))

    def send(word: bytes) -> None:
        with unix.connect(path) as client:
            client.send(word)

    with anyio.fail_after(BOUND), unix.listen(path) as listener:
        watched = WatchedListener(listener, lambda: make_private(home))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(accept, watched)
            send(b"1")
            await anyio.wait_all_tasks_blocked()
            send(b"2")
            shutil.rmtree(home)
            watched.look()
            send(b"3")
            while len(accepted) < 3:
                await anyio.wait_all_tasks_blocked()
            tasks.cancel_scope.cancel()

    assert sorted(accepted) == [b"1", b"2", b"3"]


async def test_a_listener_that_cannot_be_made_again_says_why_and_tries_again(
    home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The log has one line for it, however often it looks."""
    caplog.set_level(logging.INFO)
    path = home / "s.sock"
    with unix.listen(path) as listener:
        watched = WatchedListener(listener, lambda: None)
        shutil.rmtree(home)
        for _ in range(3):
            watched.look()
        trouble = watched.trouble
        make_private(home)
        watched.look()

        assert trouble.startswith(f"{path} is gone and cannot be made again: ")
        assert (watched.trouble, listener.fault()) == ("", None)
        assert len(caplog.records) == 3


async def test_a_socket_file_that_comes_back_is_no_trouble_any_more(home: Path) -> None:
    """Its directory was renamed, and renamed back."""
    with unix.listen(home / "s.sock") as listener:
        watched, before = WatchedListener(listener, lambda: None), listener.socket
        home.rename(home.with_name("moved"))
        watched.look()
        trouble = watched.trouble
        home.with_name("moved").rename(home)
        watched.look()

        assert trouble != ""
        assert watched.trouble == ""
        assert listener.socket is before


async def test_another_process_in_its_place_is_reported(home: Path) -> None:
    """The socket of the process that has the lock stays."""
    path = home / "s.sock"
    taken: list[bool] = []
    with unix.listen(path) as listener:
        watched = WatchedListener(listener, lambda: None, on_taken=lambda: taken.append(True))
        path.unlink()
        (home / "s.sock.lock").unlink()
        with unix.listen(path):
            watched.look()

            assert "Another process listens" in watched.trouble
            assert taken == [True]
            unix.connect(path).close()


async def test_a_file_that_is_not_a_socket_is_left_alone(home: Path) -> None:
    """A user may have put it there."""
    path = home / "s.sock"
    with unix.listen(path) as listener:
        watched = WatchedListener(listener, lambda: None)
        path.unlink()
        path.write_text("precious")
        watched.look()

        assert "is not a socket" in watched.trouble
        assert path.read_text() == "precious"


async def test_a_look_at_a_good_socket_changes_nothing(home: Path) -> None:
    """It does not even make the directory."""
    made: list[bool] = []
    with unix.listen(home / "s.sock") as listener:
        before = listener.socket
        WatchedListener(listener, lambda: made.append(True)).look()

        assert listener.socket is before
        assert made == []
