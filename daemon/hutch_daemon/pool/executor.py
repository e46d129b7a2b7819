"""One executor as the pool knows it in memory; what must outlive hutchd is in its row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import anyio
import msgspec
import structlog

from hutch_daemon.environments.port import Account, Environment, Killed, Launched
from hutch_daemon.pool.states import EXECUTOR
from hutch_shared import messages as m
from hutch_shared.errors import HutchError, Reason

__all__ = ["Executor", "ExecutorKey", "ExecutorPeer"]

_log = structlog.get_logger(__name__)
_TELL_TIMEOUT = 10.0


class ExecutorPeer(Protocol):
    """The connection on which an executor dialled in."""

    async def call(self, name: str, params: msgspec.Struct, timeout: float, /) -> Any:
        """Ask it; the result as the table of methods types it, or `HutchError`."""

    async def notify(self, name: str, params: msgspec.Struct, /) -> None:
        """Tell it."""

    def close(self) -> None:
        """End the connection soon; returns at once."""


@dataclass(frozen=True, slots=True)
class ExecutorKey:
    """What a spare is good for: executors of one account, agent and environment are interchangeable."""

    account: Account
    agent: str
    environment: str

    def __str__(self) -> str:
        return f"{self.agent} as {self.account.name} ({self.environment})"


class Executor:
    """State, process and connection of one executor. The pool alone changes it."""

    __slots__ = (
        "acked",
        "adopted",
        "attached",
        "connected",
        "detail",
        "disconnected",
        "ended",
        "environment",
        "heard",
        "id",
        "idle_since",
        "key",
        "killed",
        "launched",
        "peer",
        "prepared",
        "protocol",
        "renew_at",
        "rss",
        "session",
        "since",
        "started",
        "state",
        "turn",
    )

    def __init__(self, executor: str, key: ExecutorKey, environment: Environment, now: float) -> None:
        self.id = executor
        self.key = key
        self.environment = environment
        self.state: m.ExecutorState = EXECUTOR.start
        self.launched: Launched | None = None
        self.peer: ExecutorPeer | None = None
        self.session: str | None = None
        self.turn: str | None = None
        """The turn that it said, at its latest hello, that it runs."""
        self.prepared = False
        self.adopted = False
        self.started = anyio.Event()
        """Set when its start has come to an end: `launched` is what there is of it."""
        self.connected = anyio.Event()
        """Set at the first hello, or when it ended without one."""
        self.disconnected = anyio.Event()
        """Set when the connection at hand is over and was read to its end; a new one brings a new event."""
        self.attached = 0
        """How often it has said hello; tells two connections apart."""
        self.ended = anyio.Event()
        """Set when it is gone or quarantined; then `killed` says what was found."""
        self.killed: Killed | None = None
        self.heard = now
        self.since = now
        self.idle_since: float | None = None
        self.acked = 0
        self.rss = 0
        self.renew_at = 0
        """Milliseconds awake: when its token has lived half its time."""
        self.protocol = m.PROTOCOL
        self.detail = ""

    def move(self, state: m.ExecutorState, now: float) -> None:
        """Change the state as the table allows."""
        self.state = EXECUTOR.move(self.state, state, self)
        self.since = now

    @property
    def over(self) -> bool:
        """It does nothing for a session any more."""
        return self.state in ("draining", "gone", "quarantined")

    async def call(self, method: str, params: msgspec.Struct, timeout: float) -> Any:
        """Ask it; `connection_lost` when it has no connection."""
        if self.peer is None:
            raise HutchError(Reason.CONNECTION_LOST, "The executor has no connection at the moment.")
        return await self.peer.call(method, params, timeout)

    async def tell_mode(self, session: str, mode: m.PermissionMode) -> None:
        """Tell the agent its mode. What counts is how hutchd judges; one that misses it learns it at its next start."""
        try:
            await self.call("set_permission_mode", m.SetMode(session, mode), _TELL_TIMEOUT)
        except HutchError as error:
            _log.info("an executor was not told its mode", executor=self.id, error=error.message)

    def status(self) -> m.ExecutorStatus:
        """Tell people."""
        return m.ExecutorStatus(
            id=self.id,
            account=self.key.account.name,
            agent=self.key.agent,
            state=self.state,
            pid=self.launched.pid if self.launched is not None else 0,
            session=self.session,
            protocol=self.protocol,
            adopted=self.adopted,
            detail=self.detail,
        )

    def __repr__(self) -> str:
        return f"<Executor {self.id} {self.key} {self.state}{f' {self.session}' if self.session else ''}>"
