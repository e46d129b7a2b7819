"""The rehearsal model: the provider's Messages API on loopback, answered by a script instead of a model.

It answers 401 to a wrong key, keeps every request, and records the clients that hung up before the end. A script that
raises is a bug of the test: it ends the server, and the test with it.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Literal

import anyio
from anyio.abc import SocketAttribute, SocketStream

from tests.rehearsal import stream
from tests.rehearsal.connection import BadRequestError, DroppedError, HungUpError, Inbox, Outlet, reset
from tests.rehearsal.parts import (
    Cut,
    Drop,
    Odd,
    Pause,
    Refuse,
    Replace,
    Reply,
    Request,
    Say,
    Script,
    Stall,
    Think,
    Usage,
    Use,
)

Outcome = Literal["answered", "dropped", "hung up"]
_SIDE_REPLY = Say('{"title": "A rehearsal"}')
_MODELS = {
    "data": [
        {"type": "model", "id": "rehearsal", "display_name": "Rehearsal", "created_at": "2025-01-01T00:00:00Z"},
    ],
    "has_more": False,
    "first_id": "rehearsal",
    "last_id": "rehearsal",
}


class Model:
    """A running server. `script` and `key` may be replaced at any time; the next request uses the new ones."""

    def __init__(self, key: str, script: Script) -> None:
        self.url = ""
        self.key = key
        self.script = script
        self.requests: list[Request] = []
        self.hangups: list[Request] = []
        self._changed = anyio.Event()
        self._run = secrets.token_hex(4)

    def __repr__(self) -> str:
        return f"<Model {self.url}: {len(self.requests)} requests, {len(self.hangups)} hung up>"

    @property
    def turns(self) -> list[Request]:
        """The requests that reached the script: with the right key, in an agent's conversation, no side requests."""
        return [r for r in self.requests if r.asks_agent and r.key == self.key]

    async def until(self, holds: Callable[[Model], bool]) -> None:
        """Wait until `holds(self)` is true. It is called now, and after each request and hang-up."""
        while not holds(self):
            await self._changed.wait()

    def _note(self, record: list[Request], request: Request) -> None:
        record.append(request)
        self._changed.set()
        self._changed = anyio.Event()

    async def talk(self, connection: SocketStream) -> None:
        """Serve one connection until either side ends it."""
        inbox = Inbox(connection)
        async with connection:
            try:
                while await self._exchange(connection, inbox):
                    pass
            except BadRequestError as bad:
                await _refuse(
                    Outlet(connection), Refuse(bad.status, message=bad.message), "malformed", {"connection": "close"}
                )
            except DroppedError:
                await reset(connection)
            except (HungUpError, anyio.BrokenResourceError):
                pass

    async def _exchange(self, connection: SocketStream, inbox: Inbox) -> bool:
        """Answer one request; return whether another may follow."""
        head = await inbox.head()
        if head.headers.get("expect", "").lower() == "100-continue":
            await connection.send(b"HTTP/1.1 100 Continue\r\n\r\n")
        raw = await inbox.body(head)
        port = connection.extra(SocketAttribute.remote_port)
        request = Request(len(self.requests) + 1, head.method, head.target, head.headers, port, raw, _decode(raw))
        self._note(self.requests, request)
        outcome: Outcome = "hung up"

        async def answer() -> None:
            nonlocal outcome
            try:
                await self._answer(connection, request)
                outcome = "answered"
            except DroppedError:
                outcome = "dropped"
            except anyio.BrokenResourceError:
                pass
            group.cancel_scope.cancel()

        async with anyio.create_task_group() as group:
            group.start_soon(answer)
            await inbox.watch()
            group.cancel_scope.cancel()
        if outcome == "dropped":
            raise DroppedError
        if outcome == "hung up":
            self._note(self.hangups, request)
        return outcome == "answered" and head.keeps_alive and not inbox.ended

    async def _answer(self, connection: SocketStream, request: Request) -> None:
        out = Outlet(connection)
        reply_id = f"{self._run}{request.number:06d}"
        path = request.path.partition("?")[0]
        if request.key != self.key:
            await _refuse(out, Refuse(401, message="invalid x-api-key"), reply_id)
            return
        match request.method, path:
            case "POST", "/v1/messages" | "/v1/messages/count_tokens" if not request.messages:
                await _refuse(out, Refuse(400, message="messages: a list of messages is required"), reply_id)
            case "POST", "/v1/messages":
                await _reply(out, request, _SIDE_REPLY if request.is_side else self.script(request), reply_id)
            case "POST", "/v1/messages/count_tokens":
                await _json(out, 200, {"input_tokens": stream.tokens_in(request)}, reply_id)
            case "GET", "/v1/models":
                await _json(out, 200, _MODELS, reply_id)
            case _:
                await _refuse(out, Refuse(404, message=f"{request.method} {path}"), reply_id)


