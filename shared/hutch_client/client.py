"""The Python API: `async with HutchClient.connect() as hutch: …`, on anyio.

Theory. Calls share one connection; each follow has one of its own, so that a consumer that is slow with events stops
only its own stream, and what a lost connection means is decided in one place each: a call that may be made twice (it
only reads, or carries an idempotency key) is made again on a new connection; a follow dials again with its cursor.
Both give up after `redial_for` seconds without a connection.

What is always true: nothing is said to a server whose uid was not checked; a follow gives each event once, in order.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, Self, TypeVar

import anyio
import msgspec
from anyio.abc import TaskGroup, TaskStatus
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from hutch_client.endpoint import dial, socket_path
from hutch_shared import __version__
from hutch_shared import messages as m
from hutch_shared.errors import HutchError, Reason
from hutch_shared.events import Event
from hutch_shared.ids import new_token
from hutch_shared.methods import CLIENT, TO_CLIENT
from hutch_shared.rpc.dispatch import Handler
from hutch_shared.rpc.peer import Peer, PeerLimits
from hutch_shared.rpc.stream import SocketStream
from hutch_shared.secret import Secret

__all__ = ["Follow", "HutchClient"]

C = TypeVar("C")

logging.getLogger("hutch_shared").addHandler(logging.NullHandler())
"""What the wire logs is for programs that set logging up, not for the terminal of whoever did not."""

_LIMITS: Final = PeerLimits(frame=64 << 20)
_GREETING: Final = 10.0
_BUFFER: Final = 256
_WAITS: Final = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
_GONE: Final = (Reason.CONNECTION_LOST, Reason.SHUTTING_DOWN)


class HutchClient:
    """Calls hutchd. Made by `connect`; its methods raise what hutchd answered as HutchError."""

    def __init__(self, path: Path, tasks: TaskGroup, redial_for: float) -> None:
        """Use `connect`."""
        self.refusal: HutchError | None = None
        """Why the call that is under way was refused so far and is made again; None while nothing is."""
        self._path = path
        self._tasks = tasks
        self._redial_for = redial_for
        self._peer: Peer[None] | None = None
        self._dialing = anyio.Lock()

    @classmethod
    @asynccontextmanager
    async def connect(cls, path: Path | None = None, *, redial_for: float = 60.0) -> AsyncIterator[Self]:
        """Connect to `path` (default: where the settings say) for the length of the body.

        Raises HutchError: CONNECTION_LOST when nobody answers, NOT_ALLOWED when a stranger does, PROTOCOL_MISMATCH.
        """
        async with _background() as tasks:
            client = cls(path or socket_path(), tasks, redial_for)
            await client._connected()
            yield client

    async def call(self, name: str, params: msgspec.Struct | None = None, timeout: float | None = None) -> Any:
        """Make any call of `methods.CLIENT`; the result is typed by that table.

        Raises TIMED_OUT after `timeout` seconds. Cancelled: the answer is dropped, what it asked for may still happen.
        """
        twice = not CLIENT[name].changes or getattr(params, "idempotency_key", None) is not None
        redial = _Redial(self._redial_for)
        while True:
            try:
                peer = await self._connected()
                answer = await peer.call(name, params, timeout)
                self.refusal = None
                return answer
            except HutchError as error:
                self.refusal = error
                if error.reason not in _GONE or not twice or not await redial.wait():
                    raise

    async def get_status(self) -> m.Status:
        """Return the health of hutchd."""
        status: m.Status = await self.call("get_status")
        return status

    async def open_session(self, params: m.OpenSession) -> m.Session:
        """Open a session. Safe over a lost connection: a key is made up where none is given."""
        session: m.Session = await self.call("open_session", _with_key(params))
        return session

    async def submit_prompt(self, session: str, prompt: str, *, timeout: float | None = None) -> m.Turn:
        """Queue a prompt: it is durable on return. `timeout` bounds the turn, in seconds."""
        turn: m.Turn = await self.call("submit_prompt", _with_key(m.SubmitPrompt(session, prompt, timeout=timeout)))
        return turn

    async def list_sessions(self, params: m.ListSessions | None = None) -> tuple[m.Session, ...]:
        """Return sessions, newest first."""
        found: m.Sessions = await self.call("list_sessions", params)
        return found.sessions

    async def get_session(self, ref: str) -> m.Session:
        """Return a session by id, beginning of an id, or name."""
        session: m.Session = await self.call("get_session", m.SessionRef(ref))
        return session

    async def list_turns(self, session: str) -> tuple[m.Turn, ...]:
        """Return the session's turns, oldest first; of many the newest."""
        found: m.Turns = await self.call("list_turns", m.ListTurns(session))
        return found.turns

    async def get_turn(self, turn: str) -> m.Turn:
        """Return one turn."""
        record: m.Turn = await self.call("get_turn", m.TurnRef(turn))
        return record

    async def list_permissions(self, params: m.ListPermissions | None = None) -> tuple[m.Permission, ...]:
        """Return questions, by default those that wait, oldest first; in as many calls as it takes."""
        asked = params or m.ListPermissions()
        found: list[m.Permission] = []
        page: m.Permissions = await self.call("list_permissions", asked)
        found += page.permissions
        while page.more and page.permissions and len(found) < asked.limit:
            rest = msgspec.structs.replace(asked, after=found[-1].id, limit=asked.limit - len(found))
            page = await self.call("list_permissions", rest)
            found += page.permissions
        return tuple(found)

    async def answer_permission(self, params: m.AnswerPermission) -> m.Permission:
        """Decide. Raises ALREADY_SETTLED, with what stands, when somebody was first."""
        settled: m.Permission = await self.call("answer_permission", params)
        return settled

    async def interrupt_turn(self, session: str, turn: str | None = None) -> m.Turn:
        """Stop the running turn; nothing of it starts after the return."""
        record: m.Turn = await self.call("interrupt_turn", m.InterruptTurn(session, turn))
        return record

    async def close_session(self, session: str, *, force: bool = False) -> m.Session:
        """Close it; `force` also when a turn is running."""
        closed: m.Session = await self.call("close_session", m.CloseSession(session, force))
        return closed

    async def put_api_key(self, provider: str, secret: Secret, name: str = "default") -> m.ApiKey:
        """Store a key."""
        stored: m.ApiKey = await self.call("put_api_key", m.PutApiKey(provider, secret.reveal(), name))
        return stored

    @asynccontextmanager
    async def follow(
        self, params: m.FollowEvents, on_line: Callable[[bool], None] | None = None
    ) -> AsyncIterator[Follow]:
        """Follow a session's events (or `"*"`: all) while the body runs. Raises what refuses the follow.

        `on_line` is told when hutchd is found to be away (False), and when it is back.
        At most 256 events wait for the body; when it is slower than that, hutchd keeps the rest.
        """
        async with _background() as tasks:
            send, receive = anyio.create_memory_object_stream[Event](_BUFFER)
            async with receive:
                follow = Follow(self, params, receive, on_line or (lambda _: None))
                await tasks.start(follow._pump, send, self._redial_for)  # noqa: SLF001 - one thing in two classes
                yield follow

    async def _connected(self) -> Peer[None]:
        async with self._dialing:
            if self._peer is None or self._peer.why is not None:
                self._peer = await self._tasks.start(self._keep_line)
            return self._peer

    async def _keep_line(self, *, task_status: TaskStatus[Peer[None]]) -> None:
        async with self._line(None, {}) as peer:
            task_status.started(peer)
            await peer.wait_closed()

    @asynccontextmanager
    async def _line(self, context: C, handlers: dict[str, Handler[C]]) -> AsyncIterator[Peer[C]]:
        """Keep a connection that was checked and greeted while the body runs."""
        sock = await anyio.to_thread.run_sync(dial, self._path)
        peer = Peer(
            SocketStream(sock), takes=TO_CLIENT, sends=CLIENT, context=context, handlers=handlers, limits=_LIMITS
        )
        async with peer.serving():
            await peer.call("get_version", m.VersionParams(client=f"hutch {__version__}"), _GREETING)
            yield peer


