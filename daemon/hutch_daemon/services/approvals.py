"""The methods for permission requests: users list and answer them, executors make them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import msgspec
import structlog

from hutch_daemon.permissions.approvals import Approvals
from hutch_daemon.permissions.judging import Requester
from hutch_daemon.permissions.requests import permission_view
from hutch_daemon.pool.executors import Executor, Roster
from hutch_daemon.pool.pool import Pool
from hutch_daemon.services.access import Access, Caller
from hutch_daemon.services.executors import served_session
from hutch_daemon.services.masking import Masking
from hutch_daemon.services.modes import report_mode
from hutch_daemon.settings import SettingsInForce
from hutch_daemon.store import permissions, sessions
from hutch_daemon.store.rows import PermissionRow
from hutch_daemon.store.store import Store
from hutch_shared import messages as m
from hutch_shared.digest import input_digest
from hutch_shared.errors import HutchError, Reason
from hutch_shared.failpoints import failpoint

__all__ = ["ApprovalService", "connected_requester"]

_log = structlog.get_logger(__name__)

_RESOLVE_TIMEOUT: Final = 10.0


@dataclass(frozen=True, slots=True)
class _ExecutorRequester:
    """An executor that asks. It does what only the session's account can do."""

    executor: Executor
    settings: SettingsInForce
    store: Store

    @property
    def id(self) -> str:
        return self.executor.id

    async def real_paths(self, session: str, paths: tuple[str, ...]) -> Mapping[str, str]:
        """Let the executor resolve paths. The result lacks the paths that it cannot resolve."""
        try:
            found: m.ResolvedPaths = await self.executor.call(
                "resolve_paths", m.ResolvePaths(session, paths), _RESOLVE_TIMEOUT
            )
        except HutchError as error:
            _log.warning("paths are not resolved", executor=self.executor.id, error=error.message)
            return {}
        return found.real

    async def notify_somebody(self, question: m.Permission) -> m.Notified:
        """Let the executor run the notify command as its account."""
        settings = self.settings.current.permissions
        names = settings.notify_env
        values = {name: os.environ[name] for name in names if name in os.environ}
        account = self.executor.key.account.name
        folders = await self.store.read(lambda conn: sessions.open_folders(conn, account))
        run = m.RunNotify(settings.notify, question, settings.notify_timeout, names, values, folders)
        notified: m.Notified = await self.executor.call("run_notify", run, settings.notify_timeout + 5.0)
        return notified


def connected_requester(
    roster: Roster, settings: SettingsInForce, store: Store, row: PermissionRow
) -> Requester | None:
    """Return the executor that made a request, if it is connected."""
    executor = roster.serving.get(row.session)
    connected = executor is not None and executor.id == row.executor and executor.peer is not None
    return _ExecutorRequester(executor, settings, store) if executor is not None and connected else None


class ApprovalService:
    """The permission methods of both sockets."""

    def __init__(
        self,
        store: Store,
        access: Access,
        approvals: Approvals,
        pool: Pool,
        masking: Masking,
        settings: SettingsInForce,
    ) -> None:
        """`approvals` decides about calls. A call that contains a secret known to `masking` is denied before that."""
        self._store = store
        self._access = access
        self.approvals = approvals
        self._pool = pool
        self._masking = masking
        self._settings = settings

    async def list_permissions(self, caller: Caller, params: m.ListPermissions) -> m.Permissions:
        """List the permission requests of one session, or of all sessions that the caller may see."""
        session = (await self._access.session(caller, params.session)).id if params.session is not None else None
        rows, more = await self._store.read(
            lambda conn: permissions.page(
                conn,
                owner=caller.scope,
                session=session,
                state=params.state,
                after=params.after,
                limit=params.limit,
                newest=params.newest,
            )
        )
        return m.Permissions(tuple(permission_view(row) for row in rows), more)

    async def answer_permission(self, caller: Caller, params: m.AnswerPermission) -> m.Permission:
        """Decide a permission request; see `Approvals.decide`."""
        asked = await self.approvals.get(params.permission)
        session = await self._access.session_by_id(caller, asked.session)
        if self._masking.known.find(msgspec.json.encode(params)) is not None:
            raise HutchError(Reason.INVALID_PARAMS, "The decision holds one of your stored keys; take it out.")
        requester = connected_requester(self._pool.roster, self._settings, self._store, asked)
        settled = await self.approvals.decide(session, requester, str(caller), params)
        failpoint("answer.stored")
        if settled.kind == "plan" and settled.state == "allowed":
            await report_mode(self._pool.roster, await self._access.session_by_id(caller, session.id))
        return settled

    async def request_permission(self, executor: Executor, params: m.RequestPermission) -> m.PermissionDecision:
        """Wait for the decision about one call. A call is denied if its turn does not run."""
        session = await served_session(self._store, executor, params.session)
        if (hit := self._masking.in_call(params)) is not None:
            await self._store.write(lambda tx: self._masking.record(tx, session.id, [hit]))
            return m.PermissionDecision(
                "deny",
                "denied",
                params.call.input,
                input_digest(params.call.agent_tool, params.call.input),
                "The call contains a stored key. No command needs it: the model is reached without it.",
            )
        return await self.approvals.ask(session, _ExecutorRequester(executor, self._settings, self._store), params)
