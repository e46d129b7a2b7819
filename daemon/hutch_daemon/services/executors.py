"""What executors ask and report. Each call comes on a connection that said hello, and is checked against its lease."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import anyio
import structlog

from hutch_daemon.keys.lease_book import LeaseHolder
from hutch_daemon.permissions.approvals import Approvals
from hutch_daemon.pool import tokens
from hutch_daemon.pool.executor import Executor, ExecutorPeer
from hutch_daemon.services.masking import Masking
from hutch_daemon.services.parts import Parts, awake_ms
from hutch_daemon.services.reports import Reports
from hutch_daemon.store import executors, sessions, turns
from hutch_daemon.store.records import Executes
from hutch_daemon.store.rows import ExecutorRow, SessionRow
from hutch_daemon.store.tx import Tx
from hutch_shared import messages as m
from hutch_shared.digest import input_digest
from hutch_shared.errors import HutchError, Reason
from hutch_shared.failpoints import failpoint
from hutch_shared.unix import Credentials

__all__ = ["ExecutorSide"]

_log = structlog.get_logger(__name__)

_RESOLVE_TIMEOUT = 10.0
_START_SETTLES = 5.0
"""Seconds for a start to be noted whose executor says hello already."""


@dataclass(frozen=True, slots=True)
class _Requester:
    """An executor as the approvals see it."""

    executor: Executor
    parts: Parts

    @property
    def id(self) -> str:
        return self.executor.id

    async def real_paths(self, session: str, paths: tuple[str, ...]) -> Mapping[str, str]:
        """Ask the executor; what it cannot tell is missing, and judged as such."""
        try:
            found: m.ResolvedPaths = await self.executor.call(
                "resolve_paths", m.ResolvePaths(session, paths), _RESOLVE_TIMEOUT
            )
        except HutchError as error:
            _log.warning("paths are not resolved", executor=self.executor.id, error=error.message)
            return {}
        return found.real

    async def notify_somebody(self, question: m.Permission) -> m.Notified:
        """Have the notify command run as the account."""
        settings = self.parts.settings().permissions
        names = settings.notify_env
        values = {name: os.environ[name] for name in names if name in os.environ}
        run = m.RunNotify(settings.notify, question, settings.notify_timeout, names, values)
        told: m.Notified = await self.executor.call("run_notify", run, settings.notify_timeout + 5.0)
        return told


class ExecutorSide:
    """The methods of the executor socket."""

    def __init__(self, parts: Parts, approvals: Approvals, reports: Reports, masking: Masking) -> None:
        self._parts = parts
        self._masking = masking
        self._approvals = approvals
        self._reports = reports

    async def hello(self, peer: ExecutorPeer, credentials: Credentials, params: m.Hello) -> tuple[Executor, m.Welcome]:
        """Admit an executor by its token, its account and its process, and take its connection.

        `protocol_mismatch`, `token_unknown`, `token_expired`, `not_allowed` (another process shows the token),
        `lease_lost` (another executor serves the session now). While nothing can be stored, one that serves a session
        is let in without its use being counted: it must be reached by an interrupt.
        """
        if not m.PROTOCOL - 1 <= params.protocol <= m.PROTOCOL:
            raise HutchError(
                Reason.PROTOCOL_MISMATCH, f"hutchd speaks the executor protocol {m.PROTOCOL} and the one before."
            )
        hashed = tokens.hash_of(params.token)
        row = await self._parts.store.read(lambda conn: executors.by_token_hash(conn, hashed))
        executor = self._parts.pool.get(row.id) if row is not None else None
        if row is None or executor is None or row.id != params.executor:
            raise HutchError(Reason.TOKEN_UNKNOWN)
        await self._process_known(executor)
        launched = executor.launched
        if launched is None or (credentials.uid, credentials.pid) != (row.uid, launched.pid):
            raise HutchError(Reason.NOT_ALLOWED, "The token belongs to another process.")
        if params.session is not None and params.session != row.session:
            raise HutchError(Reason.LEASE_LOST)
        failpoint("hello.admit")
        try:
            admitted, turn = await self._parts.store.write(lambda tx: self._use_token(tx, executor.id))
        except HutchError as error:
            if error.reason is not Reason.STORE_UNAVAILABLE or row.session is None:
                raise
            admitted, turn = await self._parts.store.read(lambda conn: self._admit(conn, executor.id))
        executor.acked = admitted.acked_n
        executor.renew_at = admitted.token_until - tokens.LIFETIME // 2
        await self._parts.pool.attach(executor, peer, params)
        failpoint("hello.welcome")
        return executor, m.Welcome(acked=admitted.acked_n, daemon_epoch=self._parts.store.epoch, turn=turn)

    def _use_token(self, tx: Tx, executor: str) -> tuple[ExecutorRow, str | None]:
        row, turn = self._admit(tx, executor)
        until = tokens.renewed(row, awake_ms())
        row = executors.update(
            tx, row.id, token_uses=row.token_uses + 1, token_until=until if until is not None else row.token_until
        )
        return row, turn

    def _admit(self, on: Executes, executor: str) -> tuple[ExecutorRow, str | None]:
        """Check the token once more where it is used; return the row, and the turn that hutchd believes it runs."""
        row = executors.get(on, executor)
        assert row is not None, "its row was found by its token"
        tokens.admit(row, awake_ms(), self._parts.boot_id, proven=row.session is not None)
        active = turns.active(on, row.session) if row.session is not None else None
        return row, active.id if active is not None and active.executor == row.id else None

    async def _process_known(self, executor: Executor) -> None:
        """An executor may be quicker than the note of its start."""
        with anyio.move_on_after(_START_SETTLES):
            await executor.started.wait()

    def gone(self, executor: Executor, peer: ExecutorPeer) -> None:
        """Note that a connection is over; everything that came on it was taken."""
        self._parts.pool.detach(executor, peer)

    async def report_message(self, executor: Executor, params: m.ReportMessage) -> None:
        """Store a batch of events and acknowledge it."""
        failpoint("report.came")
        acked = await self._reports.take(executor, params)
        failpoint("report.ack")
        if executor.peer is not None:
            await executor.peer.notify("ack_events", m.AckEvents(acked))

    async def request_permission(self, executor: Executor, params: m.RequestPermission) -> m.PermissionDecision:
        """Put one call to the approvals; one of a turn that does not run is denied, and one that holds a stored key."""
        session = await self._session(executor, params.session)
        if (found := self._masking.in_call(params)) is not None:
            await self._parts.store.write(lambda tx: self._masking.record(tx, session.id, [found]))
            return m.PermissionDecision(
                "deny",
                "denied",
                params.call.input,
                input_digest(params.call.agent_tool, params.call.input),
                "The call holds a stored key. A command needs none: the model is reached without it.",
            )
        return await self._approvals.ask(session, _Requester(executor, self._parts), params)

    async def get_api_key(self, executor: Executor, params: m.GetApiKey) -> m.KeyGrant:
        """Give the executor what its session may have of a key."""
        launched = executor.launched
        assert launched is not None, "it said hello from its process"
        group = f"hutch-{executor.id}" if launched.state.get("cgroup") else None
        holder = LeaseHolder(executor.id, launched.uid, launched.pid, launched.start_time, group)
        return await self._parts.grants.grant(await self._session(executor, params.session), params.provider, holder)

    async def renew_token(self, executor: Executor) -> None:
        """Renew the token of a leased executor that has lived half its time."""
        try:
            row = await self._parts.store.read(lambda conn: executors.get(conn, executor.id))
            until = tokens.renewed(row, awake_ms()) if row is not None else None
            if until is not None:
                await self._parts.store.write(lambda tx: executors.update(tx, executor.id, token_until=until))
                executor.renew_at = until - tokens.LIFETIME // 2
        except HutchError as error:
            executor.renew_at = 0  # the next heartbeat tries again
            _log.warning("a token is not renewed", executor=executor.id, error=error.message)

    def requester_of(self, session: str) -> _Requester | None:
        """Return the executor that can resolve paths for a session now."""
        executor = self._parts.pool.of_session(session)
        return _Requester(executor, self._parts) if executor is not None and executor.peer is not None else None

    async def _session(self, executor: Executor, session: str) -> SessionRow:
        """Return the session that the executor serves, by its lease row."""

        def leased(conn: object) -> SessionRow | None:
            row = executors.leased_to(conn, session)  # type: ignore[arg-type]
            return sessions.get(conn, session) if row is not None and row.id == executor.id else None  # type: ignore[arg-type]

        found = await self._parts.store.read(leased)
        if found is None or executor.over:
            raise HutchError(Reason.LEASE_LOST)
        return found
