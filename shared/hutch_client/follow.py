"""A follow: events in order, each once, over as many connections as it takes.

Each follow has a connection of its own, so a slow consumer of events stops only its own stream. When the connection is
lost, the follow dials again and continues after the last event that it received.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final, Self

import anyio
import msgspec
from anyio.abc import TaskStatus
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from hutch_client.connection import GONE, Redial, connected_peer
from hutch_shared import messages as m
from hutch_shared.errors import HutchError, Reason
from hutch_shared.events import Event
from hutch_shared.rpc.dispatch import Handler
from hutch_shared.rpc.peer import Peer

__all__ = ["Follow"]

_FOLLOW_TIMEOUT: Final = 10.0
"""Seconds within which hutchd must accept a follow."""


class Follow:
    """The events of one follow: `async for event in follow`.

    The iteration ends when the session is removed; it raises JOURNAL_REPLACED, COMPACTED or CONNECTION_LOST if it
    cannot continue. `journal` and `head` are those of the last connection; a later follow continues from the cursor
    `after`.
    """

    def __init__(
        self,
        path: Path,
        params: m.FollowEvents,
        received: MemoryObjectReceiveStream[Event],
        on_connection: Callable[[bool], None],
    ) -> None:
        """Use `HutchClient.follow`."""
        self.journal = params.journal
        self.head = 0
        self.after = params.after
        self._path = path
        self._params = params
        self._received = received
        self._on_connection = on_connection
        self._is_away = False
        self._send: MemoryObjectSendStream[Event]
        self._got = params.after
        self._peer: Peer[Follow] | None = None
        self._failure: HutchError | None = None
        self._over = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        try:
            try:
                event = self._received.receive_nowait()  # a task switch for each event would cost more than the event
            except anyio.WouldBlock:
                event = await self._received.receive()
        except anyio.EndOfStream:
            raise self._failure or StopAsyncIteration from None
        self.after = self._number(event)
        return event

    def __repr__(self) -> str:
        return f"<Follow {self._params.session} after {self.after} of {self.journal}>"

    async def receive_events(
        self, send: MemoryObjectSendStream[Event], redial_for: float, *, task_status: TaskStatus[None]
    ) -> None:
        """Send events to the consumer until there are no more; dial again when the connection is lost."""
        started = False
        redial = Redial(redial_for)
        self._send = send
        with send:
            while not self._over:
                try:
                    async with connected_peer(self._path, self, _HANDLERS) as self._peer:
                        params = msgspec.structs.replace(self._params, after=self._got, journal=self.journal)
                        following: m.Following = await self._peer.call("follow_events", params, _FOLLOW_TIMEOUT)
                        self.journal, self.head = following.journal, following.head
                        if self._got < 0:
                            self._got = self.after = following.head
                        if not started:
                            started = True
                            task_status.started()
                        redial = Redial(redial_for)
                        self._report_connection(away=False)
                        await self._peer.wait_closed()
                except HutchError as error:
                    if not started:
                        raise
                    if error.reason not in (*GONE, Reason.STORE_UNAVAILABLE):
                        self._failure = error
                        return
                    self._report_connection(away=True)
                if not self._over and not await redial.wait():
                    self._failure = HutchError(
                        Reason.CONNECTION_LOST,
                        "The connection to hutchd was lost and did not return in time. Look at `hutch doctor`.",
                    )
                    return

    def _report_connection(self, *, away: bool) -> None:
        if away != self._is_away:
            self._is_away = away
            self._on_connection(not away)

    async def _on_event(self, event: Event) -> None:
        number = self._number(event)
        if self._got < 0 or number > self._got:
            self._got = number
            try:
                self._send.send_nowait(event)
            except anyio.WouldBlock:
                await self._send.send(event)

    def _on_ended(self, ended: m.FollowEnded) -> None:
        assert self._peer is not None
        self._over = ended.reason == "session_removed"
        self._peer.close(ended.message)

    def _number(self, event: Event) -> int:
        return event.position if self._params.session == "*" else event.seq


_HANDLERS: Final[dict[str, Handler[Follow]]] = {"event": Follow._on_event, "follow_ended": Follow._on_ended}  # noqa: SLF001
