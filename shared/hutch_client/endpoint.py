"""The address of hutchd, and the check of the server behind it.

A client sends prompts, decisions and keys. So before it sends anything it checks the uid of the process that listens:
the caller's own, root's, or that of the account that owns the host's state directory.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Container, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from hutch_shared.errors import HutchError, Reason
from hutch_shared.host_mark import host_socket, is_marked, service_account, start_command
from hutch_shared.paths import HOST_ACCOUNT, HOST_STATE, find_host, find_paths
from hutch_shared.processes import peer_credentials
from hutch_shared.unix import connect

if TYPE_CHECKING:
    from hutch_shared.hutchd_lock import HutchdProcess

__all__ = [
    "GREETING",
    "Endpoint",
    "GreetingWatch",
    "dial",
    "find_endpoint",
    "host_is_down",
    "not_greeted",
    "own_hutchd",
    "own_state",
    "private_chosen",
    "socket_path",
    "trusted_uids",
]

GREETING: Final = 2.0
"""Seconds within which hutchd must accept a connection and answer the greeting."""
_AT_WORK: Final = 10.0
"""Seconds within which a hutchd that uses CPU time meanwhile must answer: on a busy machine its turn comes late."""

_OWN_DIRECTORIES: Final = ("HUTCH_RUNTIME_DIR", "HUTCH_STATE_DIR")


class Endpoint(NamedTuple):
    """The hutchd that a command talks to."""

    socket: Path
    kind: Literal["host", "private", "named"]
    """`host`: the host's own, which serves every account. `private`: the caller's. `named`: another, by HUTCH_HOST."""

    def __str__(self) -> str:
        return f"{_KINDS[self.kind]} at {self.socket}"


_KINDS: Final = {"host": "the host's hutchd", "private": "your own hutchd", "named": "the hutchd that HUTCH_HOST names"}


class _Choice:
    """What the command line of this process chose."""

    private = False


@contextlib.contextmanager
def private_chosen() -> Iterator[None]:
    """While the body runs, `find_endpoint` returns the caller's own hutchd, on every host."""
    _Choice.private = True
    try:
        yield
    finally:
        _Choice.private = False


def find_endpoint() -> Endpoint:
    """Return the hutchd to talk to, whether or not it runs.

    With `--private` the caller's own; otherwise the one that the environment names; otherwise the host's, if the host
    has one of its own (`host_mark`); otherwise the caller's own. On a host whose hutchd has left no mark yet, because
    an earlier version started it, the host's is also chosen while it listens and the caller has none.
    """
    if _Choice.private:
        return Endpoint(find_host(_without_host()), "private")
    if os.environ.get("HUTCH_HOST"):
        named = find_host()
        return Endpoint(named, "host" if named == host_socket() else "named")
    if any(os.environ.get(name) for name in _OWN_DIRECTORIES):
        named, state = find_host(), os.environ.get("HUTCH_STATE_DIR")
        of_host = (state and is_marked(Path(state))) or named == host_socket()
        return Endpoint(named, "host" if of_host else "private")
    if (host := host_socket()) is not None:
        return Endpoint(host, "host")
    own, host = find_host(), find_host({}, system=True)
    if not own.exists() and _listens(host):
        return Endpoint(host, "host")
    return Endpoint(own, "private")


def socket_path() -> Path:
    """Return the client socket of `find_endpoint`."""
    return find_endpoint().socket


def host_is_down(socket: Path) -> HutchError:
    """Return the error for a host whose own hutchd does not answer: it names the command and those who may run it."""
    start = f"`{start_command()}`"
    whom = f"Start it: {start}." if os.geteuid() == 0 else f"Ask the host's administrator, root, to start it: {start}."
    from hutch_client.private import private_record

    own = private_record()
    private = f"Meanwhile {own}." if own is not None else "`hutch --private COMMAND` uses a hutchd of your own instead."
    return HutchError(
        Reason.CONNECTION_LOST, f"The host's hutchd is not running: nothing answers at {socket}. {whom} {private}"
    )


def trusted_uids() -> frozenset[int]:
    """Return the uids accepted as server: root, the caller, and the owners of HUTCH_STATE_DIR and /var/lib/hutch."""
    found = {0, os.geteuid()}
    for state in (HOST_STATE, os.environ.get("HUTCH_STATE_DIR")):
        if state:
            with contextlib.suppress(OSError):
                found.add(os.stat(state).st_uid)
    return frozenset(found)


def own_state(path: Path) -> Path | None:
    """Return the state directory of the hutchd that listens at `path` by our environment; None for another one."""
    paths = find_paths(system=find_endpoint().kind == "host")
    return paths.state if path == paths.client_socket else None


def own_hutchd(path: Path) -> HutchdProcess | None:
    """Return the hutchd that would listen at `path` by our environment, if its locks say that it lives."""
    from hutch_shared.hutchd_lock import find_hutchd  # late: only needed when nothing answers

    state = own_state(path)
    return None if state is None else find_hutchd(state)


