"""A client's connection: identifies the caller, checks each call at the gate, and sends followed events.

A follow is a task of the connection. It takes events from the fan-out and waits for space in the connection's send
queue, so that a client that does not read uses no more memory than its follower's limit.
"""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any, Final

import anyio
import structlog
from anyio.abc import TaskGroup, TaskStatus

from hutch_daemon.api.gate import Phase, admit_client
from hutch_daemon.api.methods import CLIENT_METHODS, OwnMethod
from hutch_daemon.api.older_clients import without_waiting_state
from hutch_daemon.api.server import timeouts_of
from hutch_daemon.events.fanout import Fanout, FollowOver, event_frame
from hutch_daemon.services.access import Caller
from hutch_daemon.services.services import Services
from hutch_daemon.settings import Settings, SettingsInForce
from hutch_shared import __version__
from hutch_shared import messages as m
from hutch_shared.errors import HutchError, Reason
from hutch_shared.methods import CLIENT, TO_CLIENT
from hutch_shared.processes import Credentials, require_live_peer
from hutch_shared.rpc.dispatch import Dispatcher, Handler
from hutch_shared.rpc.peer import Peer, PeerLimits
from hutch_shared.rpc.stream import SocketStream

__all__ = ["ClientConnection", "ClientListener"]

_log: Final = structlog.get_logger(__name__)
_FOLLOWS: Final = 64
"""The most follows of one connection at a time."""


@dataclass(slots=True)
class ClientListener:
    """The state that all client connections share. `run` is a `Serve` of the server."""

    services: Services
    fanout: Fanout
    settings: SettingsInForce
    is_admin: Callable[[int], bool]
    """Returns whether a uid is root or an administrator."""
    insider_of: Callable[[int], str | None]
    """Returns the executor that a process belongs to, or None."""
    daemon_uid: int
    connections: set[ClientConnection] = field(default_factory=set)
    serves: Dispatcher[ClientConnection] = field(init=False)

    def __post_init__(self) -> None:
        """Look up the function that carries out each method."""
        handlers = {
            name: _own_handler(name, line.call_of(ClientConnection))
            if isinstance(line, OwnMethod)
            else _handler(name, line.call_of(self.services))
            for name, line in CLIENT_METHODS.items()
        }
        self.serves = Dispatcher(CLIENT, handlers)

    async def run(self, stream: SocketStream, credentials: Credentials) -> None:
        """Serve one client until its connection ends."""
        sockets = self.settings.current.sockets
        connection = ClientConnection(self, credentials, stream.socket)
        peer = Peer(
            stream,
            serves=self.serves,
            sends=TO_CLIENT,
            context=connection,
            limits=PeerLimits(frame=sockets.client_frame, queue_bytes=sockets.follower_bytes),
            timeouts=timeouts_of(sockets),
        )
        self.connections.add(connection)
        try:
            async with anyio.create_task_group() as tasks:
                connection.attach(peer, tasks)
                await peer.run()
                tasks.cancel_scope.cancel()
        finally:
            self.connections.discard(connection)

    async def close(self, why: HutchError) -> None:
        """Close all connections, and wait until they are closed."""
        async with anyio.create_task_group() as tasks:
            for connection in self.connections:
                tasks.start_soon(connection.aclose, why)


