"""One executor's connection: nothing before `hello`; after it what its lease row allows, asked anew each time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import anyio

from hutch_daemon.api.gate import admit_executor, standing_of
from hutch_daemon.api.server import timeouts_of
from hutch_daemon.pool.executor import Executor
from hutch_daemon.services.conductor import Conductor
from hutch_daemon.settings import Settings
from hutch_shared import messages as m
from hutch_shared.errors import HutchError, Reason
from hutch_shared.methods import EXECUTOR, TO_EXECUTOR
from hutch_shared.rpc.dispatch import Handler
from hutch_shared.rpc.peer import Peer, PeerLimits
from hutch_shared.rpc.stream import SocketStream
from hutch_shared.unix import Credentials

__all__ = ["ExecutorConnection", "ExecutorSide"]


@dataclass(frozen=True, slots=True)
class ExecutorSide:
    """What every executor connection shares; `run` is the server's `Serve`."""

    conductor: Conductor
    settings: Callable[[], Settings]

    async def run(self, stream: SocketStream, credentials: Credentials) -> None:
        """Serve one executor until its connection ends; the executor may dial in again."""
        sockets = self.settings().sockets
        connection = ExecutorConnection(self, credentials)
        peer = Peer(
            stream,
            takes=EXECUTOR,
            sends=TO_EXECUTOR,
            context=connection,
            handlers=_HANDLERS,
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
                self.conductor.executor_gone(connection.executor, peer)


class ExecutorConnection:
    """The context of an executor's calls."""

    def __init__(self, side: ExecutorSide, credentials: Credentials) -> None:
        self._side = side
        self._credentials = credentials
        self._greeted = anyio.Event()
        self.peer: Peer[ExecutorConnection]
        self.executor: Executor | None = None

    async def expect_hello(self, seconds: float) -> None:
        """Close a connection that has not proved itself in time, whatever else it sent."""
        with anyio.move_on_after(seconds):
            await self._greeted.wait()
        if not self._greeted.is_set():
            self.peer.close(HutchError(Reason.HELLO_FIRST))

    async def hello(self, params: m.Hello) -> m.Welcome:
        """Prove an executor. Once on a connection; a refusal closes it."""
        self._let_in("hello")
        if self._greeted.is_set():
            raise HutchError(Reason.WRONG_STATE, "This connection has said hello already.")
        self._greeted.set()
        try:
            self.executor, welcome = await self._side.conductor.executor_hello(self.peer, self._credentials, params)
        except HutchError as error:
            self.peer.close(error)
            raise
        return welcome

    def admit(self, method: str, session: str | None = None) -> Executor:
        """Let a call in and return whose it is."""
        self._let_in(method, session)
        assert self.executor is not None, "the table lets in nobody else"
        return self.executor

    def _let_in(self, method: str, session: str | None = None) -> None:
        one = self.executor
        if one is None:
            standing = standing_of(None, over=False, leased=None, session=session)
        else:
            standing = standing_of(one.id, over=one.over, leased=one.session, session=session)
        admit_executor(method, standing)

    async def get_api_key(self, params: m.GetApiKey) -> m.KeyGrant:
        """Give a key, or a lease."""
        executor = self.admit("get_api_key", params.session)
        return await self._side.conductor.get_api_key(executor, params)

    async def request_permission(self, params: m.RequestPermission) -> m.PermissionDecision:
        """Wait for the decision about one call."""
        executor = self.admit("request_permission", params.session)
        return await self._side.conductor.request_permission(executor, params)

    async def report_message(self, params: m.ReportMessage) -> None:
        """Store events; reading goes on once they are durable."""
        executor = self.admit("report_message", params.session)
        await self._side.conductor.report_message(executor, params)

    def heartbeat(self, params: m.Heartbeat) -> None:
        """Note a sign of life."""
        self._side.conductor.heartbeat(self.admit("heartbeat"), params)

    def __repr__(self) -> str:
        return f"<ExecutorConnection pid {self._credentials.pid} {self.executor or 'before hello'}>"


_HANDLERS: Final[dict[str, Handler[ExecutorConnection]]] = {
    "hello": ExecutorConnection.hello,
    "get_api_key": ExecutorConnection.get_api_key,
    "request_permission": ExecutorConnection.request_permission,
    "report_message": ExecutorConnection.report_message,
    "heartbeat": ExecutorConnection.heartbeat,
}
