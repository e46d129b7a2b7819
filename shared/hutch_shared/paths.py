"""The paths of settings, state and sockets: a user's or the host's.

Variables of the environment take precedence, so that several daemons can run side by side. No default path is in /tmp:
if the user has no runtime directory, the sockets are below the state directory.
"""

from __future__ import annotations

import contextlib
import os
import stat
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal, NamedTuple

from hutch_shared.errors import HutchError, Reason

__all__ = [
    "HOST_ACCOUNT",
    "HOST_STATE",
    "LAUNCHER_CONFIG",
    "LAUNCHER_SOCKET_UNIT",
    "Paths",
    "find_host",
    "find_paths",
    "make_private",
]

HOST_ACCOUNT: Final = "hutch"
"""The usual name of the account that a host's hutchd runs as; `host_mark.service_account` returns the real one."""
HOST_STATE: Final = Path("/var/lib/hutch")
"""The usual state directory of a host's hutchd."""
LAUNCHER_CONFIG: Final = "/etc/hutch/launcher.toml"
"""Root's list of the accounts whose agents may run."""
LAUNCHER_SOCKET_UNIT: Final = "hutch-launcher.socket"
"""systemd's unit of the launcher's socket."""

_SYSTEM_CONFIG: Final = Path("/etc/hutch")
_SYSTEM_RUNTIME: Final = Path("/run/hutch")
_XDG: Final = {"config": ("XDG_CONFIG_HOME", ".config"), "state": ("XDG_STATE_HOME", ".local/state")}
"""The variable and the default, below the home, of each kind of a user's directory."""


class Paths(NamedTuple):
    """The paths of one hutchd. `host` is the client socket that clients dial, perhaps another daemon's."""

    config: Path
    """The settings file."""
    state: Path
    runtime: Path
    host: Path
    system: bool

    @property
    def client_socket(self) -> Path:
        """The socket for clients."""
        return self.runtime / "client.sock"

    @property
    def executor_socket(self) -> Path:
        """The socket for executors."""
        return self.runtime / "executor.sock"


def find_paths(environ: Mapping[str, str] | None = None, *, system: bool = False) -> Paths:
    """Return the paths for `environ` (default: the process's own). Touches no file.

    HUTCH_CONFIG is a file, HUTCH_STATE_DIR and HUTCH_RUNTIME_DIR are directories, HUTCH_HOST as in `find_host`.
    HutchError INVALID_PARAMS for a relative path. Defaults are the host's with `system`, else the user's.
    """
    environ = os.environ if environ is None else environ
    config = _given(environ, "HUTCH_CONFIG") or (_SYSTEM_CONFIG if system else _of_user("config")) / "hutch.toml"
    state = _state(environ, system)
    return Paths(config, state, _runtime(environ, system), find_host(environ, system=system), system)


def find_host(environ: Mapping[str, str] | None = None, *, system: bool = False) -> Path:
    """Return the client socket to dial: HUTCH_HOST (the socket, or the directory it is in), else hutchd's own.

    Fast if the environment names the socket, since every start of the client calls this function.
    """
    environ = os.environ if environ is None else environ
    host = _given(environ, "HUTCH_HOST") or _runtime(environ, system)
    return host if host.suffix == ".sock" else host / "client.sock"


def _state(environ: Mapping[str, str], system: bool) -> Path:
    return _given(environ, "HUTCH_STATE_DIR") or (HOST_STATE if system else _of_user("state"))


def _runtime(environ: Mapping[str, str], system: bool) -> Path:
    given = _given(environ, "HUTCH_RUNTIME_DIR")
    if given is not None:
        return given
    if "HUTCH_STATE_DIR" in environ:  # a daemon with its own state directory gets its own socket
        return _state(environ, system) / "run"
    if system:
        return _SYSTEM_RUNTIME
    session = Path(environ.get("XDG_RUNTIME_DIR", ""))
    return session / "hutch" if session.is_absolute() else _state(environ, system) / "run"


def _given(environ: Mapping[str, str], name: str) -> Path | None:
    value = environ.get(name)
    if not value:
        return None
    if not os.path.isabs(value):
        raise HutchError(Reason.INVALID_PARAMS, f"{name} must be an absolute path, and {value!r} is not.")
    return Path(value)


def _of_user(kind: Literal["config", "state"]) -> Path:
    home = os.environ.get("HOME", "")
    if sys.platform == "linux" and os.path.isabs(home):  # as platformdirs, without its import
        variable, default = _XDG[kind]
        given = os.environ.get(variable, "")
        return Path(given if os.path.isabs(given) else f"{home}/{default}", "hutch")
    import platformdirs  # late: its import doubles the start time of a client

    find = platformdirs.user_config_path if kind == "config" else platformdirs.user_state_path
    return find("hutch", appauthor=False)


def make_private(directory: Path, mode: int = 0o700) -> None:
    """Create `directory` and its missing parents (0700), and give it `mode`.

    Raises `not_allowed` if it exists and is a link, not a directory, or owned by another account.
    """
    for missing in reversed([path for path in directory.parents if not path.exists()]):
        missing.mkdir(0o700, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        directory.mkdir(0o700)
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise HutchError(Reason.NOT_ALLOWED, f"{directory} is not a directory of this account.")
    if stat.S_IMODE(found.st_mode) != mode:
        directory.chmod(mode)
