"""The whole broker: its socket for agents, its control socket for hutchd, and the services between them.

The broker ends when hutchd requests it, or when it has had neither a lease nor a linked hutchd for some time. Without
hutchd it ends the leases of executors that are gone, so it does not outlive the last one for long.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Final

import anyio

from hutch_broker.agents import BACKLOG, AgentServer
from hutch_broker.control import Control
from hutch_broker.key_cache import KeyCache
from hutch_broker.leases import LeaseTable
from hutch_broker.prices import PriceTable
from hutch_broker.proxy import Proxy, upstream_session
from hutch_broker.request_log import RequestLog
from hutch_shared.broker_link import BrokerBoot, Lease
from hutch_shared.ids import new_token
from hutch_shared.latch import Latch
from hutch_shared.paths import make_private
from hutch_shared.processes import start_time
from hutch_shared.rpc.stream import accept
from hutch_shared.times import now_ms
from hutch_shared.unix import listen
from hutch_shared.watched_listener import WatchedListener

__all__ = ["serving"]

_LEFT: Final = 2.0
"""Seconds that a broker without leases goes on after hutchd ended on purpose; a restarted hutchd is back by then."""
_LOOK_EVERY: Final = 1.0
"""Seconds between two looks, without hutchd, at the executors that hold leases."""


@asynccontextmanager
async def serving(boot: BrokerBoot) -> AsyncIterator[anyio.Event]:
    """Serve while the block runs. The yielded event is set when the broker should end.

    WRONG_STATE if another broker runs.
    """
    ended = anyio.Event()
    changed = Latch()
    request_log = RequestLog(boot.records, now_ms)
    leases = LeaseTable(monotonic, request_log.reported)
    prices = PriceTable(boot.prices)
    control = Control(boot, leases, request_log, prices, new_token()[:12], shut_down=ended.set, changed=changed.notify)
    socket_path = Path(boot.socket)
    mode = 0o755 if boot.everyone else 0o700

    def make_directories() -> None:
        make_private(Path(boot.control).parent, mode)
        make_private(socket_path.parent, mode)

    with (
        listen(Path(boot.control)) as for_hutchd,
        listen(socket_path, 0o666 if boot.everyone else 0o600, lock=False) as for_agents,
        ExitStack() as stack,
    ):
        async with (
            upstream_session(boot) as session,
            anyio.create_task_group() as tasks,
            anyio.create_task_group() as listeners,
        ):
            keys = KeyCache(control.ask, boot.key_timeout, tasks, monotonic)
            proxy = Proxy(boot, leases, keys, prices, request_log, session, control.agreed)
            server = AgentServer(proxy.handle, header_timeout=boot.header_timeout, idle_timeout=boot.idle_timeout)
            agents = WatchedListener(for_agents, make_directories)
            listeners.start_soon(_accept, agents.accept, server)
            listeners.start_soon(agents.watch)
            if boot.tcp:
                listening = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=BACKLOG))
                listening.setblocking(False)
                control.port = listening.getsockname()[1]
                listeners.start_soon(_accept, partial(accept, listening), server)
            hutchds = WatchedListener(for_hutchd, make_directories, on_taken=ended.set)
            tasks.start_soon(control.serve, hutchds)
            tasks.start_soon(hutchds.watch)
            tasks.start_soon(_keep_time, leases, control, changed, boot.linger, ended)
            tasks.start_soon(prices.load)
            try:
                yield ended
            finally:
                with anyio.CancelScope(shield=True):
                    listeners.cancel_scope.cancel()
                    for_agents.close()
                    leases.keep(())
                    await server.shutdown(1.0)
                tasks.cancel_scope.cancel()


async def _accept(next_connection: Callable[[], Awaitable[socket.socket]], server: AgentServer) -> None:
    """Accept connections until cancelled.

    When the process has no free file descriptors, connections wait. asyncio's own server would flood the log instead.
    """
    loop = asyncio.get_running_loop()
    while True:
        await loop.connect_accepted_socket(server, await next_connection())


async def _keep_time(leases: LeaseTable, control: Control, changed: Latch, linger: float, ended: anyio.Event) -> None:
    """End leases when they expire, and without hutchd those whose executor is gone.

    End the broker after `linger` seconds without a lease and without hutchd, or after at most `_LEFT` if hutchd ended
    on purpose.
    """
    while True:
        leases.end_expired()
        if not control.linked:
            leases.end([state.lease.id for state in leases.states() if not _has_holder(state.lease)])
        alone = not leases and not control.linked
        if alone:
            pause: float | None = min(linger, _LEFT) if control.left else linger
        else:
            ends = leases.next_end()
            pause = ends if control.linked else min(_LOOK_EVERY, _LOOK_EVERY if ends is None else ends)
        with anyio.move_on_after(pause) as waited:
            await changed.wait()
        if alone and waited.cancelled_caught:
            ended.set()
            return


def _has_holder(lease: Lease) -> bool:
    return start_time(lease.pid) == lease.start_time
