"""hutchd's relay without a store: the same connections and splicing, numbers from memory, immediate receipts.

`memory_relay EXECUTOR_SOCKET CLIENT_SOCKET FOLDER`.
"""

from __future__ import annotations

import socket
import sys
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
from anyio.abc import TaskGroup

from hutch_daemon.events.fanout import event_frame
from hutch_daemon.store.events import body_of
from hutch_daemon.store.rows import StoredEvent
from hutch_shared import messages as m
from hutch_shared import unix
from hutch_shared.errors import HutchError
from hutch_shared.methods import CLIENT, EXECUTOR, TO_CLIENT, TO_EXECUTOR
from hutch_shared.rpc.dispatch import Dispatcher
from hutch_shared.rpc.peer import Peer, PeerLimits
from hutch_shared.rpc.stream import SocketStream, accept
from hutch_shared.times import from_wire

SESSION = "s-0000000000000001"


class Follower:
    """The events that wait for one client."""

    def __init__(self, number: int, peer: Peer[Any]) -> None:
        """Start without events."""
        self.number = number
        self.peer = peer
        self.queue: deque[StoredEvent] = deque()
        self.changed = anyio.Event()

    async def run(self) -> None:
        """Send events as hutchd does, until the client has left."""
        with suppress(HutchError):
            while True:
                while self.queue:
                    events = list(self.queue)
                    self.queue.clear()
                    await self.peer.notify_raw(b"".join([event_frame(event, self.number) for event in events]))
                self.changed = anyio.Event()
                await self.changed.wait()


class Relay:
    """The relay: one executor, any number of clients."""

    def __init__(self, folder: Path, tasks: TaskGroup) -> None:
        """The executor spools to `folder`."""
        self._folder = folder
        self._tasks = tasks
        self._followers: list[Follower] = []
        self._seq = 0
        self._turns = 0
        self._executor: Peer[Any]

    async def serve_executor(self, stream: SocketStream) -> None:
        """Serve the executor."""
        handlers: dict[str, Any] = {
            "hello": lambda _, __: m.Welcome(acked=0, daemon_epoch=1), "report_message": self.report,
        }  # fmt: skip
        self._executor = Peer(
            stream,
            serves=Dispatcher(EXECUTOR, handlers),
            sends=TO_EXECUTOR,
            context=None,
            limits=PeerLimits(frame=32 << 20),
        )
        await self._executor.run()

    async def serve_client(self, stream: SocketStream) -> None:
        """Serve a client."""
        peer: Peer[Any] = Peer(
            stream, sends=TO_CLIENT, context=None,
            serves=Dispatcher(CLIENT, {
                "get_version": lambda _, __: m.Version("0", m.PROTOCOL),
                "follow_events": lambda _, __: self.follow(peer),
                "submit_prompt": self.submit,
            }),
        )  # fmt: skip
        await peer.run()
        self._followers = [one for one in self._followers if one.peer is not peer]

    def follow(self, peer: Peer[Any]) -> m.Following:
        """Let a client follow from the head."""
        follower = Follower(len(self._followers) + 1, peer)
        self._followers.append(follower)
        self._tasks.start_soon(follower.run)
        return m.Following(follower.number, "memory", self._seq)

    async def submit(self, _: Any, params: m.SubmitPrompt) -> m.Turn:
        """Pass the prompt to the executor."""
        self._turns += 1
        if self._turns == 1:
            prepare = m.PrepareSession(
                SESSION, "script", "/", "bypass", m.AgentOptions(), m.Limits(), str(self._folder), "/"
            )
            await self._executor.call("prepare_session", prepare)
        turn = f"t-{self._turns}"
        await self._executor.call("execute_prompt", m.ExecutePrompt(SESSION, turn, self._turns, params.prompt))
        return m.Turn(turn, SESSION, self._turns, "running", "", "")

    async def report(self, _: Any, params: m.ReportMessage) -> None:
        """Number events, queue them for every follower, and send the receipt."""
        for event in params.events:
            self._seq += 1
            stored = StoredEvent(
                self._seq, SESSION, self._seq, 0, event.turn, from_wire(event.at), event.kind, body_of(event)
            )
            for follower in self._followers:
                follower.queue.append(stored)
        for follower in self._followers:
            follower.changed.set()
        await self._executor.notify("ack_events", m.AckEvents(params.events[-1].n))


async def take(listener: socket.socket, serve: Any, tasks: TaskGroup) -> None:
    """Accept connections until cancelled."""
    while True:
        tasks.start_soon(serve, SocketStream(await accept(listener)))


async def main(executors: Path, clients: Path, folder: Path) -> None:
    """Serve both sockets."""
    async with anyio.create_task_group() as tasks:
        relay = Relay(folder, tasks)
        with unix.listen(executors) as for_executor, unix.listen(clients) as for_clients:
            tasks.start_soon(take, for_executor.socket, relay.serve_executor, tasks)
            tasks.start_soon(take, for_clients.socket, relay.serve_client, tasks)
            sys.stdout.write("ready\n")
            sys.stdout.flush()
            await anyio.sleep_forever()


if __name__ == "__main__":
    anyio.run(main, Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]))
