"""hutchd's sockets for clients and executors: its own, or those that the service manager passed."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Final, Literal

from hutch_daemon.service import Service
from hutch_shared.paths import Paths, make_private
from hutch_shared.unix import Listener, listen, take_over
from hutch_shared.watched_listener import WatchedListener

__all__ = ["Sockets", "make_runtime"]

SocketName = Literal["client", "executor"]

_PRIVATE: Final = (0o700, 0o600)
_OF_HOST: Final = (0o755, 0o666)
"""The modes of the directory and the sockets of a host's hutchd: every account may connect, and is identified then."""


def _modes(paths: Paths) -> tuple[int, int]:
    return _OF_HOST if paths.system else _PRIVATE


def make_runtime(paths: Paths) -> None:
    """Make the directory of the sockets, or give it the right mode. OSError or HutchError if that is impossible."""
    make_private(paths.runtime, _modes(paths)[0])


class Sockets:
    """The sockets of this hutchd, as a context manager that closes them."""

    def __init__(self, paths: Paths, service: Service) -> None:
        """Take over the sockets that the service manager passed: clients that connect early wait until hutchd serves.

        Raises as `unix.take_over` does.
        """
        self._paths = paths
        self._stack = ExitStack()
        self._watched: list[WatchedListener] = []
        mode = _modes(paths)[1]
        self._passed: dict[str, Listener] = {
            name: self._stack.enter_context(take_over(self._path(name), fd, mode))
            for name, fd in service.sockets.items()
        }

    def _path(self, name: str) -> Path:
        return self._paths.client_socket if name == "client" else self._paths.executor_socket

    def open(self, name: SocketName) -> WatchedListener:
        """Return a socket: the passed one, or a new one. Raises as `unix.listen` does."""
        listener = self._passed.get(name)
        if listener is None:
            listener = self._stack.enter_context(listen(self._path(name), _modes(self._paths)[1]))
        self._watched.append(WatchedListener(listener, partial(make_runtime, self._paths)))
        return self._watched[-1]

    def troubles(self) -> tuple[str, ...]:
        """Return a sentence for each socket to which nobody can connect."""
        return tuple(one.trouble for one in self._watched if one.trouble)

    def __enter__(self) -> Sockets:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
