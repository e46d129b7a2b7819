"""One connection at work: a reader, a writer and a watch around a `Conversation`.

Theory. One task reads and one writes. Callers and handlers only put whole frames into the outgoing queue, so that
whoever is cancelled, no line is torn. Requests run in tasks of their own, as many as the conversation lets in; they
may wait for minutes (a person's decision), so they never stop the reading. What does stop it:

- a notification whose handler has not returned: they are delivered one after the other, in the order they came. The
  next one is decoded meanwhile and waits its turn (work on one and the decoding of the next go on side by side);
  whatever else comes behind it waits until all before it are done with;
- an outgoing queue that is full when an answer would be due: who does not read is not read.

Closing goes in order: what is queued and what runs gets out, this side half-closes, reads on until the other side
has closed as well, and only a deadline cuts that short. When the other side closes first, requests that still run have
that deadline to be answered; then they are cancelled.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from math import isinf
from time import monotonic
from typing import Any, Final, Generic, Literal, TypeVar

import anyio
import anyio.lowlevel
import msgspec
from anyio.abc import ByteStream

from hutch_shared.errors import HutchError, Reason
from hutch_shared.messages import Pong
from hutch_shared.methods import Table
from hutch_shared.rpc.conversation import PENDING, Answered, Asked, Conversation, Dropped, Say, Ticket, Told
from hutch_shared.rpc.frames import FrameSplitter
from hutch_shared.rpc.invocation import Handler, Invocation, internal_error, is_instant
from hutch_shared.rpc.stream import SocketStream
from hutch_shared.rpc.vigil import Overdue, Patience, Vigil

__all__ = ["Limits", "Peer"]

C = TypeVar("C")

_log: Final = logging.getLogger(__name__)
_SLICE: Final = 1 << 18
_IDLE: Final = 64
"""Of the tasks that ran requests at the same time, so many are kept for the next ones."""
_AHEAD: Final = 2
"""So many notifications are taken in before the handler of the first of them has returned."""
_TURN: Final = 64
"""So many frames of one chunk are taken before other tasks get their turn."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The bounds of one connection."""

    frame: int = 4 << 20
    """Bytes of an incoming frame."""
    pending: int = PENDING
    """Calls in flight, in each direction."""
    queue_bytes: int = 4 << 20
    queue_frames: int = 1024
    """The outgoing queue takes a frame, of any size, while it holds less than these; else who puts waits."""
    close: float = 2.0
    """Seconds from the wish to close to the end."""


_LIMITS: Final = Limits()
_PATIENCE: Final = Patience()


