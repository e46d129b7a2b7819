"""One live connection: a reader task, a writer task and a watchdog around a `Conversation`.

Theory. One task reads and one writes. Callers and handlers only put whole frames into the outgoing queue, so a
cancelled caller never tears a line. Each request runs in a task; requests may wait for minutes (for a user's decision)
and never stop the reader. Two things stop the reader:

- A notification whose handler has not returned. Notifications are handled one at a time, in order. The reader decodes
  the next one meanwhile; any other frame waits until all notifications before it are handled.
- A full outgoing queue when an answer is due: the reader does not read from a peer that does not read.

Closing has an order: the queued frames and the running requests finish, this side half-closes, and reads until the
peer closes as well; a deadline bounds all of it. When the peer closes first, running requests have the same deadline;
then they are cancelled.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable
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
from hutch_shared.latch import Latch
from hutch_shared.messages import Pong
from hutch_shared.methods import Table
from hutch_shared.rpc.conversation import (
    PENDING,
    Conversation,
    MessageDropped,
    NotificationReceived,
    RequestReceived,
    ResponseReceived,
    SendFrame,
    Ticket,
)
from hutch_shared.rpc.dispatch import Dispatcher, Invocation, internal_error
from hutch_shared.rpc.heartbeat import Deadlines, Expired, Timeouts
from hutch_shared.rpc.stream import FrameSplitter, SocketStream

__all__ = ["Peer", "PeerLimits"]

C = TypeVar("C")

_log: Final = logging.getLogger(__name__)
_SLICE: Final = 1 << 18
_IDLE: Final = 64
"""The most tasks that wait for the next request; a task beyond them ends when its request is answered."""
_AHEAD: Final = 2
"""The most notifications that the reader accepts before the handler of the first has returned."""
_TURN: Final = 64
"""The most frames of one chunk before the reader yields to other tasks."""


@dataclass(frozen=True, slots=True)
class PeerLimits:
    """The limits of one connection."""

    frame: int = 4 << 20
    """The most bytes of an incoming frame."""
    pending: int = PENDING
    """The most calls in flight, in each direction."""
    queue_bytes: int = 4 << 20
    queue_frames: int = 1024
    """The outgoing queue accepts a frame of any size while it holds less than both; otherwise the sender waits."""
    close: float = 2.0
    """Seconds from the call of `close` to the end of the connection."""


_LIMITS: Final = PeerLimits()
_TIMEOUTS: Final = Timeouts()


class Peer(Generic[C]):
    """A connection on which both sides make requests, typed by the methods tables.

    It works while `run` runs. The methods that the other side may call are those of `serves`; `ping` needs no handler.
    """

    def __init__(
        self,
        stream: ByteStream,
        *,
        serves: Dispatcher[C],
        sends: Table,
        context: C,
        limits: PeerLimits = _LIMITS,
        timeouts: Timeouts = _TIMEOUTS,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """Own `stream`. The peer may call the methods of `serves`; this side calls those of `sends`."""
        self._stream = stream
        self._context = context
        self._limits = limits
        self._clock = clock
        self._conversation = Conversation(serves.table, sends, limits.pending)
        self._splitter = FrameSplitter(limits.frame)
        assert timeouts.quiet is None or "ping" in sends, "a side that sends pings needs `ping` in its table"
        self._deadlines = Deadlines(timeouts, clock())
        self._serves = serves
        self._slow = serves.listeners.keys() - serves.instant
        self._queue: deque[bytes | memoryview] = deque()
        self._backlog = 0
        self._serving = 0
        self._idle: list[asyncio.Future[tuple[Ticket, Invocation[C]]]] = []
        self._unhandled: deque[NotificationReceived] = deque()
        """Notifications not handled yet; the handler of the first runs."""
        self._rejected: HutchError | None = None
        """The error of the first notification that could not be handled; none after it is handled."""
        self._notified = Latch()
        self._handled = Latch()
        self._dropped = 0
        self._last_ping = 0
        self._waiters: dict[int, asyncio.Future[Any]] = {}
        self._closing = False
        self._why: str | HutchError | None = None
        self._tasks: anyio.abc.TaskGroup | None = None
        self._writer_idle = False
        """The writer waits and the queue is empty."""
        self._send_now = stream.send_now if isinstance(stream, SocketStream) else _nothing_now
        self._to_write = Latch()
        self._space = Latch()
        self._was_full = False
        self._close_requested = anyio.Event()
        self._drained = anyio.Event()
        self._closed = anyio.Event()

    # ------------------------------------------------------------ life

    async def run(self) -> None:
        """Serve until the connection is over; `why` then holds the reason. No action of the peer raises an error here.

        Cancelled: running handlers are cancelled, callers get `connection_lost`, the stream is closed.
        """
        try:
            async with anyio.create_task_group() as self._tasks:
                self._tasks.start_soon(self._write)
                self._tasks.start_soon(self._watch_deadlines)
                if self._slow:
                    self._tasks.start_soon(self._handle_notifications)
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
        """Serve while the body runs, then close in order. An exception of the body passes through unwrapped."""
        failure = None
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.run)
            try:
                yield self
            except Exception as error:  # noqa: BLE001  # raised below, outside the task group that would wrap it
                failure = error
            finally:
                with anyio.move_on_after(2 * self._limits.close, shield=True):
                    await self.aclose()
        if failure is not None:
            raise failure

    def close(self, why: str | HutchError = "closed here") -> None:
        """Begin to close in order and return at once; the first reason stands. Handlers may call it."""
        if not self._closing:
            self._closing = True
            self._why = why
            self._close_requested.set()
            self._to_write.notify()
            self._space.notify()

    async def aclose(self) -> None:
        """Close in order and wait for the end, at most `limits.close` seconds. Not from a handler."""
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
        """The reason for which the connection closes or closed; None while it is open."""
        return self._why

    @property
    def stream(self) -> ByteStream:
        """The stream, for the peer's credentials."""
        return self._stream

    @property
    def backlog(self) -> int:
        """Bytes in the outgoing queue."""
        return self._backlog

    # ------------------------------------------------------------ requests and notifications to the peer

    async def call(self, name: str, params: msgspec.Struct | None = None, timeout: float | None = None) -> Any:
        """Call a method of the peer; return the result as the table types it.

        Raises the peer's HutchError; `timed_out` after `timeout` seconds, time in the queue included; `overloaded`
        when too many calls are in flight; `connection_lost`. Cancelled: the answer is dropped when it arrives.
        """
        if timeout is None:
            outcome = await self._request(name, params)
        else:
            with anyio.move_on_after(timeout) as waited:
                outcome = await self._request(name, params)
            if waited.cancelled_caught:
                raise HutchError(Reason.TIMED_OUT, f"No answer to {name} came within {timeout:g} s.")
        if isinstance(outcome, HutchError):
            raise outcome
        return outcome

    async def _request(self, name: str, params: msgspec.Struct | None) -> Any:
        if self._closing or self._is_full():
            await self._wait_for_room()
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
        """Send a notification. Waits while the queue is full; returns once the frame is queued; `connection_lost`."""
        await self._wait_for_room()
        self._put(self._conversation.notify(name, params))

    async def notify_raw(self, frames: bytes) -> None:
        """Queue encoded notifications, whole lines with their `\\n`. Waits and raises as `notify` does."""
        assert frames.endswith(b"\n")
        await self._wait_for_room()
        self._put(frames)

    # ------------------------------------------------------------ the reader

    async def _read(self) -> None:
        """Read until the peer has closed or a notification could not be handled."""
        while True:
            try:
                chunk = await self._stream.receive()
            except (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError):
                with suppress(HutchError):
                    await self._all_handled()
                return
            frames = self._splitter.feed(chunk)
            now = self._clock()
            self._deadlines.received(now, completed=bool(frames), in_frame=self._splitter.in_frame)
            if not frames:
                continue
            self._deadlines.pause(now)
            for count, frame in enumerate(frames, 1):
                try:
                    await self._receive(frame)
                except HutchError as error:
                    self.close(error)
                    return
                if not count % _TURN:
                    await anyio.lowlevel.checkpoint()
            self._deadlines.resume(self._clock())

    async def _receive(self, frame: bytes | Literal["oversized"]) -> None:
        """Carry out one frame. A HutchError ends the connection."""
        for event in self._conversation.receive(frame):
            if isinstance(event, NotificationReceived):
                await self._receive_notification(event)
                continue
            if self._unhandled or self._rejected:
                await self._all_handled()
            if isinstance(event, ResponseReceived):
                waiter = self._waiters.get(event.id)
                if waiter is not None and not waiter.done():
                    waiter.set_result(event.outcome)
            elif isinstance(event, MessageDropped):
                self._dropped += 1
                _log.log(logging.WARNING if self._dropped == 1 else logging.DEBUG, "dropped: %s", event.why)
            elif not self._closing:
                if self._is_full():
                    await self._wait_for_room()
                if isinstance(event, SendFrame):
                    self._put(event.frame)
                else:
                    self._start_request(event)

    async def _receive_notification(self, notification: NotificationReceived) -> None:
        name = notification.method.name
        if name in self._slow:
            await self._all_handled(_AHEAD - 1)
            self._unhandled.append(notification)
            self._notified.notify()
        elif name in self._serves.listeners:
            if self._unhandled or self._rejected:
                await self._all_handled()
            await self._handle(notification)

    async def _all_handled(self, but: int = 0) -> None:
        """Wait until at most `but` notifications are unhandled; raise the error of one that could not be handled."""
        while len(self._unhandled) > but and self._rejected is None:
            await self._handled.wait()
        if self._rejected is not None:
            raise self._rejected

    async def _handle_notifications(self) -> None:
        """Run the slow notification handlers one at a time; the first HutchError ends the connection."""
        while self._rejected is None:
            while not self._unhandled:
                await self._notified.wait()
            try:
                await self._handle(self._unhandled[0])
            except HutchError as error:
                self._rejected = error
                self.close(error)
            self._unhandled.popleft()
            self._handled.notify()

    async def _handle(self, notification: NotificationReceived) -> None:
        try:
            done = self._serves.listeners[notification.method.name](self._context, notification.params)
            if done is not None:
                await done
        except HutchError:
            raise
        except Exception:  # noqa: BLE001  # a notification has no answer: a bug in its handler ends the connection
            raise internal_error(notification.method.name) from None

    def _start_request(self, received: RequestReceived) -> None:
        request = received.request
        outcome: Any
        if request.method == "ping" and "ping" not in self._serves.requests:
            outcome = Pong()
        else:
            outcome = self._serves.dispatch(request, self._context)
            if isinstance(outcome, Invocation):
                if outcome.name not in self._serves.instant:
                    self._serving += 1
                    self._to_idle_task(received.ticket, outcome)
                    return
                outcome = outcome.at_once()
        frame = self._answer(received.ticket, outcome, request.method)
        if frame is not None:
            self._put(frame)

    def _to_idle_task(self, ticket: Ticket, invocation: Invocation[C]) -> None:
        """Run the request in an idle task, since starting a task costs as much as the rest of a call."""
        while self._idle:
            work = self._idle.pop()
            if not work.done():  # it is done only if its task was cancelled
                work.set_result((ticket, invocation))
                return
        assert self._tasks is not None
        self._tasks.start_soon(self._serve, ticket, invocation)

    async def _serve(self, ticket: Ticket, invocation: Invocation[C]) -> None:
        """Run requests one at a time, until enough other tasks are idle."""
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
                    self._to_write.notify()
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
        ):  # the result has no JSON form: a bug in the handler
            return self._conversation.answer(ticket, internal_error(name))

    # ------------------------------------------------------------ the writer

    def _is_full(self) -> bool:
        return self._backlog >= self._limits.queue_bytes or len(self._queue) >= self._limits.queue_frames

    async def _wait_for_room(self) -> None:
        """Wait until the queue accepts a frame. The caller must queue it before its next await."""
        while not self._closing and self._is_full():
            await self._space.wait()
        if self._closing:
            raise HutchError(Reason.CONNECTION_LOST)

    def _put(self, frame: bytes) -> None:
        if not self._closing:
            self._append(frame)

    def _append(self, frame: bytes) -> None:
        """Queue a whole frame. While the writer is idle, first write as much as the socket takes without waiting."""
        rest: bytes | memoryview = frame
        if self._writer_idle:
            written = self._send_now(frame)
            if written == len(frame):
                return
            rest = memoryview(frame)[written:]
            self._writer_idle = False
            self._to_write.notify()
        self._queue.append(rest)
        self._backlog += len(rest)
        if self._is_full():
            self._deadlines.queue_full(self._clock())
            self._was_full = True

    async def _write(self) -> None:
        """Write the queue in chunks of bounded size, until the connection closes and the queue is empty."""
        try:
            while True:
                while self._queue:
                    chunk = self._cut()
                    await self._stream.send(chunk)
                    self._backlog -= len(chunk)
                    if self._is_full():
                        self._deadlines.queue_full(self._clock())
                    elif self._was_full:
                        self._was_full = False
                        self._deadlines.queue_has_room()
                        self._space.notify()
                if self._closing and not self._serving:
                    await self._stream.send_eof()
                    break
                self._writer_idle = True
                await self._to_write.wait()
                self._writer_idle = False
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            self.close("the other side closed")
            self._abandon()
        self._drained.set()

    def _cut(self) -> bytes:
        """Take the next chunk from the queue: a slice of a large frame, or as many small frames as fit."""
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
        """Drop the queue: the stream is broken."""
        self._queue.clear()
        self._backlog = 0
        self._space.notify()

    # ------------------------------------------------------------ the watchdog

    async def _watch_deadlines(self) -> None:
        """End the connection when a deadline passes, the one for closing included."""
        assert self._tasks is not None
        while not self._closing:
            wait = self._deadlines.next_check(self._clock())
            with anyio.move_on_after(None if isinf(wait) else wait):
                await self._close_requested.wait()
            expired = self._deadlines.expired(self._clock())
            if expired is Expired.QUIET:
                self._ping()
            elif expired is not None and not self._closing:
                self.close(expired.value)
                self._tasks.cancel_scope.cancel()
        await anyio.sleep(self._limits.close)
        self._tasks.cancel_scope.cancel()

    def _ping(self) -> None:
        """Send a ping. A full queue needs none: the deadline for reading covers it."""
        self._deadlines.ping_sent(self._clock())
        self._conversation.forget(self._last_ping)
        if not self._is_full():
            try:
                self._last_ping, frame = self._conversation.call("ping", None)
                self._put(frame)
            except HutchError:
                _log.warning("no ping: too many calls are in flight")

    def __repr__(self) -> str:
        state = f"closing: {self._why}" if self._closing else "open"
        return f"<Peer {state}, serves {self._serving}, calls {len(self._waiters)}, backlog {self._backlog}>"


def _nothing_now(frame: bytes) -> int:
    """Write nothing: without a socket only the writer task writes."""
    return 0