def _decode(raw: bytes) -> Any:
    try:
        return json.loads(raw) if raw else None
    except (ValueError, RecursionError):
        return None


async def _json(out: Outlet, status: int, value: object, reply_id: str, more: dict[str, str] | None = None) -> None:
    body = stream.dumps(value)
    length = {"content-type": "application/json", "content-length": str(len(body))}
    await out.start(status, {**length, "request-id": f"req_{reply_id}", **(more or {})}, chunked=False)
    await out.write(body)
    await out.finish()


async def _refuse(out: Outlet, refusal: Refuse, reply_id: str, more: dict[str, str] | None = None) -> None:
    after = {} if refusal.retry_after is None else {"retry-after": f"{refusal.retry_after:g}"}
    await _json(out, refusal.status, stream.error(refusal, reply_id), reply_id, {**after, **(more or {})})


async def _reply(out: Outlet, request: Request, reply: Reply, reply_id: str) -> None:
    parts = reply if isinstance(reply, Sequence) else (reply,)
    out.drop_after = min(
        (p.after_bytes for p in parts if isinstance(p, Drop) and p.after_bytes is not None), default=None
    )
    streams = bool(request.body.get("stream"))
    content = next((i for i, p in enumerate(parts) if isinstance(p, Say | Think | Use | Odd)), len(parts))
    for part in parts[: content if streams else len(parts)]:
        if isinstance(part, Refuse):
            await _refuse(out, part, reply_id)
            return
        if isinstance(part, Cut | Drop | Pause | Stall):
            await _happen(out, part)
    if not streams:
        await _json(out, 200, stream.whole(request, parts, reply_id), reply_id)
        return
    headers = {"content-type": "text/event-stream", "cache-control": "no-cache", "request-id": f"req_{reply_id}"}
    await out.start(200, headers, chunked=True)
    rest = [p for i, p in enumerate(parts) if i >= content or isinstance(p, Usage | Replace)]
    for item in stream.events(request, rest, reply_id):
        if isinstance(item, bytes):
            await out.write(item)
        else:
            await _happen(out, item)
    await out.finish()


async def _happen(out: Outlet, accident: stream.Accident) -> None:
    """Send everything before the accident, then cause it."""
    await out.flush()
    match accident:
        case Cut(size):
            out.cut = size
        case Drop(None):
            raise DroppedError
        case Drop():
            pass  # the outlet counts the bytes
        case Pause():
            accident.reached.set()
            await accident.release.wait()
        case Stall(None):
            await anyio.sleep_forever()
        case Stall(float() | int() as seconds):
            await anyio.sleep(seconds)


@asynccontextmanager
async def serve(*, key: str, script: Script, port: int = 0) -> AsyncIterator[Model]:
    """Yield a model that listens on 127.0.0.1 at `port` (0: any free one). Its connections end with the block."""
    model = Model(key, script)
    async with await anyio.create_tcp_listener(local_host="127.0.0.1", local_port=port) as listener:
        model.url = f"http://127.0.0.1:{listener.extra(SocketAttribute.local_port)}"
        failure: Exception | None = None
        async with anyio.create_task_group() as group:
            group.start_soon(listener.serve, model.talk)
            try:
                yield model
            except Exception as error:  # noqa: BLE001 -- raised below, so that the test's own failure is in no group
                failure = error
            group.cancel_scope.cancel()
        if failure is not None:
            raise failure
