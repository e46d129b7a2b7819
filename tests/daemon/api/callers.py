"""Clients of every role, on real sockets, with the credentials that the kernel would report."""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

import anyio

from hutch_daemon.api.clients import ClientListener
from hutch_daemon.api.gate import Role
from hutch_shared import messages as m
from hutch_shared.events import TurnEnded, UsageSeen
from hutch_shared.ids import new_id
from hutch_shared.methods import CLIENT, TO_CLIENT
from hutch_shared.processes import Credentials
from hutch_shared.rpc.dispatch import Dispatcher
from hutch_shared.rpc.peer import Peer
from hutch_shared.rpc.stream import SocketStream
from tests.fakes.executors import FakeExecutor
from tests.fakes.stage import WAIT, Stage

__all__ = [
    "BOB",
    "DAEMON",
    "UID",
    "Things",
    "absent",
    "at_work",
    "client_side",
    "dialled",
    "everybody",
    "keep_key",
    "play",
]

DAEMON: Final = 61_000
BOB: Final = 61_009
"""The user whose records are foreign to all other callers."""
UID: Final = {Role.INSIDER: 61_001, Role.ROOT: 0, Role.ADMIN: 61_002, Role.HUTCHD: DAEMON, Role.PERSON: 61_003}
_OWN: Final = os.getpid()


@dataclass(frozen=True)
class Things:
    """The ids of a session, a queued turn, a permission request, a key, and the running turn before the queued one."""

    session: str
    turn: str
    question: str
    key: str
    running: str = ""

    @property
    def ids(self) -> tuple[str, ...]:
        """Return all ids."""
        return tuple(filter(None, (self.session, self.turn, self.question, self.key, self.running)))


def absent() -> Things:
    """Return well-formed ids of records that do not exist."""
    return Things(new_id("session"), new_id("turn"), new_id("permission"), f"key-{new_id('key')[2:10]}")


async def play(executor: FakeExecutor, prompt: m.ExecutePrompt) -> TurnEnded:
    """Answer the prompt `talk`; for any other prompt, request a permission first."""
    if prompt.prompt != "talk":
        await executor.ask(m.ToolCall("c-1", "run_command", "Bash", {"command": "make"}, command="make"))
    return TurnEnded("completed", "done", "Done.", agent_session="conversation-1", usage=UsageSeen(input_tokens=1))


def is_admin(uid: int) -> bool:
    """Return whether the settings name this account as an administrator."""
    return uid in (0, UID[Role.ADMIN])


def client_side(stage: Stage, is_admin: Callable[[int], bool] = is_admin) -> ClientListener:
    """Serve clients of the stage's hutchd, which runs as the account DAEMON."""
    return ClientListener(
        stage.services,
        stage.fanout,
        stage.in_force,
        is_admin=is_admin,
        insider_of=lambda _: None,
        daemon_uid=DAEMON,
    )


@asynccontextmanager
async def dialled(side: ClientListener, uid: int, *, insider: str | None = None) -> AsyncIterator[Peer[None]]:
    """Connect as an account, or as a process of the executor `insider`."""
    ours, theirs = socket.socketpair()
    if insider is not None:
        side = replace(side, insider_of=lambda _: insider, connections=set())
    peer = Peer(SocketStream(theirs), serves=Dispatcher(TO_CLIENT), sends=CLIENT, context=None)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(side.run, SocketStream(ours), Credentials(uid, uid, _OWN))
        async with peer.serving():
            yield peer
        tasks.cancel_scope.cancel()


@asynccontextmanager
async def everybody(side: ClientListener) -> AsyncIterator[tuple[dict[Role, Peer[None]], dict[Role, Peer[None]]]]:
    """Connect once in each role; yield each connection with the user whose records that role owns."""
    async with AsyncExitStack() as stack:
        people = {role: await stack.enter_async_context(dialled(side, uid)) for role, uid in UID.items()}
        inside = await stack.enter_async_context(dialled(side, UID[Role.INSIDER], insider="x-0000000000000000"))
        yield {**people, Role.INSIDER: inside}, people


async def keep_key(owner: Peer[None]) -> str:
    """Store a key of the caller; return its name."""
    name = f"key-{new_id('key')[2:10]}"
    await owner.call("put_api_key", m.PutApiKey("anthropic", f"sk-ant-api03-{name}-{name}-{name}", name))
    return name


async def at_work(owner: Peer[None], state: m.SessionState = "open") -> Things:
    """Open a session with an ended turn, a permission request and a queued turn; or close it after that."""
    opened: m.Session = await owner.call("open_session", m.OpenSession("claude", f"/project/{new_id('session')}"))
    talked: m.Turn = await owner.call("submit_prompt", m.SubmitPrompt(opened.id, "talk"))

    async def over() -> bool:
        turn: m.Turn = await owner.call("get_turn", m.TurnRef(talked.id))
        return turn.ended_at is not None

    await _until(over)
    running: m.Turn = await owner.call("submit_prompt", m.SubmitPrompt(opened.id, "ask"))
    asked: Sequence[Any] = ()

    async def waits() -> bool:
        nonlocal asked
        asked = (await owner.call("list_permissions", m.ListPermissions(opened.id))).permissions
        return bool(asked)

    await _until(waits)
    queued: m.Turn = await owner.call("submit_prompt", m.SubmitPrompt(opened.id, "later"))
    if state == "closed":
        await owner.call("close_session", m.CloseSession(opened.id, force=True))
    key = await keep_key(owner)
    await owner.call("use_api_key", m.UseApiKey("anthropic", key))
    return Things(opened.id, queued.id, asked[0].id, key, running.id)


async def _until(what: Callable[[], Awaitable[bool]]) -> None:
    """Wait for a condition, polling slowly because many tests wait at once."""
    with anyio.fail_after(WAIT):
        while not await what():
            await anyio.sleep(0.05)
