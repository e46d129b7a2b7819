"""The paths of settings, state and sockets follow from the environment alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import platformdirs
import pytest

from hutch_shared.errors import HutchError
from hutch_shared.paths import find_host, find_paths, make_private


def test_system_mode_has_the_paths_of_the_host() -> None:
    """In system mode the paths are /etc/hutch, /var/lib/hutch and /run/hutch."""
    paths = find_paths({"XDG_RUNTIME_DIR": "/run/user/5"}, system=True)

    assert (paths.config, paths.state, paths.runtime) == (
        Path("/etc/hutch/hutch.toml"),
        Path("/var/lib/hutch"),
        Path("/run/hutch"),
    )
    assert paths.host == paths.client_socket == Path("/run/hutch/client.sock")


def test_variables_of_the_environment_take_precedence() -> None:
    """Its variables take precedence, in system mode too, so that daemons can run side by side."""
    environ = {"HUTCH_CONFIG": "/a/b.toml", "HUTCH_STATE_DIR": "/s", "HUTCH_RUNTIME_DIR": "/r"}

    for system in (False, True):
        paths = find_paths(environ, system=system)
        assert (paths.config, paths.state, paths.executor_socket) == (
            Path("/a/b.toml"),
            Path("/s"),
            Path("/r/executor.sock"),
        )


@pytest.mark.parametrize(
    ("environ", "socket"),
    [
        ({"XDG_RUNTIME_DIR": "/run/user/5"}, "/run/user/5/hutch/client.sock"),
        ({"XDG_RUNTIME_DIR": "run", "HUTCH_STATE_DIR": "/s"}, "/s/run/client.sock"),
        ({"HUTCH_STATE_DIR": "/s"}, "/s/run/client.sock"),
        ({"HUTCH_STATE_DIR": "/s", "XDG_RUNTIME_DIR": "/run/user/5"}, "/s/run/client.sock"),
        ({"HUTCH_HOST": "/other", "HUTCH_RUNTIME_DIR": "/r"}, "/other/client.sock"),
        ({"HUTCH_HOST": "/other/x.sock"}, "/other/x.sock"),
    ],
)
def test_the_socket_to_dial_follows_from_the_environment(environ: dict[str, str], socket: str) -> None:
    """The socket is never below /tmp, and a daemon with its own state directory has its own socket."""
    assert find_host(environ) == Path(socket)


def test_a_relative_place_is_refused() -> None:
    """A relative path would depend on the working directory."""
    for name in ("HUTCH_HOST", "HUTCH_CONFIG", "HUTCH_STATE_DIR", "HUTCH_RUNTIME_DIR"):
        with pytest.raises(HutchError, match=name):
            find_paths({name: "here", "XDG_RUNTIME_DIR": "/run/user/5"})


def test_finding_the_socket_costs_a_client_nothing() -> None:
    """Finding the socket and the state directory imports neither platformdirs nor anyio nor jsonrpcserver."""
    script = (
        "import sys; from hutch_shared import paths, unix; paths.find_host({}); paths.find_paths({});"
        "print([m for m in ('platformdirs', 'anyio', 'asyncio', 'jsonrpcserver', 'structlog') if m in sys.modules])"
    )

    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)

    assert found.stdout == "[]\n"


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere platformdirs itself is asked")
@pytest.mark.parametrize("environ", [{}, {"XDG_STATE_HOME": "/s", "XDG_CONFIG_HOME": "/c"}])
def test_the_paths_of_a_user_are_those_of_platformdirs(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the import of platformdirs, which would double a client's start time, is saved."""
    for name in ("XDG_STATE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": "/home/u", **environ}.items():
        monkeypatch.setenv(name, value)

    paths = find_paths({})

    assert paths.state == platformdirs.user_state_path("hutch", appauthor=False)
    assert paths.config == platformdirs.user_config_path("hutch", appauthor=False) / "hutch.toml"


def test_a_private_directory_is_ours_alone(tmp_path: Path) -> None:
    """Missing parents are private too, and an existing directory is made private."""
    place = tmp_path / "a" / "b"
    make_private(place)
    assert [path.stat().st_mode & 0o777 for path in (place, place.parent)] == [0o700, 0o700]

    place.chmod(0o755)
    make_private(place)
    assert place.stat().st_mode & 0o777 == 0o700


def test_a_private_directory_is_no_link(tmp_path: Path) -> None:
    """A link at its path is refused, since it could lead anywhere."""
    (tmp_path / "link").symlink_to(tmp_path)

    with pytest.raises(HutchError):
        make_private(tmp_path / "link")
