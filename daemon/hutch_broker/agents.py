"""The HTTP server for agents at `broker.sock`. It adds a deadline for request heads, which aiohttp lacks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final, cast

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from hutch_broker.processes import BrokerPeer, peer_of

__all__ = ["BACKLOG", "AgentServer"]

BACKLOG: Final = 1024
"""The length of the accept queue. With a short queue, agents block in connect() when many dial at once."""
_LINGER: Final = 2.0
"""Seconds during which the server still reads the body of a refused request, so that the agent gets the answer."""

Answer = Callable[[web.BaseRequest, BrokerPeer], Awaitable[web.StreamResponse]]


class _Connection(RequestHandler):
    """A connection with a deadline for each request head. Its time runs from the connect, later from the first byte."""

    __slots__ = ("_deadline", "_head_timeout", "peer")

    def __init__(self, manager: Any, *, head_timeout: float, **more: Any) -> None:
        super().__init__(manager, **more)
        self.peer = BrokerPeer(None, None)
        self._head_timeout = head_timeout
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.peer = peer_of(transport.get_extra_info("socket"))
        super().connection_made(transport)
        self._arm()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._disarm()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        before = self._request_count
        super().data_received(data)
        if self._request_count != before:
            self._disarm()
        elif self._deadline is None and self._current_request is None:
            self._arm()

    def _arm(self) -> None:
        self._deadline = self._loop.call_later(self._head_timeout, self._late)

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _late(self) -> None:
        self._deadline = None
        if self._waiter is not None and not self._waiter.done():  # aiohttp waits for a request head here
            self.force_close()


class AgentServer(web.Server):
    """Accepts connections; calls `answer` with each request and the process that sent it."""

    def __init__(self, answer: Answer, *, header_timeout: float, idle_timeout: float) -> None:
        """Serve requests. If an agent hangs up, its running `answer` is cancelled. Timeouts are in seconds."""

        async def handle(request: web.BaseRequest) -> web.StreamResponse:
            return await answer(request, cast("_Connection", request.protocol).peer)

        silent = logging.getLogger(f"{__name__}.http")
        silent.disabled = True  # aiohttp would log exceptions whose text contains headers
        super().__init__(
            handle,
            handler_cancellation=True,
            keepalive_timeout=idle_timeout,
            lingering_time=_LINGER,
            auto_decompress=False,
            access_log=None,
            logger=silent,
            max_line_size=16384,
            max_field_size=65536,
        )
        self._head_timeout = header_timeout

    def __call__(self) -> RequestHandler:
        return _Connection(self, loop=self._loop, head_timeout=self._head_timeout, **self._kwargs)
