"""The Python API: `async with HutchClient.connect() as hutch: …`, on anyio.

Theory. All calls share one connection; each follow has a connection of its own (`follow`). If the connection is lost,
the client repeats a call on a new connection if that is harmless (the call only reads, or has an idempotency key). The
call fails after `redial_for` seconds without a connection.

What is always true: the client checks the server's uid before it sends anything; a follow yields each event once, in
order.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, Self, TypeVar

import anyio
import msgspec
from anyio.abc import TaskGroup, TaskStatus

from hutch_client.connection import GONE, Redial, background_tasks, connected_peer
from hutch_client.endpoint import socket_path
from hutch_client.follow import Follow
from hutch_shared import messages as m
from hutch_shared.errors import HutchError, Reason
from hutch_shared.events import Event
from hutch_shared.ids import new_token
from hutch_shared.methods import CLIENT
from hutch_shared.rpc.peer import Peer
from hutch_shared.secret import Secret

__all__ = ["Follow", "HutchClient"]

_BUFFER: Final = 256


class HutchClient:
    """Calls hutchd. Created by `connect`. Its methods raise hutchd's errors as HutchError."""

    def __init__(self, path: Path, tasks: TaskGroup, redial_for: float) -> None:
        """Use `connect`."""
        self.refusal: HutchError | None = None
        """The error for which the current call is being repeated; None if it is not."""
        self._path = path
        self._tasks = tasks
        self._redial_for = redial_for
        self._peer: Peer[None] | None = None
        self._dialing = anyio.Lock()

    @classmethod
    @asynccontextmanager
    async def connect(cls, path: Path | None = None, *, redial_for: float = 60.0) -> AsyncIterator[Self]:
        """Connect to `path` (default: `endpoint.socket_path()`) while the body runs.

        Raises HutchError: CONNECTION_LOST if nothing answers, NOT_ALLOWED for a server of an untrusted uid,
        PROTOCOL_MISMATCH.
        """
        async with background_tasks() as tasks:
            client = cls(path or socket_path(), tasks, redial_for)
            await client._connected()
            yield client

    async def call(self, name: str, params: msgspec.Struct | None = None, timeout: float | None = None) -> Any:
        """Make any call of `methods.CLIENT`; that table gives the type of the result.

        Raises TIMED_OUT after `timeout` seconds, and INVALID_PARAMS for text that has no UTF-8 form. On cancel the
        answer is dropped; hutchd may still do the work.
        """
        twice = not CLIENT[name].changes or getattr(params, "idempotency_key", None) is not None
        redial = Redial(self._redial_for)
        while True:
            try:
                peer = await self._connected()
                answer = await peer.call(name, params, timeout)
                self.refusal = None
                return answer
            except UnicodeEncodeError:
                raise HutchError(Reason.INVALID_PARAMS, "A text to send has characters without a UTF-8 form.") from None
            except HutchError as error:
                self.refusal = error
                if error.reason not in GONE or not twice or not await redial.wait():
                    raise

    async def get_status(self) -> m.Status:
        """Return the health of hutchd."""
        status: m.Status = await self.call("get_status")
        return status

    async def open_session(self, params: m.OpenSession) -> m.Session:
        """Open a session. An idempotency key is added if there is none, so that the call may be repeated."""
        session: m.Session = await self.call("open_session", _with_key(params))
        return session

    async def submit_prompt(self, session: str, prompt: str, *, timeout: float | None = None) -> m.Turn:
        """Queue a prompt; on return it is durable. `timeout` limits the turn, in seconds."""
        turn: m.Turn = await self.call("submit_prompt", _with_key(m.SubmitPrompt(session, prompt, timeout=timeout)))
        return turn

    async def compact_session(self, session: str, words: str = "", *, timeout: float | None = None) -> m.Turn:
        """Queue a turn that replaces the conversation by a summary, which keeps what `words` say. Durable on return."""
        turn: m.Turn = await self.call("compact_session", _with_key(m.CompactSession(session, words, timeout=timeout)))
        return turn

    async def clear_session(self, session: str) -> m.Turn:
        """Queue a turn that begins an empty conversation; on return it is durable."""
        turn: m.Turn = await self.call("clear_session", _with_key(m.ClearSession(session)))
        return turn

    async def list_sessions(self, params: m.ListSessions | None = None) -> tuple[m.Session, ...]:
        """Return sessions, newest first."""
        found: m.Sessions = await self.call("list_sessions", params)
        return found.sessions

    async def get_session(self, ref: str) -> m.Session:
        """Return a session by its id, an unambiguous prefix of the id, or its name."""
        session: m.Session = await self.call("get_session", m.SessionRef(ref))
        return session

    async def list_turns(self, session: str) -> tuple[m.Turn, ...]:
        """Return the session's turns, oldest first. If there are too many for one answer, the oldest are missing."""
        found: m.Turns = await self.call("list_turns", m.ListTurns(session))
        return found.turns

    async def get_turn(self, turn: str) -> m.Turn:
        """Return one turn."""
        record: m.Turn = await self.call("get_turn", m.TurnRef(turn))
        return record

    async def list_permissions(self, params: m.ListPermissions | None = None) -> tuple[m.Permission, ...]:
        """Return permission requests, oldest first, by default the pending ones. Makes several calls if needed."""
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
        """Decide a permission request. Raises ALREADY_SETTLED, with the decision that stands, if another came first."""
        settled: m.Permission = await self.call("answer_permission", params)
        return settled

    async def interrupt_turn(self, session: str, turn: str | None = None) -> m.Turn:
        """Stop the running turn. After the return the turn starts nothing more."""
        record: m.Turn = await self.call("interrupt_turn", m.InterruptTurn(session, turn))
        return record

    async def close_session(self, session: str, *, force: bool = False) -> m.Session:
        """Close a session; with `force` also while a turn runs."""
        closed: m.Session = await self.call("close_session", m.CloseSession(session, force))
        return closed

    async def put_api_key(self, provider: str, secret: Secret, name: str = "default") -> m.ApiKey:
        """Store a key."""
        stored: m.ApiKey = await self.call("put_api_key", m.PutApiKey(provider, secret.reveal(), name))
        return stored

    @asynccontextmanager
    async def follow(
        self, params: m.FollowEvents, on_connection: Callable[[bool], None] | None = None
    ) -> AsyncIterator[Follow]:
        """Follow a session's events (or `"*"`: all sessions') while the body runs. Raises HutchError if hutchd refuses.

        `on_connection(False)` is called when the connection is lost, `on_connection(True)` when it is back.
        Up to 256 events are buffered for the body; when the buffer is full, hutchd keeps the rest.
        """
        async with background_tasks() as tasks:
            send, receive = anyio.create_memory_object_stream[Event](_BUFFER)
            async with receive:
                follow = Follow(self._path, params, receive, on_connection or (lambda _: None))
                await tasks.start(follow.receive_events, send, self._redial_for)
                yield follow

    async def _connected(self) -> Peer[None]:
        async with self._dialing:
            if self._peer is None or self._peer.why is not None:
                self._peer = await self._tasks.start(self._keep_connection)
            return self._peer

    async def _keep_connection(self, *, task_status: TaskStatus[Peer[None]]) -> None:
        async with connected_peer(self._path, None, {}) as peer:
            task_status.started(peer)
            await peer.wait_closed()


P = TypeVar("P", m.OpenSession, m.SubmitPrompt, m.CompactSession, m.ClearSession)


def _with_key(params: P) -> P:
    return params if params.idempotency_key else msgspec.structs.replace(params, idempotency_key=new_token())