class ClientConnection:
    """The context of a client's calls."""

    def __init__(self, listener: ClientListener, credentials: Credentials, sock: socket.socket) -> None:
        self.services = listener.services
        self._listener = listener
        self._credentials = credentials
        self._sock = sock
        self._caller: Caller | None = None
        self._judged_by: Settings | None = None
        """The settings that were in force when `_caller.admin` was determined."""
        self._name = ""
        self.knows_waiting_state = False
        """Whether the client knows the turn state `awaiting_permission`."""
        self._peer: Peer[ClientConnection]
        self._tasks: TaskGroup
        self._follows: dict[int, anyio.CancelScope] = {}
        self._last_follow = 0

    def attach(self, peer: Peer[ClientConnection], tasks: TaskGroup) -> None:
        """Set the peer and the task group of the connection, before it is served."""
        self._peer, self._tasks = peer, tasks

    async def aclose(self, why: HutchError) -> None:
        """Close the connection, and wait until it is closed."""
        self._peer.close(why)
        await self._peer.wait_closed()

    def admit(self, method: str) -> Caller:
        """Admit a call and return the caller.

        The first call looks up whether the process belongs to a session, so a connection without calls causes no
        look-up. If the process has ended, the call is refused, because its pid may belong to another process by then.
        When the settings have changed, the rights of an administrator are checked again. A process of a session never
        has them.
        """
        one = self._credentials
        if self._caller is None:
            insider = self._listener.insider_of(one.pid)
            require_live_peer(self._sock)
            self._caller = Caller(uid=one.uid, gid=one.gid, pid=one.pid, client=self._name, insider=insider)
        if self._judged_by is not (settings := self._listener.settings.current):
            admin = self._caller.insider is None and self._listener.is_admin(one.uid)
            self._caller, self._judged_by = replace(self._caller, admin=admin), settings
        admit_client(
            method,
            self._caller,
            daemon_uid=self._listener.daemon_uid,
            phase=Phase.DRAINING if self.services.access.draining else Phase.SERVING,
        )
        return self._caller

    async def get_version(self, caller: Caller, params: m.VersionParams) -> m.Version:
        """Return hutchd's version; `protocol_mismatch` if the client speaks another protocol."""
        if params.protocol != m.PROTOCOL:
            raise HutchError(
                Reason.PROTOCOL_MISMATCH,
                f"This hutchd ({__version__}) speaks protocol {m.PROTOCOL}, the client {params.protocol}; update one.",
                protocol=m.PROTOCOL,
            )
        self._name = params.client[:100]
        self.knows_waiting_state = params.waiting_state
        self._caller = replace(caller, client=self._name)
        return m.Version(version=__version__, protocol=m.PROTOCOL)

    async def follow_events(self, caller: Caller, params: m.FollowEvents) -> m.Following:
        """Begin a follow. Its events are sent after the reply."""
        if len(self._follows) >= _FOLLOWS:
            raise HutchError(Reason.OVERLOADED, f"A connection can have at most {_FOLLOWS} follows at a time.")
        session = await self.services.access.followed_session(caller, params)
        following: m.Following = await self._tasks.start(self._follow, params, session, caller)
        return following

    async def _follow(
        self, params: m.FollowEvents, session: str, caller: Caller, *, task_status: TaskStatus[m.Following]
    ) -> None:
        self._last_follow += 1
        number = self._last_follow
        answers = params.answers and caller.insider is None
        with anyio.CancelScope() as scope:
            async with self._listener.fanout.follow(
                session, params.after, skip=params.skip, owner=caller.scope, answers=answers
            ) as follower:
                self._follows[number] = scope
                task_status.started(m.Following(number, follower.journal, follower.head, oldest=follower.oldest))
                try:
                    while True:
                        events = await follower.next()
                        await self._peer.notify_raw(b"".join([event_frame(event, number) for event in events]))
                except FollowOver as over:
                    await self._say_over(number, over)
                except HutchError:
                    return  # the connection is lost, and the follow with it
                finally:
                    del self._follows[number]

    async def _say_over(self, number: int, over: FollowOver) -> None:
        try:
            await self._peer.notify("follow_ended", m.FollowEnded(number, over.why, str(over), over.after))
        except HutchError:
            return

    async def unfollow(self, caller: Caller, params: m.Unfollow) -> m.Nothing:
        """End a follow. Does nothing if it has already ended."""
        scope = self._follows.get(params.follow)
        if scope is not None:
            scope.cancel()
        return m.Nothing()

    def __repr__(self) -> str:
        return f"<ClientConnection uid {self._credentials.uid} pid {self._credentials.pid} {self._name!r}>"


def _handler(name: str, call: Callable[[Caller, Any], Awaitable[Any]]) -> Handler[ClientConnection]:
    """Return the handler that admits a call and lets a service carry it out."""

    async def handle(connection: ClientConnection, params: Any) -> Any:
        result = await call(connection.admit(name), params)
        return result if connection.knows_waiting_state else without_waiting_state(result)

    return handle


def _own_handler(name: str, call: Callable[[Any, Caller, Any], Awaitable[Any]]) -> Handler[ClientConnection]:
    """Return the handler that admits a call and lets the connection carry it out."""

    async def handle(connection: ClientConnection, params: Any) -> Any:
        return await call(connection, connection.admit(name), params)

    return handle