class Peer(Generic[C]):
    """A connection on which both sides ask and answer, typed by the methods tables.

    It works while `run` runs. `handlers` are by method name (see `Handler`); `ping` is answered without one.
    """

    def __init__(
        self,
        stream: ByteStream,
        *,
        takes: Table,
        sends: Table,
        context: C,
        handlers: Mapping[str, Handler[C]] | None = None,
        limits: Limits = _LIMITS,
        patience: Patience = _PATIENCE,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """Own `stream`. `takes` may be asked of this side, `sends` is what it asks of the other.

        A handler whose name is not in `takes` is a bug and raises KeyError.
        """
        handlers = handlers or {}
        self._stream = stream
        self._context = context
        self._limits = limits
        self._clock = clock
        self._conversation = Conversation(takes, sends, limits.pending)
        self._splitter = FrameSplitter(limits.frame)
        assert patience.quiet is None or "ping" in sends, "who looks for signs of life must be able to ask for one"
        self._vigil = Vigil(patience, clock())
        self._listeners = {name: handler for name, handler in handlers.items() if takes[name].kind == "notification"}
        self._slow = {name for name, handler in self._listeners.items() if not is_instant(handler)}
        askable = {name: handler for name, handler in handlers.items() if takes[name].kind == "request"}
        self._instant = {name for name, handler in askable.items() if is_instant(handler)}
        self._pings = "ping" not in askable
        self._dispatcher = None
        if askable:
            from hutch_shared.rpc.dispatch import Dispatcher  # slow to import, and a client needs none

            self._dispatcher = Dispatcher(takes, askable)
        self._queue: deque[bytes | memoryview] = deque()
        self._backlog = 0
        self._serving = 0
        self._idle: list[asyncio.Future[tuple[Ticket, Invocation[C]]]] = []
        self._told: deque[Told] = deque()
        """Notifications that are not done with; of the first the handler runs."""
        self._untaken: HutchError | None = None
        """Why one could not be taken: none after it is."""
        self._to_deliver = anyio.Event()
        self._delivered = anyio.Event()
        self._dropped = 0
        self._last_ping = 0
        self._waiters: dict[int, asyncio.Future[Any]] = {}
        self._closing = False
        self._why: str | HutchError | None = None
        self._tasks: anyio.abc.TaskGroup | None = None
        self._at_rest = False
        """The writer waits, and nothing is queued."""
        self._send_now = stream.send_now if isinstance(stream, SocketStream) else _nothing_now
        self._to_write = anyio.Event()
        self._space = anyio.Event()
        self._hurry = anyio.Event()
        self._drained = anyio.Event()
        self._closed = anyio.Event()

    # ------------------------------------------------------------ life

    async def run(self) -> None:
        """Work until the connection is over; `why` tells how it ended. Nothing the other side does raises here.

        Cancelled: running handlers are cancelled, callers get `connection_lost`, the stream is closed.
        """
        try:
            async with anyio.create_task_group() as self._tasks:
                self._tasks.start_soon(self._write)
                self._tasks.start_soon(self._watch)
                if self._slow:
                    self._tasks.start_soon(self._deliver)
                await self._read()
                self.close("the other side closed")
                await self._drained.wait()
                self._tasks.cancel_scope.cancel()
        finally:
            self.close("cancelled")
            self._abandon()
            for waiter in self._waiters.values():
                if not waiter.done():
                    waiter.set_result(HutchError(Reason.CONNECTION_LOST))
            with anyio.CancelScope(shield=True):
                await self._stream.aclose()
            self._closed.set()

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[Peer[C]]:
        """Run while the body runs, and close in order after it. What the body raises comes out as it is."""
        failure = None
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.run)
            try:
                yield self
            except Exception as error:  # noqa: BLE001  # raised again below, outside the group that would wrap it
                failure = error
            finally:
                with anyio.move_on_after(2 * self._limits.close, shield=True):
                    await self.aclose()
        if failure is not None:
            raise failure

    def close(self, why: str | HutchError = "closed here") -> None:
        """Begin to close, in order; the first reason given stands. May be called from a handler."""
        if not self._closing:
            self._closing = True
            self._why = why
            self._hurry.set()
            self._to_write.set()
            self._space.set()

    async def aclose(self) -> None:
        """Close in order and wait for the end (at most `limits.close` seconds). Not from a handler of this peer."""
        self.close()
        if self._tasks is None:
            await self._stream.aclose()
        else:
            await self._closed.wait()

    async def wait_closed(self) -> None:
        """Return when the connection is over."""
        await self._closed.wait()

    @property
    def why(self) -> str | HutchError | None:
        """Why the connection closes or closed; None while it is open."""
        return self._why

    @property
    def stream(self) -> ByteStream:
        """What it runs on, for the credentials of the other side."""
        return self._stream

    @property
    def backlog(self) -> int:
        """Bytes that wait to be written."""
        return self._backlog

    # ------------------------------------------------------------ asking and telling

    async def call(self, name: str, params: msgspec.Struct | None = None, timeout: float | None = None) -> Any:
        """Ask, and return the result as the table types it.

        Raises the other side's HutchError; `timed_out` after `timeout` seconds, queueing included; `overloaded` when
        too many calls are in flight; `connection_lost`. Cancelled: the answer is dropped when it comes.
        """
        if timeout is None:
            outcome = await self._ask(name, params)
        else:
            with anyio.move_on_after(timeout) as waited:
                outcome = await self._ask(name, params)
            if waited.cancelled_caught:
                raise HutchError(Reason.TIMED_OUT, f"No answer to {name} came within {timeout:g} s.")
        if isinstance(outcome, HutchError):
            raise outcome
        return outcome

    async def _ask(self, name: str, params: msgspec.Struct | None) -> Any:
        if self._closing or self._is_full():
            await self._room()
        number, frame = self._conversation.call(name, params)
        waiter: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiters[number] = waiter
        try:
            self._append(frame)
            return await waiter
        finally:
            self._conversation.forget(number)
            del self._waiters[number]

    async def notify(self, name: str, params: msgspec.Struct | None = None) -> None:
        """Tell. Waits while the queue is full; returns when the frame is queued. Raises `connection_lost`."""
        await self._room()
        self._put(self._conversation.notify(name, params))

    async def notify_raw(self, frames: bytes) -> None:
        """Queue notifications that were encoded before: whole lines with their ends. Waits and raises as `notify`."""
        assert frames.endswith(b"\n")
        await self._room()
        self._put(frames)

    # ------------------------------------------------------------ the reader

    async def _read(self) -> None:
        """Read until the other side has closed, or a notification could not be taken."""
        while True:
            try:
                chunk = await self._stream.receive()
            except (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError):
                with suppress(HutchError):
                    await self._all_told()
                return
            frames = self._splitter.feed(chunk)
            now = self._clock()
            self._vigil.heard(now, completed=bool(frames), in_frame=self._splitter.in_frame)
            if not frames:
                continue
            self._vigil.pause(now)
            for count, frame in enumerate(frames, 1):
                try:
                    await self._take(frame)
                except HutchError as error:
                    self.close(error)
                    return
                if not count % _TURN:
                    await anyio.lowlevel.checkpoint()
            self._vigil.resume(self._clock())

    async def _take(self, frame: bytes | Literal["oversized"]) -> None:
        """Do what the frame asks for. A HutchError ends the connection."""
        for event in self._conversation.receive(frame):
            if isinstance(event, Told):
                await self._tell(event)
                continue
            if self._told or self._untaken:
                await self._all_told()
            if isinstance(event, Answered):
                waiter = self._waiters.get(event.id)
                if waiter is not None and not waiter.done():
                    waiter.set_result(event.outcome)
            elif isinstance(event, Dropped):
                self._dropped += 1
                _log.log(logging.WARNING if self._dropped == 1 else logging.DEBUG, "dropped: %s", event.why)
            elif not self._closing:
                if self._is_full():
                    await self._room()
                if isinstance(event, Say):
                    self._put(event.frame)
                else:
                    self._begin(event)

    async def _tell(self, told: Told) -> None:
        name = told.method.name
        if name in self._slow:
            await self._all_told(_AHEAD - 1)
            self._told.append(told)
            self._to_deliver.set()
        elif name in self._listeners:
            if self._told or self._untaken:
                await self._all_told()
            await self._hand(told)

    async def _all_told(self, but: int = 0) -> None:
        """Return when at most `but` notifications are not done with. Raises what one could not be taken for."""
        while len(self._told) > but and self._untaken is None:
            self._delivered = anyio.Event()
            await self._delivered.wait()
        if self._untaken is not None:
            raise self._untaken

    async def _deliver(self) -> None:
        """Hand over, one after the other, what takes time, until one cannot be taken: that ends the connection."""
        while self._untaken is None:
            while not self._told:
                self._to_deliver = anyio.Event()
                await self._to_deliver.wait()
            try:
                await self._hand(self._told[0])
            except HutchError as error:
                self._untaken = error
                self.close(error)
            self._told.popleft()
            self._delivered.set()

    async def _hand(self, told: Told) -> None:
        try:
            done = self._listeners[told.method.name](self._context, told.params)
            if done is not None:
                await done
        except HutchError:
            raise
        except Exception:  # noqa: BLE001  # a notification has no answer: a bug in its handler ends the connection
            raise internal_error(told.method.name) from None

    def _begin(self, asked: Asked) -> None:
        request = asked.request
        outcome: Any
        if request.method == "ping" and self._pings:
            outcome = Pong()
        elif self._dispatcher is None:
            outcome = HutchError(Reason.METHOD_NOT_FOUND)
        else:
            outcome = self._dispatcher.dispatch(request, self._context)
            if isinstance(outcome, Invocation):
                if outcome.name not in self._instant:
                    self._serving += 1
                    self._hand_over(asked.ticket, outcome)
                    return
                outcome = outcome.at_once()
        frame = self._answer(asked.ticket, outcome, request.method)
        if frame is not None:
            self._put(frame)

    def _hand_over(self, ticket: Ticket, invocation: Invocation[C]) -> None:
        """Let a task that has nothing to do run it, since a new one costs as much as all the rest of a call."""
        while self._idle:
            work = self._idle.pop()
            if not work.done():  # else cancelled, and so are we, in a moment
                work.set_result((ticket, invocation))
                return
        assert self._tasks is not None
        self._tasks.start_soon(self._serve, ticket, invocation)

    async def _serve(self, ticket: Ticket, invocation: Invocation[C]) -> None:
        """Run one request after the other, until a few others wait for work already."""
        while True:
            try:
                frame = self._answer(ticket, await invocation.run(), invocation.name)
                if frame is not None:
                    while self._is_full() and not self._closing:
                        await self._space.wait()
                    self._append(frame)
            finally:
                self._serving -= 1
                if self._closing:
                    self._to_write.set()
            if self._closing or len(self._idle) >= _IDLE:
                return
            work: asyncio.Future[tuple[Ticket, Invocation[C]]] = asyncio.get_running_loop().create_future()
            self._idle.append(work)
            ticket, invocation = await work

    def _answer(self, ticket: Ticket, outcome: Any, name: str) -> bytes | None:
        try:
            return self._conversation.answer(ticket, outcome)
        except (
            TypeError,
            ValueError,
            RecursionError,
            NotImplementedError,
        ):  # no JSON form: a bug of the handler
            return self._conversation.answer(ticket, internal_error(name))

    # ------------------------------------------------------------ the writer

    def _is_full(self) -> bool:
        return self._backlog >= self._limits.queue_bytes or len(self._queue) >= self._limits.queue_frames

    async def _room(self) -> None:
        """Wait until the queue takes a frame. What is put must be put before the next await."""
        while not self._closing and self._is_full():
            await self._space.wait()
        if self._closing:
            raise HutchError(Reason.CONNECTION_LOST)

    def _put(self, frame: bytes) -> None:
        if not self._closing:
            self._append(frame)

    def _append(self, frame: bytes) -> None:
        """Queue a whole frame. While the writer is at rest, what the socket takes at once is written in its place."""
        rest: bytes | memoryview = frame
        if self._at_rest:
            written = self._send_now(frame)
            if written == len(frame):
                return
            rest = memoryview(frame)[written:]
            self._at_rest = False
            self._to_write.set()
        self._queue.append(rest)
        self._backlog += len(rest)
        if self._is_full():
            self._vigil.full(self._clock())
            if self._space.is_set():
                self._space = anyio.Event()

    async def _write(self) -> None:
        """Write what is queued, joined to slices of a bounded size, until closed and nothing is left."""
        try:
            while True:
                while self._queue:
                    chunk = self._cut()
                    await self._stream.send(chunk)
                    self._backlog -= len(chunk)
                    if self._is_full():
                        self._vigil.full(self._clock())
                    elif not self._space.is_set():
                        self._vigil.roomy()
                        self._space.set()
                if self._closing and not self._serving:
                    await self._stream.send_eof()
                    break
                self._to_write = anyio.Event()
                self._at_rest = True
                await self._to_write.wait()
                self._at_rest = False
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            self.close("the other side closed")
            self._abandon()
        self._drained.set()

    def _cut(self) -> bytes:
        """Take what is written next from the queue: at most a slice, and of many small frames as many as fit."""
        first = self._queue.popleft()
        if len(first) > _SLICE:
            whole = memoryview(first)
            self._queue.appendleft(whole[_SLICE:])
            return bytes(whole[:_SLICE])
        if not self._queue or len(first) + len(self._queue[0]) > _SLICE:
            return bytes(first)
        taken = [first]
        size = len(first)
        while self._queue and (size := size + len(self._queue[0])) <= _SLICE:
            taken.append(self._queue.popleft())
        return b"".join(taken)

    def _abandon(self) -> None:
        """Nothing can be written any more."""
        self._queue.clear()
        self._backlog = 0
        self._space.set()

    # ------------------------------------------------------------ the watch

    async def _watch(self) -> None:
        """End the connection when a deadline runs out, the one for closing included."""
        assert self._tasks is not None
        while not self._closing:
            wait = self._vigil.look_again(self._clock())
            with anyio.move_on_after(None if isinf(wait) else wait):
                await self._hurry.wait()
            overdue = self._vigil.overdue(self._clock())
            if overdue is Overdue.QUIET:
                self._ping()
            elif overdue is not None and not self._closing:
                self.close(overdue.value)
                self._tasks.cancel_scope.cancel()
        await anyio.sleep(self._limits.close)
        self._tasks.cancel_scope.cancel()

    def _ping(self) -> None:
        """Ask for a sign of life. Where the queue is full, the deadline for reading speaks for it."""
        self._vigil.pinged(self._clock())
        self._conversation.forget(self._last_ping)
        if not self._is_full():
            try:
                self._last_ping, frame = self._conversation.call("ping", None)
                self._put(frame)
            except HutchError:
                _log.warning("no ping: too many calls wait for their answer")

    def __repr__(self) -> str:
        state = f"closing: {self._why}" if self._closing else "open"
        return f"<Peer {state}, serves {self._serving}, calls {len(self._waiters)}, backlog {self._backlog}>"


def _nothing_now(frame: bytes) -> int:
    """Write nothing: a stream that has no socket is written to by the writer only."""
    return 0
