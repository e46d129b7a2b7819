"""One executor in memory. The data that must outlive hutchd is in its row in the store."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Protocol

import anyio
import msgspec
import structlog

from hutch_daemon.environments.port import Account, Environment, Killed, Launched
from hutch_daemon.pool.states import EXECUTOR
from hutch_daemon.settings import Settings
from hutch_shared import messages as m
from hutch_shared.errors import HutchError, Reason

__all__ = ["Executor", "ExecutorKey", "ExecutorPeer"]

_log = structlog.get_logger(__name__)
_MODE_TIMEOUT: Final = 10.0


class ExecutorPeer(Protocol):
    """The connection on which an executor dialled in."""

    async def call(self, name: str, params: msgspec.Struct, timeout: float, /) -> Any:
        """Call a method; return its result, of the type in the table of methods. Raises HutchError."""

    async def notify(self, name: str, params: msgspec.Struct, /) -> None:
        """Send a notification."""

    def close(self) -> None:
        """Close the connection soon. Returns at once."""


@dataclass(frozen=True, slots=True)
class ExecutorKey:
    """The properties that an executor needs to serve a session. A spare may serve any session of its key."""

    account: Account
    agent: str
    environment: str

    def __str__(self) -> str:
        return f"{self.agent} as {self.account.name} ({self.environment})"


class Executor:
    """The state, process and connection of one executor. Only the pool changes it."""

    __slots__ = (
        "adopted",
        "attached",
        "checked",
        "checked_for",
        "checking",
        "connected",
        "detail",
        "disconnected",
        "ended",
        "environment",
        "id",
        "idle_since",
        "key",
        "killed",
        "last_seen",
        "launched",
        "launching",
        "over",
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
        self.over = False
        """True if it is ending or has ended, and so serves no session any more."""
        self.launched: Launched | None = None
        self.launching = False
        """True until its start has succeeded or its failure is recorded."""
        self.peer: ExecutorPeer | None = None
        self.session: str | None = None
        self.turn: str | None = None
        """The turn that it runs, according to its last hello."""
        self.prepared = False
        self.adopted = False
        self.started = anyio.Event()
        """Set when the environment has started the process or failed. From then on `launched` is set."""
        self.checking = False
        """True while a check of a quarantined executor runs."""
        self.checked = now
        """The time when the last check of a quarantined executor ended."""
        self.connected = anyio.Event()
        """Set at the first hello, or when the executor ended without one."""
        self.disconnected = anyio.Event()
        """Set when its connection has ended and all its data was read. A new connection replaces the event."""
        self.attached = 0
        """The number of its hellos, which identifies a connection."""
        self.ended = anyio.Event()
        """Set when it is gone or quarantined. From then on `killed` is set."""
        self.killed: Killed | None = None
        self.last_seen = now
        self.since = now
        self.idle_since: float | None = None
        self.checked_for: Settings | None = None
        """The settings under which its session's account and isolation were found to be allowed."""
        self.rss = 0
        self.renew_at = 0
        """The time when half of its token's lifetime is over, in ms on the monotonic clock."""
        self.protocol = m.PROTOCOL
        self.detail = ""

    def move(self, state: m.ExecutorState, now: float) -> None:
        """Change the state. Raises IllegalMoveError for a move that the table does not allow."""
        self.state = EXECUTOR.move(self.state, state, self)
        self.since = now
        self.over = state in ("draining", "gone", "quarantined")

    async def call(self, method: str, params: msgspec.Struct, timeout: float) -> Any:
        """Call a method of the executor; `connection_lost` if it has no connection."""
        if self.peer is None:
            raise HutchError(Reason.CONNECTION_LOST, "The executor has no connection at the moment.")
        return await self.peer.call(method, params, timeout)

    async def send_mode(self, session: str, mode: m.PermissionMode) -> None:
        """Send the agent its permission mode. Failures are only logged.

        hutchd judges by the mode in any case. An agent that misses the message gets the mode at its next start.
        """
        try:
            await self.call("set_permission_mode", m.SetMode(session, mode), _MODE_TIMEOUT)
        except HutchError as error:
            _log.info("an executor did not take its mode", executor=self.id, error=error.message)

    def status(self) -> m.ExecutorStatus:
        """Return the executor as clients see it."""
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
