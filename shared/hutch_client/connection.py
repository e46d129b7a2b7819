"""Connections to hutchd for the Python API: checks the server, greets it, and dials again with growing pauses."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, TypeVar

import anyio
from anyio.abc import TaskGroup

from hutch_client.endpoint import GREETING, GreetingWatch, dial, not_greeted
from hutch_shared import __version__
from hutch_shared import messages as m
from hutch_shared.backoff import Backoff
from hutch_shared.errors import HutchError, Reason
from hutch_shared.methods import CLIENT, TO_CLIENT
from hutch_shared.rpc.dispatch import Dispatcher, Handler
from hutch_shared.rpc.peer import Peer, PeerLimits
from hutch_shared.rpc.stream import SocketStream

__all__ = ["GONE", "Redial", "background_tasks", "connected_peer"]

C = TypeVar("C")

logging.getLogger("hutch_shared").addHandler(logging.NullHandler())
"""The wire's log is for programs that set up logging; without this Python prints it on the terminal."""

GONE: Final = (Reason.CONNECTION_LOST, Reason.SHUTTING_DOWN)
"""Errors after which a new connection may help."""

_LIMITS: Final = PeerLimits(frame=64 << 20)
_PAUSES: Final = (0.05, 2.0)
"""The shortest and the longest pause between two dials, in seconds."""


@asynccontextmanager
async def connected_peer(path: Path, context: C, handlers: dict[str, Handler[C]]) -> AsyncIterator[Peer[C]]:
    """Connect to hutchd, check its uid, greet it, and keep the connection open while the body runs.

    HutchError: CONNECTION_LOST if nothing answers, NOT_ALLOWED for a server of an untrusted uid, PROTOCOL_MISMATCH.
    """
    sock = await anyio.to_thread.run_sync(dial, path)
    serves = Dispatcher(TO_CLIENT, handlers)
    stream = SocketStream(sock)
    peer = Peer(stream, serves=serves, sends=CLIENT, context=context, limits=_LIMITS)
    async with peer.serving():
        greeting = m.VersionParams(client=f"hutch {__version__}", waiting_state=True)
        watch = GreetingWatch(sock)
        while True:
            try:
                await peer.call("get_version", greeting, GREETING)
                break
            except HutchError as error:
                if error.reason is not Reason.TIMED_OUT:
                    raise
            if not watch.goes_on():
                late = await anyio.to_thread.run_sync(not_greeted, path, sock, watch.waited)
                await stream.aclose()  # the other side would not answer a close in order either
                raise late
        yield peer


class Redial:
    """Growing pauses between dials, until `redial_for` seconds are over."""

    def __init__(self, redial_for: float) -> None:
        """Give up `redial_for` seconds after the first `wait`."""
        self._deadline: float | None = None
        self._redial_for = redial_for
        self._backoff = Backoff(*_PAUSES)

    async def wait(self) -> bool:
        """Pause and return True; return False at once when the time is over."""
        now = anyio.current_time()
        if self._deadline is None:
            self._deadline = now + self._redial_for
        if now >= self._deadline:
            return False
        await anyio.sleep(min(self._backoff.next(), self._deadline - now))
        return True


@asynccontextmanager
async def background_tasks() -> AsyncIterator[TaskGroup]:
    """Yield a task group that is cancelled when the body ends. An exception of the body passes through unwrapped."""
    failure = None
    async with anyio.create_task_group() as tasks:
        try:
            yield tasks
        except Exception as error:  # noqa: BLE001 - raised again below
            failure = error
        tasks.cancel_scope.cancel()
    if failure is not None:
        raise failure
