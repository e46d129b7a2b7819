"""Events on their way to hutchd: numbered, kept until acknowledged, sent on the current connection.

Theory. `report` encodes and numbers an event and puts it into the outbox. Two tasks move events on from there: while
connected `send` writes batches to the connection; while detached `keep_spool` moves them to the spool. Both read the
outbox only, so no event is in two places at once, and a new connection starts at the first unacknowledged event.

Events arrive singly, and for hutchd a commit costs as much as the work on many events. So while a batch is unanswered
the next events gather for a moment and go out together. A lone event and a full batch are sent at once.

Bounds: the outbox in memory, the spool on disk. When hutchd does not acknowledge, or the spool is full or fails, memory
fills and `report` waits: reading from the agent stops. Nothing is dropped. Parts of the spool are removed as they are
acknowledged, since hutchd may need that very disk space to store them.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Final

import anyio
import msgspec
from anyio import to_thread
from anyio.lowlevel import checkpoint

from hutch_executor.events.encoding import event_body
from hutch_executor.events.outbox import BATCH_COUNT, EventBatch, Outbox
from hutch_executor.events.spool import Spool, SpoolFullError
from hutch_shared.backoff import Backoff
from hutch_shared.conditions import Conditions
from hutch_shared.errors import HutchError, Reason
from hutch_shared.events import EventKind
from hutch_shared.failpoints import WITNESSED, witness
from hutch_shared.latch import Latch
from hutch_shared.times import now_ms, to_wire

__all__ = ["Reporter"]

_RETRY_SPOOL: Final = (0.5, 2.0)
"""The shortest and the longest pause before a spool whose disk fails is written again, in seconds."""
_GATHER: Final = (0.004, 0.1)
"""Seconds that events gather after each batch, and the longest time while that batch is unacknowledged."""
_YIELD_EVERY: Final = 64
"""Events after which a runner that never waits lets other tasks run."""

_log: Final = logging.getLogger(__name__)
_encode: Final = msgspec.json.Encoder().encode


class Reporter:
    """The events of one executor. `turn` is the turn that new events belong to; None between turns."""

    def __init__(self, outbox: Outbox | None = None, *, gather: tuple[float, float] = _GATHER) -> None:
        """Start without a session: nothing can be reported before `begin`. `gather` replaces `_GATHER`."""
        self._gather_for = gather
        self.outbox = outbox or Outbox()
        self.turn: str | None = None
        self._spool: Spool | None = None
        self._head = b""
        self._is_connected = False
        self._is_ending = False
        self._conditions = Conditions(_log)
        self._order = anyio.Lock(fast_acquire=True)
        self._file = anyio.Lock()
        self._changed = Latch()
        self._spool_work = Latch()
        """Notified when the spool may have work: events to write, or parts to remove."""
        self._wanted = 0
        """The highest event number that a caller waits for, until it is sent."""
        self._flush = Latch()
        """Notified when gathering may end: `_wanted` grew, a batch is full, or an acknowledgement came."""

    def __repr__(self) -> str:
        return f"<Reporter {'connected' if self._is_connected else 'detached'} {self.outbox!r}>"

    @property
    def spooled_bytes(self) -> int:
        """Bytes in the spool."""
        return self._spool.size if self._spool else 0

    def begin(self, session: str, spool: Spool) -> None:
        """Accept events of `session` and keep them in `spool` while detached. `close` closes the spool."""
        self._spool = spool
        self._spool_work.notify()
        self._head = b'{"jsonrpc":"2.0","method":"report_message","params":{"session":%b,"events":[' % _encode(session)

    async def close(self) -> None:
        """Close the spool; unacknowledged events stay in it."""
        async with self._file:
            spool, self._spool = self._spool, None
            if spool is not None:
                with suppress(OSError):  # at worst the spool still holds events that hutchd has
                    await to_thread.run_sync(spool.forget, self.outbox.acked)
                await to_thread.run_sync(spool.close)

    # ------------------------------------------------------------ in

    async def report(self, kind: EventKind, data: msgspec.Struct, native: bytes | None = None) -> int:
        """Keep one event and return its number; see `DaemonPort.report`."""
        body = event_body(kind, data, native)
        if self._order.locked() or not self.outbox.has_room(len(body)):
            async with self._order:
                while not self.outbox.has_room(len(body)):
                    await self._changed.wait()
                n = self._put(body)
        else:
            n = self._put(body)
        if n % _YIELD_EVERY == 0:
            await checkpoint()
        return n

    def _put(self, body: bytes) -> int:
        n = self.outbox.last + 1
        if WITNESSED and self._spool is not None:
            witness("made", self._spool.executor, n, self.turn or "", body.decode())
        turn = b"" if self.turn is None else b'"turn":%b,' % _encode(self.turn)
        self.outbox.put(b'{"n":%d,"at":"%b",%b%b' % (n, to_wire(now_ms()).encode(), turn, body))
        self._changed.notify()
        if not self._is_connected:
            self._spool_work.notify()
        elif n - self.outbox.sent == BATCH_COUNT:
            self._flush.notify()
        return n

    # ------------------------------------------------------------ out

    def connect(self, acked: int) -> None:
        """Start a connection to a hutchd that has every event up to `acked`; HutchError if that number is too high."""
        if not self.outbox.rewind(acked):
            raise HutchError(
                Reason.INVALID_REQUEST,
                f"hutchd claims {acked} events of this executor, which made {self.outbox.last}.",
            )
        self._is_connected = True
        self._changed.notify()
        self._spool_work.notify()

    def detach(self) -> None:
        """Spool the events from now on: the connection is lost."""
        self._is_connected = False
        self._changed.notify()
        self._spool_work.notify()

    def acknowledge(self, n: int) -> None:
        """Forget every event up to `n`: hutchd has stored them."""
        self.outbox.ack(n)
        self._changed.notify()
        self._flush.notify()
        self._spool_work.notify()

    async def send(self, write: Callable[[bytes], Awaitable[None]]) -> None:
        """Write all events to the connection as they arrive, until cancelled or `write` fails."""
        while True:
            batch = await self._next_batch()
            self.outbox.sent = batch.last
            await write(self._head + b",".join(batch.events) + b"]}}\n")
            self._changed.notify()
            if not self.outbox.fills_batch():
                await self._gather()

    async def _gather(self) -> None:
        """Let events gather: for a moment, then until the batch that was sent is acknowledged."""
        with anyio.move_on_after(self._gather_for[0]):
            while self._may_gather():
                await self._flush.wait()
        with anyio.move_on_after(self._gather_for[1]):
            while self._may_gather() and self.outbox.acked < self.outbox.sent:
                await self._flush.wait()

    def _may_gather(self) -> bool:
        """Whether unsent events may wait: no caller waits for them, and they do not fill a batch."""
        return self._wanted <= self.outbox.sent and self.outbox.last - self.outbox.sent < BATCH_COUNT

    async def wait_sent(self, n: int) -> None:
        """Return when every event up to `n` is sent or acknowledged. Meanwhile these events do not gather."""
        self._wanted = max(self._wanted, n)
        self._flush.notify()
        while max(self.outbox.sent, self.outbox.acked) < n:
            await self._changed.wait()

    async def wait_acked(self, n: int) -> None:
        """Return when every event up to `n` is acknowledged."""
        while self.outbox.acked < n:
            await self._changed.wait()

    async def wait_safe(self) -> None:
        """Return when every event is acknowledged or spooled. Call it at the executor's end, to lose none."""
        self._is_ending = True
        while max(self.outbox.acked, self.outbox.spooled) < self.outbox.last:
            await self._changed.wait()

    async def keep_spool(self) -> None:
        """Spool events while there is no connection, and remove acknowledged parts, until cancelled."""
        backoff = Backoff(*_RETRY_SPOOL)
        while True:
            try:
                has_worked = await self._work_on_spool()
            except OSError as error:
                self._conditions.begin("spool", f"the spool cannot be written: {error.strerror}")
                await anyio.sleep(backoff.next())
            else:
                if not has_worked:
                    await self._spool_work.wait()

    async def _work_on_spool(self) -> bool:
        """Do one piece of work on the spool; return False if there is none, or no room for it."""
        async with self._file:
            if self._spool is None:
                return False
            if self._spool.can_forget(self.outbox.acked):
                await to_thread.run_sync(self._spool.forget, self.outbox.acked)
                return True
            batch = None if self._is_connected else self.outbox.to_spool()
            if batch is None:
                return False
            try:
                await to_thread.run_sync(partial(self._spool.append, batch, is_last_chance=self._is_ending))
            except SpoolFullError:
                self._conditions.begin("spool", "the spool is full; the agent waits for hutchd")
                return False
            self._conditions.end("spool", "the spool is written again")
            self.outbox.moved_to_spool(batch)
            self._changed.notify()
            return True

    async def _next_batch(self) -> EventBatch:
        while True:
            if self.outbox.unsent_in_spool():
                assert self._spool is not None
                first = max(self.outbox.sent, self.outbox.acked) + 1
                async with self._file:
                    return await to_thread.run_sync(self._spool.read, first)
            if batch := self.outbox.to_send():
                return batch
            await self._changed.wait()