class Follow:
    """Events in order, each once, over as many connections as it takes: `async for event in follow`.

    It ends when the session is removed; it raises JOURNAL_REPLACED, COMPACTED or CONNECTION_LOST where it cannot go on.
    `journal` and `head` are those of the last connection; `after` is the cursor to come back with.
    """

    def __init__(
        self,
        client: HutchClient,
        params: m.FollowEvents,
        received: MemoryObjectReceiveStream[Event],
        on_line: Callable[[bool], None],
    ) -> None:
        """Use `HutchClient.follow`."""
        self.journal = params.journal
        self.head = 0
        self.after = params.after
        self._client = client
        self._params = params
        self._received = received
        self._on_line = on_line
        self._is_away = False
        self._send: MemoryObjectSendStream[Event]
        self._peer: Peer[Follow] | None = None
        self._failure: HutchError | None = None
        self._over = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        try:
            try:
                event = self._received.receive_nowait()  # to give up the turn for each would cost more than the event
            except anyio.WouldBlock:
                event = await self._received.receive()
        except anyio.EndOfStream:
            raise self._failure or StopAsyncIteration from None
        self.after = self._place(event)
        return event

    def __repr__(self) -> str:
        return f"<Follow {self._params.session} after {self.after} of {self.journal}>"

    async def _pump(
        self, send: MemoryObjectSendStream[Event], redial_for: float, *, task_status: TaskStatus[None]
    ) -> None:
        """Bring events in until there are no more; dial again when the connection is lost."""
        begun = False
        redial = _Redial(redial_for)
        self._send = send
        self._got = self.after
        with send:
            while not self._over:
                try:
                    async with self._client._line(self, _HEARD) as self._peer:  # noqa: SLF001 - one thing in two classes
                        asked = msgspec.structs.replace(self._params, after=self._got, journal=self.journal)
                        following: m.Following = await self._peer.call("follow_events", asked, _GREETING)
                        self.journal, self.head = following.journal, following.head
                        if self._got < 0:
                            self._got = self.after = following.head
                        if not begun:
                            begun = True
                            task_status.started()
                        redial = _Redial(redial_for)
                        self._line_is(away=False)
                        await self._peer.wait_closed()
                except HutchError as error:
                    if not begun:
                        raise
                    if error.reason not in (*_GONE, Reason.STORE_UNAVAILABLE):
                        self._failure = error
                        return
                    self._line_is(away=True)
                if not self._over and not await redial.wait():
                    self._failure = HutchError(
                        Reason.CONNECTION_LOST, "hutchd went away and did not come back in time."
                    )
                    return

    def _line_is(self, *, away: bool) -> None:
        if away != self._is_away:
            self._is_away = away
            self._on_line(not away)

    async def _on_event(self, event: Event) -> None:
        place = self._place(event)
        if self._got < 0 or place > self._got:
            self._got = place
            try:
                self._send.send_nowait(event)
            except anyio.WouldBlock:
                await self._send.send(event)

    def _on_ended(self, ended: m.FollowEnded) -> None:
        assert self._peer is not None
        self._over = ended.reason == "session_removed"
        self._peer.close(ended.message)

    def _place(self, event: Event) -> int:
        return event.position if self._params.session == "*" else event.seq


