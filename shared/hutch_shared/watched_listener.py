"""A listening socket whose file is put back when something removes or replaces it.

A logout removes a user's runtime directory, and cleaners remove files. The socket would go on listening, and nobody
could reach it. So its maker looks once a second. It makes the directory and the socket again, and closes the former
socket once it has accepted the connections that waited there. Open connections do not notice.

A foreign file is replaced only if nobody else holds the lock beside it and if it is a socket. The directory is ours
alone (`unix.check_directory`), so such a file comes from a process of our own account.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import deque
from collections.abc import Callable
from typing import Final

import anyio

from hutch_shared.conditions import Conditions
from hutch_shared.errors import HutchError, Reason
from hutch_shared.latch import Latch
from hutch_shared.rpc.stream import accept_waiting
from hutch_shared.unix import Listener

__all__ = ["LOOK_EVERY", "WatchedListener"]

LOOK_EVERY: Final = 1.0
"""Seconds between two looks at a socket's file."""

_log: Final = logging.getLogger(__name__)


class WatchedListener:
    """Accepts connections at a `Listener`, whose owner closes it. One task calls `accept`, and one runs `watch`."""

    def __init__(
        self, listener: Listener, make_directory: Callable[[], None], *, on_taken: Callable[[], None] | None = None
    ) -> None:
        """`make_directory` makes the socket's directory with the right mode, or leaves a good one alone.

        It may raise OSError or HutchError. `on_taken` is called when another process listens in our place.
        """
        self.listener = listener
        self.trouble = ""
        """The reason why nobody can connect now, as a sentence; empty if there is none."""
        self._make_directory = make_directory
        self._on_taken = on_taken
        self._waiting: deque[socket.socket] = deque()
        self._former: list[socket.socket] = []
        """Sockets that were replaced while `accept` waited at them. It closes them when it no longer does."""
        self._is_waiting = False
        self._changed = Latch()
        self._conditions = Conditions(_log)

    async def accept(self) -> socket.socket:
        """Return the next connection, non-blocking. Raises as `rpc.stream.accept` does. Cancelled: none is lost."""
        while not self._waiting:
            if (sock := await accept_waiting(self.listener.socket)) is not None:
                return sock
            await self._wait_readable()
        return self._waiting.popleft()

    async def _wait_readable(self) -> None:
        """Return when a connection waits, or when the socket was made again."""
        listening, loop = self.listener.socket, asyncio.get_running_loop()
        loop.add_reader(listening, self._changed.notify)
        self._is_waiting = True
        try:
            await self._changed.wait()
        finally:
            self._is_waiting = False
            loop.remove_reader(listening)
            while self._former:
                self._former.pop().close()

    async def watch(self) -> None:
        """Look at the file once a second until cancelled; then close the connections that nobody accepted."""
        try:
            while True:
                await anyio.sleep(LOOK_EVERY)
                self.look()
        finally:
            while self._waiting:
                self._waiting.popleft().close()

    def look(self) -> None:
        """Make the socket again if its file is not in its place. A failure is logged, and the next look tries again."""
        path = self.listener.path
        fault = self.listener.fault()
        if fault is None:
            if self.trouble:  # its file came back, as by a rename
                self._end_trouble()
            return
        try:
            self._make_directory()
            former = self.listener.rebind()
        except (OSError, HutchError) as error:
            why = error.message if isinstance(error, HutchError) else f"{error.filename or path}: {error.strerror}"
            self.trouble = f"{path} {fault} and cannot be made again: {why.removesuffix('.')}."
            self._conditions.begin("unbound", self.trouble)
            if isinstance(error, HutchError) and error.reason is Reason.WRONG_STATE and self._on_taken is not None:
                self._on_taken()
            return
        self._end_trouble()
        _log.warning("%s %s: it was bound again", path, fault)
        self._waiting.extend(_connections_of(former))
        if self._is_waiting:
            self._former.append(former)
        else:
            former.close()
        self._changed.notify()

    def _end_trouble(self) -> None:
        self.trouble = ""
        self._conditions.end("unbound", f"{self.listener.path} is in its place again")

    def __repr__(self) -> str:
        return f"<WatchedListener {self.listener!r}{f': {self.trouble}' * bool(self.trouble)}>"


def _connections_of(listening: socket.socket) -> list[socket.socket]:
    """Return the connections that wait at a non-blocking socket."""
    found: list[socket.socket] = []
    while True:
        try:
            sock, _ = listening.accept()
        except OSError:
            return found
        sock.setblocking(False)
        found.append(sock)
