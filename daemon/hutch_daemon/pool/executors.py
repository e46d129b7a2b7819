"""The executors in memory: `Executor` is one of them, `Roster` holds all that are not gone.

Data that must outlive hutchd is in an executor's row in the store. After an executor was added to the roster, only the
roster changes its state and its session, so that it can be looked up by its session.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

import anyio
import msgspec
import structlog

from hutch_daemon.environments.port import Environment, Killed, Launched
from hutch_daemon.pool.made_of import Composition, MadeOf
from hutch_daemon.pool.states import EXECUTOR, OVER
from hutch_daemon.pool.view import ExecutorKey, ExecutorView
from hutch_daemon.settings import Settings, SettingsInForce
from hutch_daemon.store import executors
from hutch_daemon.store.store import Store
from hutch_shared import messages as m
from hutch_shared.conditions import Conditions
from hutch_shared.errors import HutchError, Reason
from hutch_shared.latch import Latch

__all__ = ["Executor", "ExecutorPeer", "Roster"]

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


class Executor:
    """The state, process and connection of one executor. Only the pool changes it."""

    __slots__ = (
        "abilities",
        "adopted",
        "attached",
        "check",
        "checked",
        "checked_for",
        "connected",
        "detail",
        "disconnected",
        "ended",
        "environment",
        "has_namespace",
        "has_recap",
        "id",
        "idle_since",
        "key",
        "killed",
        "last_seen",
        "launched",
        "launching",
        "made_of",
        "network",
        "peer",
        "prepared",
        "protocol",
        "renew_at",
        "rss",
        "sandbox_failed",
        "session",
        "since",
        "started",
        "state",
        "turn",
        "verified_late",
    )

    def __init__(self, executor: str, key: ExecutorKey, environment: Environment, now: float) -> None:
        self.id = executor
        self.key = key
        self.environment = environment
        self.state: m.ExecutorState = EXECUTOR.start
        self.launched: Launched | None = None
        self.made_of: MadeOf | None = None
        """What it was started with, from its start on; None for one of an earlier version."""
        self.launching = False
        """True until its start has succeeded or its failure is recorded."""
        self.peer: ExecutorPeer | None = None
        self.session: str | None = None
        self.turn: str | None = None
        """The turn that it runs, according to its last hello."""
        self.prepared = False
        self.has_recap = False
        """Whether it was prepared with a recap of all that its agent did not keep of the conversation."""
        self.adopted = False
        self.started = anyio.Event()
        """Set when the environment has started the process or failed. From then on `launched` is set."""
        self.check: anyio.Event | None = None
        """Set at the end of the running check of a quarantined executor; None if none runs."""
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
        """The result of the last attempt to end it."""
        self.has_namespace = False
        """True if its agent runs in a pid namespace, as bubblewrap makes one. False if this is not known."""
        self.network: m.Network | None = None
        """Its agent's network, fixed when its session is prepared. None before, and if an earlier hutchd did it."""
        self.sandbox_failed = False
        """True if its last turn ended since the sandbox of its session could not be made."""
        self.verified_late = False
        """True if it was quarantined and a later check found it gone."""
        self.last_seen = now
        self.since = now
        self.idle_since: float | None = None
        self.checked_for: Settings | None = None
        """The settings under which its session's account and isolation were found to be allowed."""
        self.rss = 0
        self.renew_at = 0
        """The time when half of its token's lifetime is over, in ms on the monotonic clock."""
        self.protocol = m.PROTOCOL
        self.abilities: tuple[str, ...] = ()
        """The abilities of its last hello. An executor of an earlier version may lack some."""
        self.detail = ""

    @property
    def over(self) -> bool:
        """True if it is ending or has ended, and so serves no session any more."""
        return self.state in OVER

    @property
    def explanation(self) -> str:
        """The reason why it is ended, and what is left of it unless it is verified to be gone; no full stop."""
        if self.killed is None or self.killed.verified:
            return self.detail
        return "; ".join(filter(None, (self.detail, self.killed.words())))

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

    @property
    def limits(self) -> m.LimitsApplied | None:
        """Its limits as clients see them; None if the kernel was not asked."""
        return self.made_of.on_wire() if self.made_of is not None else None

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
            detail=self.explanation,
            limits=self.limits,
        )

    def __repr__(self) -> str:
        return f"<Executor {self.id} {self.key} {self.state}{f' {self.session}' if self.session else ''}>"


