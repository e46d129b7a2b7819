"""An executor that only makes load: it encodes its events beforehand, and sends them as a real executor does.

It reads its boot line from standard input. A prompt is the JSON of an `Order`: the turn sends `count` events, or makes
`asks` permission requests and returns the seconds of each as the turn's result.
"""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from pathlib import Path

import anyio
import msgspec
from anyio.abc import TaskGroup

from hutch_executor.events.outbox import Outbox
from hutch_executor.events.reporter import Reporter
from hutch_executor.events.spool import Spool
from hutch_executor.link.boot import read_boot
from hutch_executor.process.hardening import announce, harden
from hutch_shared import __version__, unix
from hutch_shared import messages as m
from hutch_shared.errors import HutchError
from hutch_shared.events import TurnEnded, TurnStarted
from hutch_shared.ids import new_id
from hutch_shared.methods import EXECUTOR, TO_EXECUTOR
from hutch_shared.rpc.dispatch import Dispatcher, Handler
from hutch_shared.rpc.peer import Peer, PeerLimits
from hutch_shared.rpc.stream import SocketStream
from hutch_shared.times import now_ms, to_wire


class Order(msgspec.Struct):
    """The work of a turn."""

    count: int = 0
    size: int = 0
    """Bytes of each event's payload."""
    asks: int = 0
    command: str = ""


class Load:
    """The executor."""

    def __init__(self, boot: m.Boot, tasks: TaskGroup) -> None:
        """Serve the hutchd that `boot` names."""
        self.boot = boot
        self.tasks = tasks
        self.reporter = Reporter(Outbox(1 << 30, 1 << 60))
        self.peer: Peer[Load]
        self.receipts = 0

    async def serve(self) -> None:
        """Say hello, and work until hutchd closes the connection."""
        sock = unix.connect(Path(self.boot.socket), 10.0)
        handlers: dict[str, Handler[Load]] = {
            "prepare_session": Load.prepare,
            "execute_prompt": Load.execute,
            "resolve_paths": Load.resolve,
            "ack_events": Load.acknowledge,
            "shutdown": Load.leave,
        }
        self.peer = Peer(
            SocketStream(sock), serves=Dispatcher(TO_EXECUTOR, handlers), sends=EXECUTOR, context=self,
            limits=PeerLimits(frame=32 << 20),
        )  # fmt: skip
        async with self.peer.serving():
            hello = m.Hello(self.boot.executor, self.boot.token, m.PROTOCOL, __version__, 0)
            await self.peer.call("hello", hello)
            await self.peer.wait_closed()
        self.tasks.cancel_scope.cancel()

    def prepare(self, params: m.PrepareSession) -> m.Prepared:
        """Prepare the session."""
        self.session, self.cwd = params.session, params.cwd
        self.reporter.begin(
            params.session, Spool(Path(params.spool), self.boot.executor, params.session, params.spool_bytes)
        )
        self.reporter.connect(0)
        self.tasks.start_soon(self.send)
        return m.Prepared(agent_session="load", keys="none")

    async def send(self) -> None:
        """Send events until the connection is lost."""
        with suppress(HutchError):
            await self.reporter.send(self.peer.notify_raw)

    def execute(self, params: m.ExecutePrompt) -> m.Accepted:
        """Start a turn."""
        order = msgspec.json.decode(params.prompt, type=Order)
        self.tasks.start_soon(self.ask if order.asks else self.pour, params, order)
        return m.Accepted(accepted=True)

    def resolve(self, params: m.ResolvePaths) -> m.ResolvedPaths:
        """Resolve every path to itself."""
        return m.ResolvedPaths({path: path for path in params.paths})

    def acknowledge(self, params: m.AckEvents) -> None:
        """Drop the events that are durable."""
        self.receipts += 1
        self.reporter.acknowledge(params.n)

    def leave(self, params: m.Shutdown) -> m.Nothing:
        """End."""
        self.peer.close()
        return m.Nothing()

    async def pour(self, prompt: m.ExecutePrompt, order: Order) -> None:
        """Send the events; the turn's result is the number of receipts."""
        outbox = self.reporter.outbox
        turn, at = msgspec.json.encode(prompt.turn), to_wire(now_ms()).encode()
        data = b'"kind":"text","data":{"text":"%b"}' % (b"x" * min(100, order.size // 2))
        native = b'{"type":"assistant","message":"%b"}' % (b"word \\n" * (max(0, order.size - len(data) - 60) // 7))
        first = outbox.last + 2
        events = [
            b'{"n":%d,"at":"%b","turn":%b,%b,"native":%b}' % (n, at, turn, data, native)
            for n in range(first, first + order.count)
        ]
        self.reporter.turn = prompt.turn
        await self.reporter.wait_acked(await self.reporter.report("turn_started", TurnStarted("load", prompt.number)))
        self.receipts = 0
        for event in events:
            outbox.put(event)
        self.reporter.acknowledge(0)  # wakes the sender
        await self.reporter.wait_acked(outbox.last)
        ended = TurnEnded("completed", "completed", "All was sent.", str(self.receipts))
        await self.reporter.report("turn_ended", ended)

    async def ask(self, prompt: m.ExecutePrompt, order: Order) -> None:
        """Make the permission requests, one after the other."""
        self.reporter.turn = prompt.turn
        await self.reporter.wait_acked(await self.reporter.report("turn_started", TurnStarted("load", prompt.number)))
        taken = []
        for number in range(order.asks):
            command = f"{order.command} # {number}"
            call = m.ToolCall(f"c-{number}", "run_command", "Bash", {"command": command}, command)
            asked = m.RequestPermission(new_id("ask"), self.session, prompt.turn, "tool", call, self.cwd)
            began = time.perf_counter()
            decision: m.PermissionDecision = await self.peer.call("request_permission", asked)
            taken.append(time.perf_counter() - began)
            assert decision.decision == "allow", decision
        result = msgspec.json.encode(taken).decode()
        await self.reporter.report("turn_ended", TurnEnded("completed", "completed", "All was asked.", result))


async def main() -> None:
    """Run the executor until hutchd closes its connection."""
    harden()
    announce(0)
    boot = read_boot(0)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(Load(boot, tasks).serve)


if __name__ == "__main__":
    anyio.run(main)
    sys.exit(0)
