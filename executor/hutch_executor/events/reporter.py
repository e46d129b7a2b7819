"""Events on their way to hutchd: numbered, kept until acknowledged, sent on whichever connection there is.

Theory. `report` only encodes, numbers and puts an event into the outbox. Two tasks move what is there: while connected
`send` writes batches to the connection; while not, `keep` moves them to the spool. Both read the outbox only, so that
no event is in two hands, and a new connection starts at the first unacknowledged event.

Events come singly and each commit of hutchd costs as much as the work on many: while something is under way, what comes
next gathers for a moment, and until the receipt, and goes out together. A lone event and a full batch do not wait.

Bounds: the outbox in memory; the spool on disk. When hutchd does not acknowledge, or the spool is full or fails,
memory fills and `report` waits: the agent is not read any more. Nothing is dropped. The spool is given up piece by
piece as it is acknowledged, since hutchd may need its very room for what is in it.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final

import anyio
import msgspec
from anyio import to_thread
from anyio.lowlevel import checkpoint

from hutch_executor.events.outbox import BATCH_COUNT, Outbox, Stretch
from hutch_executor.events.spool import Spool, SpoolFullError
from hutch_executor.signals import Change
from hutch_shared.errors import HutchError, Reason
from hutch_shared.events import EventKind, Notice, TurnEnded
from hutch_shared.failpoints import WITNESSED, witness
from hutch_shared.rpc.envelope import is_sound
from hutch_shared.times import now_ms, to_wire

__all__ = ["EVENT_LIMIT", "Reporter"]

EVENT_LIMIT: Final = 30 << 20
"""Bytes of one event; the frame around it must stay below 32 MiB."""
_TRY_AGAIN: Final = 1.0
_GATHER: Final = (0.004, 0.1)
"""Seconds that the next events gather after a batch, and for which they go on while no receipt of it comes."""
_GIVE_WAY: Final = 64
"""Events after which a runner that never waits lets others run."""
_RESULT_LIMIT: Final = 1 << 20
_IN_FRAME: Final = b"[[[{%b]]]"
"""As deep as an event lies in its frame, for the check of its depth."""

_log: Final = logging.getLogger(__name__)
_encode: Final = msgspec.json.Encoder().encode


class Reporter:
    """The events of one executor. `turn` is the turn that they are of."""

    def __init__(self, outbox: Outbox | None = None, *, gather: tuple[float, float] = _GATHER) -> None:
        """Start without a session: nothing can be reported before `begin`. See `_GATHER`."""
        self._gather_for = gather
        self.outbox = outbox or Outbox()
        self.turn: str | None = None
        self._spool: Spool | None = None
        self._head = b""
        self._is_connected = False
        self._is_ending = False
        self._trouble: str | None = None
        self._order = anyio.Lock(fast_acquire=True)
        self._file = anyio.Lock()
        self._changed = Change()
        self._untidy = Change()
        """There may be something to do on the spool."""
        self._wanted = 0
        """Somebody waits until all up to here are sent."""
        self._hurry = Change()
        """That grew, or a receipt came."""

    def __repr__(self) -> str:
        return f"<Reporter {'connected' if self._is_connected else 'detached'} {self.outbox!r}>"

    @property
    def spooled_bytes(self) -> int:
        """Bytes in the spool."""
        return self._spool.size if self._spool else 0

    def begin(self, session: str, spool: Spool) -> None:
        """Take events of `session`, with `spool` to keep them in; closes the spool at `close`."""
        self._spool = spool
        self._untidy.happen()
        self._head = b'{"jsonrpc":"2.0","method":"report_message","params":{"session":%b,"events":[' % _encode(session)

    async def close(self) -> None:
        """Close the spool; what is not acknowledged stays there."""
        async with self._file:
            spool, self._spool = self._spool, None
            if spool is not None:
                with suppress(OSError):  # then what hutchd has already lies there
                    await to_thread.run_sync(spool.forget, self.outbox.acked)
                await to_thread.run_sync(spool.close)

    # ------------------------------------------------------------ in

    async def report(self, kind: EventKind, data: msgspec.Struct, native: bytes | None = None) -> int:
        """Keep one event and return its number; see `DaemonPort.report`."""
        body = _body(kind, data, native)
        if self._order.locked() or not self.outbox.has_room(len(body)):
            async with self._order:
                while not self.outbox.has_room(len(body)):
                    await self._changed.wait()
                n = self._put(body)
        else:
            n = self._put(body)
        if n % _GIVE_WAY == 0:
            await checkpoint()
        return n

    def _put(self, body: bytes) -> int:
        n = self.outbox.last + 1
        if WITNESSED and self._spool is not None:
            witness("made", self._spool.executor, n, self.turn or "", body.decode())
        turn = b"" if self.turn is None else b'"turn":%b,' % _encode(self.turn)
        self.outbox.put(b'{"n":%d,"at":"%b",%b%b' % (n, to_wire(now_ms()).encode(), turn, body))
        self._changed.happen()
        if not self._is_connected:
            self._untidy.happen()
        elif n - self.outbox.sent == BATCH_COUNT:
            self._hurry.happen()
        return n

    # ------------------------------------------------------------ out

    def connect(self, acked: int) -> None:
        """Start a connection whose other side has all up to `acked`; HutchError when that cannot be."""
        if not self.outbox.rewind(acked):
            raise HutchError(
                Reason.INVALID_REQUEST, f"hutchd has {acked} events of this executor, which made {self.outbox.last}."
            )
        self._is_connected = True
        self._changed.happen()
        self._untidy.happen()

    def detach(self) -> None:
        """The connection is gone: keep what comes in the spool."""
        self._is_connected = False
        self._changed.happen()
        self._untidy.happen()

    def acknowledge(self, n: int) -> None:
        """All up to `n` are durable at hutchd."""
        self.outbox.ack(n)
        self._changed.happen()
        self._hurry.happen()
        self._untidy.happen()

    async def send(self, write: Callable[[bytes], Awaitable[None]]) -> None:
        """Write all events to the connection as they come, until cancelled or `write` fails."""
        while True:
            stretch = await self._next_to_send()
            self.outbox.sent = stretch.last
            await write(self._head + b",".join(stretch.events) + b"]}}\n")
            self._changed.happen()
            if not self.outbox.fills_batch():
                await self._gather()

    async def _gather(self) -> None:
        """Let events gather: for a moment, and on until what was sent is acknowledged."""
        with anyio.move_on_after(self._gather_for[0]):
            while self._may_gather():
                await self._hurry.wait()
        with anyio.move_on_after(self._gather_for[1]):
            while self._may_gather() and self.outbox.acked < self.outbox.sent:
                await self._hurry.wait()

    def _may_gather(self) -> bool:
        """Tell whether what comes may wait: nobody waits for it, and it is no full batch."""
        return self._wanted <= self.outbox.sent and self.outbox.last - self.outbox.sent < BATCH_COUNT

    async def wait_sent(self, n: int) -> None:
        """Return when all up to `n` are on a connection or acknowledged; they gather no more."""
        self._wanted = max(self._wanted, n)
        self._hurry.happen()
        while max(self.outbox.sent, self.outbox.acked) < n:
            await self._changed.wait()

    async def wait_acked(self, n: int) -> None:
        """Return when all up to `n` are acknowledged."""
        while self.outbox.acked < n:
            await self._changed.wait()

    async def wait_safe(self) -> None:
        """Return when all is acknowledged or in the spool: the executor ends, and what is neither is lost."""
        self._is_ending = True
        while max(self.outbox.acked, self.outbox.spooled) < self.outbox.last:
            await self._changed.wait()

    async def keep(self) -> None:
        """Move what is in memory to the spool while there is no connection, and empty the spool when it may be."""
        while True:
            try:
                has_worked = await self._tidy()
            except OSError as error:
                self._complain(f"the spool cannot be written: {error.strerror}")
                await anyio.sleep(_TRY_AGAIN)
            else:
                if not has_worked:
                    await self._untidy.wait()

    async def _tidy(self) -> bool:
        """Do the next piece of work on the spool; False when there is none, or no room for it."""
        async with self._file:
            if self._spool is None:
                return False
            if self._spool.can_forget(self.outbox.acked):
                await to_thread.run_sync(self._spool.forget, self.outbox.acked)
                return True
            stretch = None if self._is_connected else self.outbox.to_spool()
            if stretch is None:
                return False
            try:
                await to_thread.run_sync(partial(self._spool.append, stretch, is_last_chance=self._is_ending))
            except SpoolFullError:
                self._complain("the spool is full; the agent waits for hutchd")
                return False
            self._trouble = None
            self.outbox.moved_to_spool(stretch)
            self._changed.happen()
            return True

    def _complain(self, trouble: str) -> None:
        """Log it once, until something was spooled again."""
        if trouble != self._trouble:
            self._trouble = trouble
            _log.warning("%s", trouble)

    async def _next_to_send(self) -> Stretch:
        while True:
            if self.outbox.unsent_in_spool():
                assert self._spool is not None
                first = max(self.outbox.sent, self.outbox.acked) + 1
                async with self._file:
                    return await to_thread.run_sync(self._spool.read, first)
            if stretch := self.outbox.to_send():
                return stretch
            await self._changed.wait()


# ---------------------------------------------------------------- an event's bytes


def _body(kind: EventKind, data: msgspec.Struct, native: bytes | None) -> bytes:
    """Return the event from `"kind"` on, in a form that every reader takes: its fault would stop all that follow."""
    try:
        text = _encode(data)
    except UnicodeEncodeError:
        text = _encode(_without_surrogates(msgspec.to_builtins(data)))
    if native is not None and (body := _sound(kind, text, b',"native":' + native)):
        return body
    if body := _sound(kind, text, b""):
        return body
    if isinstance(data, TurnEnded):
        kept = {"result": (data.result or "")[:_RESULT_LIMIT], "message": data.message[:_RESULT_LIMIT]}
        return _body(kind, msgspec.structs.replace(data, **kept), None)
    what = f"An event of kind {kind} ({len(text):,} bytes) is too large or too deeply nested to be passed on."
    return _body("notice", Notice("event_left_out", what, {"kind": kind, "bytes": len(text)}), None)


def _sound(kind: EventKind, data: bytes, native: bytes) -> bytes | None:
    """Return the body, or None where it is too large, not JSON, or too deep for the wire."""
    if len(data) + len(native) > EVENT_LIMIT:
        return None
    body = b'"kind":"%b","data":%b%b}' % (kind.encode(), data, native)
    if is_sound(_IN_FRAME % body):
        return body.replace(b"\n", b" ")
    return None


def _without_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, dict):
        return {_without_surrogates(key): _without_surrogates(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_surrogates(item) for item in value]
    return value
