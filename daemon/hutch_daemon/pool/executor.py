"""One executor in memory. What must outlive hutchd is in its row in the store."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Protocol

import anyio
import msgspec
import structlog

from hutch_daemon.environments.port import Account, Environment, Killed, Launched
from hutch_daemon.pool.states import EXECUTOR
from hutch_shared import messages as m
from hutch_shared.errors import HutchError, Reason

__all__ = ["Executor", "ExecutorKey", "ExecutorPeer"]

_log = structlog.get_logger(__name__)
_MODE_TIMEOUT: Final = 10.0


class ExecutorPeer(Protocol):
    """The connection on which an executor dialled in."""

    async def call(self, name: str, params: msgspec.Struct, timeout: float, /) -> Any:
        """Make a request; return the result, typed as the table of methods says, or raise `HutchError`."""

    async def notify(self, name: str, params: msgspec.Struct, /) -> None:
        """Send a notification."""

    def close(self) -> None:
        """End the connection soon; returns at once."""


@dataclass(frozen=True, slots=True)
class ExecutorKey:
    """Executors of one key are interchangeable: a spare may serve any session of its key."""

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
        "checked",
        "checking",
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
        "launching",
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
        self.launching = False
        """Its start has not come to an end, in an executor or a recorded failure."""
        self.peer: ExecutorPeer | None = None
        self.session: str | None = None
        self.turn: str | None = None
        """The turn that it runs, by its latest hello."""
        self.prepared = False
        self.adopted = False
        self.started = anyio.Event()
        """Set when its environment has started it or failed to: `launched` names what there is of it."""
        self.checking = False
        self.checked = now
        """When the last check for what is left of a quarantined executor ended."""
        self.connected = anyio.Event()
        """Set at the first hello, or when it ended without one."""
        self.disconnected = anyio.Event()
        """Set when its connection is over and was read to its end. A new connection brings a new event."""
        self.attached = 0
        """How often it has said hello: this tells two connections apart."""
        self.ended = anyio.Event()
        """Set when it is gone or quarantined; then `killed` says what was found of it."""
        self.killed: Killed | None = None
        self.heard = now
        self.since = now
        self.idle_since: float | None = None
        self.acked = 0
        self.rss = 0
        self.renew_at = 0
        """When half the lifetime of its token is over, in milliseconds awake."""
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
        """Make a request; `connection_lost` when it has no connection."""
        if self.peer is None:
            raise HutchError(Reason.CONNECTION_LOST, "The executor has no connection at the moment.")
        return await self.peer.call(method, params, timeout)

    async def send_mode(self, session: str, mode: m.PermissionMode) -> None:
        """Send the agent its mode.

        hutchd judges by the mode in any case; an agent that misses it gets it when it starts next.
        """
        try:
            await self.call("set_permission_mode", m.SetMode(session, mode), _MODE_TIMEOUT)
        except HutchError as error:
            _log.info("an executor did not take its mode", executor=self.id, error=error.message)

    def status(self) -> m.ExecutorStatus:
        """Return what clients are shown."""
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