_HEARD: Final[dict[str, Handler[Follow]]] = {"event": Follow._on_event, "follow_ended": Follow._on_ended}  # noqa: SLF001


class _Redial:
    """How long to go on dialling: waits that grow, until they have taken too long together."""

    def __init__(self, redial_for: float) -> None:
        self._deadline: float | None = None
        self._redial_for = redial_for
        self._waits = iter(_WAITS)

    async def wait(self) -> bool:
        """Wait a while and return True, or False when it is time to give up."""
        now = anyio.current_time()
        if self._deadline is None:
            self._deadline = now + self._redial_for
        if now >= self._deadline:
            return False
        await anyio.sleep(min(next(self._waits, _WAITS[-1]), self._deadline - now))
        return True


P = TypeVar("P", m.OpenSession, m.SubmitPrompt)


def _with_key(params: P) -> P:
    return params if params.idempotency_key else msgspec.structs.replace(params, idempotency_key=new_token())


@asynccontextmanager
async def _background() -> AsyncIterator[TaskGroup]:
    """A task group that ends with its body; what the body raises comes out as it is, not in a group."""
    failure = None
    async with anyio.create_task_group() as tasks:
        try:
            yield tasks
        except Exception as error:  # noqa: BLE001 - raised again below
            failure = error
        tasks.cancel_scope.cancel()
    if failure is not None:
        raise failure
