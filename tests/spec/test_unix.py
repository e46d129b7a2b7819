"""Unix sockets: safe paths, listening and connecting."""

from __future__ import annotations

import os
import shutil
import socket
import stat
import subprocess
import sys
from pathlib import Path

import anyio
import pytest

from hutch_shared import unix
from hutch_shared.errors import HutchError, Reason
from hutch_shared.processes import peer_credentials
from hutch_shared.rpc.stream import SocketStream, accept, dial


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A private directory."""
    place = tmp_path / "run"
    place.mkdir(0o700)
    return place


def refusal(reason: Reason) -> pytest.RaisesExc[HutchError]:
    return pytest.raises(HutchError, check=lambda error: error.reason is reason)


# ---------------------------------------------------------------- safe paths


def test_a_directory_that_others_can_change_is_refused(home: Path) -> None:
    """It is refused if others can change it, or a directory above it that is not sticky."""
    unix.check_directory(home)

    home.chmod(0o777)
    with refusal(Reason.NOT_ALLOWED):
        unix.check_directory(home)
    inner = home / "inner"
    inner.mkdir(0o700)
    with refusal(Reason.NOT_ALLOWED):
        unix.check_directory(inner)
    home.chmod(0o1777)
    unix.check_directory(inner)
    with refusal(Reason.NOT_ALLOWED):
        unix.check_directory(home)


def test_the_target_of_a_link_is_checked(home: Path) -> None:
    """A link of ours is accepted if its target is."""
    goal = home.parent / "goal"
    goal.mkdir(0o700)
    link = home / "link"
    link.symlink_to(goal)

    unix.check_directory(link)
    goal.chmod(0o777)
    with refusal(Reason.NOT_ALLOWED):
        unix.check_directory(link)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_a_directory_of_another_account_is_refused(home: Path) -> None:
    """A link of another account is refused too."""
    os.chown(home, 65534, 65534)
    with refusal(Reason.NOT_ALLOWED):
        unix.check_directory(home)
    os.chown(home, 0, 0)
    (home / "link").symlink_to(home.parent)
    os.lchown(home / "link", 65534, 65534)
    with refusal(Reason.NOT_ALLOWED):
        unix.check_directory(home / "link")


def test_a_path_that_is_too_long_is_refused_with_the_limit(home: Path) -> None:
    """Both listening and connecting refuse it before they touch anything."""
    path = home / ("x" * (unix.PATH_LIMIT - len(os.fsencode(home))))

    with pytest.raises(HutchError, match=str(unix.PATH_LIMIT)):
        unix.listen(path)
    with pytest.raises(HutchError, match=str(unix.PATH_LIMIT)):
        unix.connect(path)
    assert not list(home.iterdir())


def test_a_path_as_long_as_the_limit_works(tmp_path: Path) -> None:
    """The limit counts bytes, not characters."""
    room = unix.PATH_LIMIT - len(os.fsencode(tmp_path)) - 1
    if room < 3:
        pytest.skip("the directory for temporary files has too long a name")
    path = tmp_path / ("é" * (room // 2) + "x" * (room % 2))

    with unix.listen(path):
        unix.connect(path).close()


# ---------------------------------------------------------------- listening


@pytest.mark.parametrize("mode", [0o600, 0o666])
def test_a_socket_has_the_mode_that_was_asked_for(home: Path, mode: int) -> None:
    """The umask neither changes the mode nor is changed."""
    before = os.umask(0o027)
    try:
        with unix.listen(home / "s.sock", mode):
            assert stat.S_IMODE((home / "s.sock").stat().st_mode) == mode
            assert os.umask(0o027) == 0o027
    finally:
        os.umask(before)


def test_a_live_socket_is_left_alone(home: Path) -> None:
    """The second listener gets `wrong_state`; the first goes on."""
    path = home / "s.sock"
    with unix.listen(path):
        with refusal(Reason.WRONG_STATE):
            unix.listen(path)

        unix.connect(path).close()


def test_the_socket_of_a_killed_process_is_taken_over(home: Path) -> None:
    """Its lock ended with it, although its file stayed."""
    path = home / "s.sock"
    script = (
        "import os, pathlib, sys; from hutch_shared import unix;"
        "listener = unix.listen(pathlib.Path(sys.argv[1])); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", script, str(path)], check=False)
    assert path.is_socket()

    with unix.listen(path):
        unix.connect(path).close()
    assert not path.exists()


def test_a_file_in_the_way_is_never_removed(home: Path) -> None:
    """Only a socket can be a stale socket, so every other file stays."""
    path = home / "s.sock"
    path.write_text("precious")

    with refusal(Reason.NOT_ALLOWED):
        unix.listen(path)
    assert path.read_text() == "precious"


def test_only_the_maker_of_a_socket_file_unlinks_it(home: Path) -> None:
    """A file that took its place stays when the listener closes."""
    path = home / "s.sock"
    with unix.listen(path) as first:
        path.unlink()
        (home / "s.sock.lock").unlink()
        with unix.listen(path):
            assert first.fault() == "was replaced by another file"
            first.close()

            unix.connect(path).close()
    assert not path.exists()


def test_a_lost_socket_is_bound_again(home: Path) -> None:
    """The whole directory may be gone: the listener makes its socket and its lock again once the directory exists."""
    path = home / "s.sock"
    with unix.listen(path, 0o666) as listener:
        assert listener.fault() is None
        shutil.rmtree(home)
        assert listener.fault() == "is gone"
        with pytest.raises(FileNotFoundError):
            listener.rebind()
        home.mkdir(0o700)
        listener.rebind().close()

        assert listener.fault() is None
        assert stat.S_IMODE(path.stat().st_mode) == 0o666
        unix.connect(path).close()
        with refusal(Reason.WRONG_STATE):
            unix.listen(path)
        listener.socket.accept()[0].close()
    assert not path.exists()


def test_a_foreign_socket_is_replaced_only_without_its_lock(home: Path) -> None:
    """A process that holds the lock serves there; one that does not left a file that nobody should find."""
    path = home / "s.sock"
    with unix.listen(path) as listener:
        path.unlink()
        (home / "s.sock.lock").unlink()
        with unix.listen(path), refusal(Reason.WRONG_STATE):
            listener.rebind()
        assert listener.fault() == "is gone"
        with socket.socket(socket.AF_UNIX) as foreign:
            foreign.bind(str(path))
            foreign.listen()
            assert listener.fault() == "was replaced by another file"

            listener.rebind().close()
            assert listener.fault() is None


def test_a_lock_that_is_a_link_is_refused(home: Path) -> None:
    """The link's target is not touched."""
    (home / "s.sock.lock").symlink_to(home / "elsewhere")

    with refusal(Reason.NOT_ALLOWED):
        unix.listen(home / "s.sock")
    assert not (home / "elsewhere").exists()


def test_a_missing_listener_is_reported(home: Path) -> None:
    """A missing file and a file without a listener raise different errors."""
    with pytest.raises(FileNotFoundError):
        unix.connect(home / "s.sock")
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(home / "s.sock"))
    left.close()
    with pytest.raises(ConnectionRefusedError):
        unix.connect(home / "s.sock")


async def test_connections_are_accepted_and_dialled_in_one_loop(home: Path) -> None:
    """They are byte streams that give access to their socket."""
    path = home / "s.sock"
    with unix.listen(path) as listener:
        theirs = await dial(path)
        ours = SocketStream(await accept(listener.socket))

        await theirs.send(b"hello")

        assert await ours.receive() == b"hello"
        raw = ours.extra(anyio.abc.SocketAttribute.raw_socket)
        assert peer_credentials(raw).pid == os.getpid()
        await ours.aclose()
        with pytest.raises(anyio.EndOfStream):
            await theirs.receive()
        await theirs.aclose()
