"""The methods that executors call, after `hello`. Each call is checked against the executor's lease."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final, Protocol

import anyio
import structlog
from anyio.abc import TaskGroup

from hutch_daemon.keys.lease_book import LeaseHolder
from hutch_daemon.pool import tokens
from hutch_daemon.pool.executors import Executor, ExecutorPeer
from hutch_daemon.pool.pool import Pool
from hutch_daemon.store import executors, sessions, turns
from hutch_daemon.store.records import Executes, Tx
from hutch_daemon.store.rows import ExecutorRow, SessionRow
from hutch_daemon.store.store import Store
from hutch_shared import messages as m
from hutch_shared.errors import HutchError, Reason
from hutch_shared.failpoints import failpoint
from hutch_shared.processes import Credentials
from hutch_shared.times import awake_ms

__all__ = ["ExecutorService", "GrantsKeys", "served_session"]

_log = structlog.get_logger(__name__)

_START_TIMEOUT: Final = 5.0
"""Seconds to wait after a hello until the executor's start is recorded. The hello may arrive before that."""


class GrantsKeys(Protocol):
    """Gives an executor and its processes a key, or a lease of it."""

    async def grant(self, session: SessionRow, provider: str, holder: LeaseHolder | None = None) -> m.KeyGrant: ...


async def served_session(store: Store, executor: Executor, session: str) -> SessionRow:
    """Return the session; `lease_lost` if the executor does not have its lease."""

    def leased(conn: Executes) -> SessionRow | None:
        row = executors.leased_to(conn, session)
        return sessions.get(conn, session) if row is not None and row.id == executor.id else None

    found = await store.read(leased)
    if found is None or executor.over:
        raise HutchError(Reason.LEASE_LOST)
    return found


class ExecutorService:
    """The methods of the executor socket, except for reported events and permission requests."""

    def __init__(self, store: Store, pool: Pool, grants: GrantsKeys, boot_id: str) -> None:
        """`boot_id` identifies this boot. Tokens of an earlier boot are expired."""
        self._store = store
        self._pool = pool
        self._grants = grants
        self._boot_id = boot_id
        self._tasks: TaskGroup | None = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Renew tokens while the block runs."""
        async with anyio.create_task_group() as self._tasks:
            yield
            self._tasks.cancel_scope.cancel()

    async def hello(self, peer: ExecutorPeer, credentials: Credentials, params: m.Hello) -> tuple[Executor, m.Welcome]:
        """Authenticate an executor by its token, its uid and its pid, and use its connection from now on.

        `protocol_mismatch`, `token_unknown`, `token_expired`; `not_allowed` if another process has the token;
        `lease_lost` if another executor serves the session now. While the store cannot be written, an executor that
        serves a session is admitted without counting the use of its token, so that interrupts reach it.
        """
        if not m.PROTOCOL - 1 <= params.protocol <= m.PROTOCOL:
            raise HutchError(
                Reason.PROTOCOL_MISMATCH, f"hutchd speaks the executor protocol {m.PROTOCOL} and the one before."
            )
        hashed = tokens.hash_of(params.token)
        row = await self._store.read(lambda conn: executors.by_token_hash(conn, hashed))
        executor = self._pool.roster.by_id.get(row.id) if row is not None else None
        if row is None or executor is None or row.id != params.executor:
            raise HutchError(Reason.TOKEN_UNKNOWN)
        with anyio.move_on_after(_START_TIMEOUT):
            await executor.started.wait()
        launched = executor.launched
        if launched is None or (credentials.uid, credentials.pid) != (row.uid, launched.pid):
            raise HutchError(Reason.NOT_ALLOWED, "The token belongs to another process.")
        if params.session is not None and params.session != row.session:
            raise HutchError(Reason.LEASE_LOST)
        failpoint("hello.admit")
        try:
            admitted, turn = await self._store.write(lambda tx: self._use_token(tx, executor.id))
        except HutchError as error:
            if error.reason is not Reason.STORE_UNAVAILABLE or row.session is None:
                raise
            admitted, turn = await self._store.read(lambda conn: self._check_token(conn, executor.id))
        executor.renew_at = tokens.renewal_due(admitted.token_until)
        await self._pool.attach(executor, peer, params)
        failpoint("hello.welcome")
        return executor, m.Welcome(acked=admitted.acked_n, daemon_epoch=self._store.epoch, turn=turn)

    def _use_token(self, tx: Tx, executor: str) -> tuple[ExecutorRow, str | None]:
        row, turn = self._check_token(tx, executor)
        until = tokens.renewed(row, awake_ms())
        row = executors.update(
            tx, row.id, token_uses=row.token_uses + 1, token_until=until if until is not None else row.token_until
        )
        return row, turn

    def _check_token(self, on: Executes, executor: str) -> tuple[ExecutorRow, str | None]:
        """Check the token again in the transaction that uses it. Return the row, and the id of its active turn."""
        row = executors.get(on, executor)
        assert row is not None, "its row was found by its token"
        tokens.admit(row, awake_ms(), self._boot_id, proven=row.session is not None)
        active = turns.active(on, row.session) if row.session is not None else None
        return row, active.id if active is not None and active.executor == row.id else None

    def gone(self, executor: Executor, peer: ExecutorPeer) -> None:
        """Record that a connection has ended. All its messages have been handled."""
        self._pool.detach(executor, peer)

    async def get_api_key(self, executor: Executor, params: m.GetApiKey) -> m.KeyGrant:
        """Give the executor a key for its session, or a lease of it."""
        launched = executor.launched
        assert launched is not None, "it said hello from its process"
        group = f"hutch-{executor.id}" if launched.state.get("cgroup") else None
        holder = LeaseHolder(
            executor.id, launched.uid, launched.pid, launched.start_time, group, network=executor.network
        )
        session = await served_session(self._store, executor, params.session)
        return await self._grants.grant(session, params.provider, holder)

    def heartbeat(self, executor: Executor, params: m.Heartbeat) -> None:
        """Record a heartbeat. Renew the token of a leased executor in the background if half its lifetime is over."""
        self._pool.roster.record_heartbeat(executor, params)
        if self._tasks is not None and executor.session is not None and awake_ms() >= executor.renew_at:
            executor.renew_at = sys.maxsize
            self._tasks.start_soon(self._renew_token, executor)

    async def _renew_token(self, executor: Executor) -> None:
        try:
            row = await self._store.read(lambda conn: executors.get(conn, executor.id))
            until = tokens.renewed(row, awake_ms()) if row is not None else None
            if until is not None:
                await self._store.write(lambda tx: executors.update(tx, executor.id, token_until=until))
                executor.renew_at = tokens.renewal_due(until)
        except HutchError as error:
            executor.renew_at = 0  # the next heartbeat tries again
            _log.warning("a token is not renewed", executor=executor.id, error=error.message)