class GreetingWatch:
    """Tells how long to wait for the greeting on a connection."""

    def __init__(self, line: socket.socket) -> None:
        """Begin the first `GREETING` seconds."""
        self._pid = 0
        with contextlib.suppress(HutchError):
            self._pid = peer_credentials(line).pid
        self._used = self._cpu_time()
        self.waited = 0.0
        """The seconds that are over."""

    def goes_on(self) -> bool:
        """Return whether to wait for another `GREETING` seconds. Call it when the former ones are over."""
        self.waited += GREETING
        used, self._used = self._used, self._cpu_time()
        return self._used > used and self.waited < _AT_WORK

    def _cpu_time(self) -> int:
        from hutch_shared.processes import cpu_time

        return cpu_time(self._pid) if self._pid else 0


def not_greeted(path: Path, line: socket.socket | None, waited: float = GREETING) -> HutchError:
    """Return the error for a hutchd that did not answer the greeting on `line`, or did not even accept a connection.

    It lives: its pid is among the error's details, 0 if it is not visible.
    """
    from hutch_shared.hutchd_lock import HutchdProcess
    from hutch_shared.processes import is_stopped

    if (found := own_hutchd(path)) is not None and found.state != "running":
        return HutchError(Reason.CONNECTION_LOST, found.sentence(), remedy=found.remedy(), pid=found.pid)
    pid = 0
    if line is not None:
        with contextlib.suppress(HutchError):
            pid = peer_credentials(line).pid
    if pid == 0 and found is not None:
        pid = found.pid
    if pid and is_stopped(pid):
        found = HutchdProcess(pid, "stopped", holds_database=True)
        return HutchError(Reason.CONNECTION_LOST, found.sentence(), remedy=found.remedy(), pid=found.pid)
    who, end = (f"hutchd (pid {pid})", f", or end it: `kill {pid}`") if pid else (f"The hutchd at {path}", "")
    remedy = f"Try again, look at `hutch daemon logs`{end}."
    sentence = f"{who} is busy: it did not answer in {waited:g} s. {remedy}"
    return HutchError(Reason.CONNECTION_LOST, sentence, remedy=remedy, pid=pid)


def _nothing_answers(path: Path) -> HutchError:
    endpoint = find_endpoint()
    if (found := own_hutchd(path)) is not None:
        sentence = f"Nothing answers at {path}: {found.sentence()}"
        return HutchError(Reason.CONNECTION_LOST, sentence, remedy=found.remedy())
    if path == endpoint.socket and endpoint.kind == "host":
        return host_is_down(path)
    if path == endpoint.socket and endpoint.kind == "named" and path != find_paths().client_socket:
        return HutchError(
            Reason.CONNECTION_LOST,
            f"No hutchd answers at {path}, which HUTCH_HOST names. Start that one, or unset HUTCH_HOST to use yours.",
        )
    private = " --private" if path == endpoint.socket and host_socket() is not None else ""
    return HutchError(
        Reason.CONNECTION_LOST, f"No hutchd answers at {path}. Start one with `hutch{private} daemon start`."
    )


def _is_trusted(uid: int) -> bool:
    if uid in trusted_uids():
        return True
    import pwd

    try:
        return pwd.getpwnam(service_account() or HOST_ACCOUNT).pw_uid == uid
    except KeyError:
        return False


def _without_host() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "HUTCH_HOST"}


def _listens(socket: Path) -> bool:
    try:
        connect(socket, 1.0).close()
    except OSError:
        return False
    return True


def dial(path: Path, timeout: float = GREETING, trusted: Container[int] | None = None) -> socket.socket:
    """Return a connected socket to a server with a uid of `trusted`.

    By default these are `trusted_uids()` and the account in the unit of the host's hutchd.

    Blocks at most `timeout` seconds; the socket keeps this timeout.

    Raises HutchError: CONNECTION_LOST if nothing answers, NOT_ALLOWED if the server's uid is not trusted or the caller
    may not open the socket.
    """
    try:
        line = connect(path, timeout)
    except PermissionError:
        raise HutchError(
            Reason.NOT_ALLOWED,
            f"You may not open {path}: it is another account's. `hutch --private COMMAND` uses a hutchd of your own.",
        ) from None
    except (FileNotFoundError, ConnectionRefusedError):
        raise _nothing_answers(path) from None
    except (TimeoutError, BlockingIOError):
        raise not_greeted(path, None) from None
    except OSError as error:
        raise HutchError(
            Reason.CONNECTION_LOST, f"Cannot connect to {path}: {error}. `hutch doctor` looks for the cause."
        ) from None
    try:
        uid = peer_credentials(line).uid
        if not (_is_trusted(uid) if trusted is None else uid in trusted):
            raise HutchError(
                Reason.NOT_ALLOWED,
                f"{path} is served by uid {uid}, which is neither you, root nor Hutch's own account: nothing was sent.",
            )
    except BaseException:
        line.close()
        raise
    return line