class Roster:
    """The executors by id, from their start or adoption until they are gone."""

    def __init__(
        self,
        store: Store,
        on_change: Callable[[Executor], None],
        on_notice: Callable[[str, str], None],
        settings: SettingsInForce,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`on_change` and `on_notice` are those of `Pool`."""
        self._store = store
        self._on_change = on_change
        self._conditions = Conditions(logging.getLogger(__name__))
        self._settings = settings
        self.notice = on_notice
        """Reports a notice: its name and a sentence. A later notice of the same name replaces it, an empty one ends it.
        """
        self.clock = clock
        self.changed = Latch()
        """Set when the pool should plan again."""
        self._by_id: dict[str, Executor] = {}
        self._serving: dict[str, Executor] = {}
        self.by_id: Mapping[str, Executor] = self._by_id
        """The executors that are not gone, by id, oldest first."""
        self.serving: Mapping[str, Executor] = self._serving
        """The executor that serves a session now, by session."""
        self.spare_at: dict[ExecutorKey, float] = {}
        """The earliest time when the next spare of a key may be started."""
        self.look_at = math.inf
        """The time of the next plan if nothing changes; infinite while a lease waits, which may need an idle slot."""

    def __repr__(self) -> str:
        return f"<Roster of {len(self._by_id)}>"

    def all(self) -> list[Executor]:
        """Return the executors that are not gone, oldest first, in a list that does not change."""
        return list(self._by_id.values())

    def end_notice(self, name: str) -> None:
        """End a notice whose reason is gone."""
        self.notice(name, "")

    def quarantined(self, session: str) -> list[Executor]:
        """Return the quarantined executors that served a session."""
        return [one for one in self._by_id.values() if one.session == session and one.state == "quarantined"]

    def of_account(self, uid: int) -> list[Executor]:
        """Return the executors of an account."""
        return [one for one in self._by_id.values() if one.key.account.uid == uid]

    def connected(self) -> list[Executor]:
        """Return the executors that are connected and not over, oldest first."""
        return [one for one in self._by_id.values() if one.peer is not None and not one.over]

    def add(self, executor: Executor) -> None:
        """Add an executor, which then occupies a slot."""
        self._by_id[executor.id] = executor

    def remove(self, executor: Executor) -> None:
        """Remove an executor that is gone, which frees its slot."""
        self._by_id.pop(executor.id, None)

    def assign(self, executor: Executor, session: str) -> None:
        """Let an executor serve a session from now on. One that is over only keeps the session's name."""
        executor.session = session
        if not executor.over:
            self._serving[session] = executor

    def move(self, executor: Executor, state: m.ExecutorState) -> None:
        """Change an executor's state. IllegalMoveError for a move that the table does not allow."""
        executor.state = EXECUTOR.move(executor.state, state, executor)
        executor.since = self.clock()
        if executor.over and executor.session is not None and self._serving.get(executor.session) is executor:
            del self._serving[executor.session]

    def report(self, executor: Executor) -> None:
        """Report a change of an executor's state or connection."""
        self._on_change(executor)
        self.changed.notify()

    def idle(self, executor: Executor) -> None:
        """Record that the executor's session has no work. From now on it may be ended to make room for another."""
        if executor.idle_since is None:
            executor.idle_since = self.clock()
            if executor.idle_since + self._settings.current.executors.idle_timeout < self.look_at:
                self.changed.notify()

    def record_heartbeat(self, executor: Executor, heartbeat: m.Heartbeat) -> None:
        """Record a heartbeat."""
        executor.last_seen = self.clock()
        executor.rss = heartbeat.rss_bytes

    def delay_spare(self, key: ExecutorKey, seconds: float) -> None:
        """Start no spare of a key for `seconds`."""
        self.spare_at[key] = max(self.spare_at.get(key, 0.0), self.clock() + seconds)

    def excuse(self, seconds: float) -> None:
        """Extend all executors' deadlines by `seconds` in which hutchd could not receive their messages."""
        for one in self._by_id.values():
            one.last_seen, one.since = one.last_seen + seconds, one.since + seconds

    def view(self, composition: Composition) -> tuple[ExecutorView, ...]:
        """Return the executors for the plan, oldest first."""
        return tuple(_view(one, composition) for one in self._by_id.values())

    async def save(self, executor: Executor, **fields: Any) -> None:
        """Store columns of an executor's row. Failures are only logged: the next hutchd's adoption corrects the row.

        An executor whose start could not be stored has no row, and none is made.
        """
        try:
            await self._store.write(lambda tx: executors.update(tx, executor.id, **fields))
        except HutchError as error:
            if error.reason is not Reason.NOT_FOUND:
                self._conditions.failed("executors' states are not stored", error)
        else:
            self._conditions.end("executors' states are not stored", "executors' states are stored again")


def _is_outdated(one: Executor, composition: Composition) -> bool:
    """Return whether an executor without a session differs from one that would be made now."""
    if one.session is not None or one.over or (one.state == "starting" and one.made_of is None):
        return False
    return one.made_of is None or not one.made_of.matches(composition.of(one.key))


def _view(one: Executor, composition: Composition) -> ExecutorView:
    return ExecutorView(
        id=one.id,
        key=one.key,
        state=one.state,
        session=one.session,
        outdated=_is_outdated(one, composition),
        launching=one.launching,
        last_seen=one.last_seen,
        since=one.since,
        idle_since=one.idle_since,
        rss=one.rss,
        checking=one.check is not None,
        checked=one.checked,
    )
