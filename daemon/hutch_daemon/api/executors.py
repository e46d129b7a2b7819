"""One executor's connection: before `hello` it may call nothing; after it each call is checked against its lease."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import anyio

from hutch_daemon.api.gate import admit_executor, standing_of
from hutch_daemon.api.methods import EXECUTOR_METHODS, HELLO, ExecutorMethod
from hutch_daemon.api.server import timeouts_of
from hutch_daemon.pool.executors import Executor
from hutch_daemon.services.services import Services
from hutch_daemon.settings import SettingsInForce
from hutch_shared import messages as m
from hutch_shared.errors import HutchError, Reason
from hutch_shared.methods import EXECUTOR, TO_EXECUTOR
from hutch_shared.processes import Credentials
from hutch_shared.rpc.dispatch import Dispatcher, Handler
from hutch_shared.rpc.peer import Peer, PeerLimits
from hutch_shared.rpc.stream import SocketStream

__all__ = ["ExecutorConnection", "ExecutorListener"]


@dataclass(slots=True)
class ExecutorListener:
    """The state that all executor connections share. `run` is a `Serve` of the server."""

    services: Services
    settings: SettingsInForce
    serves: Dispatcher[ExecutorConnection] = field(init=False)

    def __post_init__(self) -> None:
        """Look up the function that carries out each method. The connection itself carries out `hello`."""
        handlers = {name: _handler(name, line, self.services) for name, line in EXECUTOR_METHODS.items()}
        self.serves = Dispatcher(EXECUTOR, {**handlers, HELLO: ExecutorConnection.hello})

    async def run(self, stream: SocketStream, credentials: Credentials) -> None:
        """Serve one executor until its connection ends; the executor may dial in again."""
        sockets = self.settings.current.sockets
        connection = ExecutorConnection(self, credentials)
        peer = Peer(
            stream,
            serves=self.serves,
            sends=TO_EXECUTOR,
            context=connection,
            limits=PeerLimits(frame=sockets.executor_frame),
            timeouts=timeouts_of(sockets),
        )
        connection.peer = peer
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(connection.expect_hello, sockets.hello)
                await peer.run()
                tasks.cancel_scope.cancel()
        finally:
            if connection.executor is not None:
                self.services.executors.gone(connection.executor, peer)


class ExecutorConnection:
    """The context of an executor's calls."""

    def __init__(self, listener: ExecutorListener, credentials: Credentials) -> None:
        self.services = listener.services
        self._credentials = credentials
        self._greeted = anyio.Event()
        self.peer: Peer[ExecutorConnection]
        self.executor: Executor | None = None

    async def expect_hello(self, seconds: float) -> None:
        """Close the connection if no `hello` was accepted within `seconds`, whatever else it sent."""
        with anyio.move_on_after(seconds):
            await self._greeted.wait()
        if not self._greeted.is_set():
            self.peer.close(HutchError(Reason.HELLO_FIRST))

    async def hello(self, params: m.Hello) -> m.Welcome:
        """Authenticate the executor. Allowed once per connection; a refusal closes the connection."""
        self._admit("hello")
        if self._greeted.is_set():
            raise HutchError(Reason.WRONG_STATE, "This connection has said hello already.")
        self._greeted.set()
        try:
            self.executor, welcome = await self.services.executors.hello(self.peer, self._credentials, params)
        except HutchError as error:
            self.peer.close(error)
            raise
        return welcome

    def admit(self, method: str, session: str | None = None) -> Executor:
        """Admit a call and return the executor that makes it."""
        self._admit(method, session)
        assert self.executor is not None, "the table admits no other"
        return self.executor

    def _admit(self, method: str, session: str | None = None) -> None:
        one = self.executor
        if one is None:
            standing = standing_of(None, over=False, leased=None, session=session)
        else:
            standing = standing_of(one.id, over=one.over, leased=one.session, session=session)
        admit_executor(method, standing)

    def __repr__(self) -> str:
        return f"<ExecutorConnection pid {self._credentials.pid} {self.executor or 'before hello'}>"


def _handler(name: str, line: ExecutorMethod[Any, Any], services: Services) -> Handler[ExecutorConnection]:
    """Return the handler that admits a call and lets a service carry it out."""
    call, about_session = line.call_of(services), line.about_session
    if EXECUTOR[name].kind == "notification" and not EXECUTOR[name].hot:

        def handle_at_once(connection: ExecutorConnection, params: Any) -> Any:
            return call(connection.admit(name, params.session if about_session else None), params)

        return handle_at_once

    async def handle(connection: ExecutorConnection, params: Any) -> Any:
        return await call(connection.admit(name, params.session if about_session else None), params)

    return handle
