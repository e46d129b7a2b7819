"""Sessions: open, list, get, close and delete them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from posixpath import basename, join, normpath

import msgspec

from hutch_daemon.environments.port import combined
from hutch_daemon.environments.registry import Environments
from hutch_daemon.keys.vault import Vault, session_context
from hutch_daemon.pool.executors import Roster
from hutch_daemon.services.access import Access, Caller, require_absolute
from hutch_daemon.services.accounts import Accounts
from hutch_daemon.services.isolation import IsolationPlanner
from hutch_daemon.services.policy_layers import PolicyLayers, with_tools
from hutch_daemon.services.session_tasks import SessionTasks
from hutch_daemon.services.states import shown_state
from hutch_daemon.settings import SettingsInForce
from hutch_daemon.store import audit, left_dirs, sessions
from hutch_daemon.store.records import Executes, Tx, to_message
from hutch_daemon.store.rows import FORK_MARK, LeftDirRow, SessionRow
from hutch_daemon.store.store import Store
from hutch_shared import messages as m
from hutch_shared.agents import AGENTS, SCRATCH, provider_of
from hutch_shared.errors import HutchError, Reason
from hutch_shared.ids import new_id
from hutch_shared.times import now_ms

__all__ = ["SessionService"]


PriceTrouble = Callable[[str, str], Awaitable[str]]
"""Takes a provider and a model; returns why its price is unknown and how to set it, or "" if that is not so."""


class SessionService:
    """The session methods of the client socket."""

    def __init__(
        self,
        store: Store,
        access: Access,
        accounts: Accounts,
        environments: Environments,
        isolation: IsolationPlanner,
        vault: Vault,
        policy: PolicyLayers,
        tasks: SessionTasks,
        roster: Roster,
        settings: SettingsInForce,
        on_deleted: Callable[[str], None],
        price_trouble: PriceTrouble,
    ) -> None:
        """`settings` contain the default mode of a session.

        `on_deleted(session)` is called after the commit and must not block.
        """
        self._store = store
        self._access = access
        self._accounts = accounts
        self._environments = environments
        self._isolation = isolation
        self._vault = vault
        self._policy = policy
        self._tasks = tasks
        self._roster = roster
        self._on_deleted = on_deleted
        self._settings = settings
        self._price_trouble = price_trouble

    async def open_session(self, caller: Caller, params: m.OpenSession) -> m.Session:
        """Open a session. It gets its executor in the background, before the first prompt arrives."""
        self._access.require_serving()
        if params.agent not in AGENTS:
            known = ", ".join(AGENTS)
            raise HutchError(Reason.AGENT_UNAVAILABLE, f"There is no agent {params.agent} here; known: {known}.")
        require_absolute(params.cwd, "working directory")
        account = self._accounts.for_new_session(caller, params.account)
        environment = self._environments.choose(params.environment, account)
        await environment.check_account(account)
        session, cwd, servers = new_id("session"), normpath(params.cwd), params.options.mcp_servers
        sealed = self._vault.seal(session_context(session), msgspec.json.encode(servers)) if servers else None
        await self._check_price(params)
        plan = await self._isolation.plan(environment, params.agent, cwd, account, params.isolation)
        settings = self._settings.current.permissions
        row = SessionRow(
            id=session,
            name=params.name or f"{basename(cwd) or 'root'}-{session[2:6]}",
            owner=caller.uid,
            account=account.name,
            agent=params.agent,
            cwd=cwd,
            created_at=now_ms(),
            permission_mode=params.permission_mode or settings.mode,
            when_nobody=params.when_nobody or settings.when_nobody,
            environment=environment.name,
            isolation=plan.isolation,
            keys=plan.keys,
            options=msgspec.structs.replace(params.options, mcp_servers={name: {} for name in servers}),
            sealed=sealed,
            rules=with_tools(params.rules, params.options),
            limits=params.limits,
            agent_session=params.resume,
            real_cwd=params.real_cwd,
            credential=params.credential,
            idempotency_key=params.idempotency_key,
        )
        self._policy.check_rules(caller.uid, row.rules, base=cwd)
        await self._policy.check_mode(row)
        return await self.open_row(caller, row)

    async def _check_price(self, params: m.OpenSession) -> None:
        """Refuse a budget if the model is named and has no price. A short name (`opus`) stands for any version."""
        model, provider = (params.options.model or "").partition("[")[0], provider_of(params.agent)
        if params.limits.max_usd is None or provider is None or "-" not in model:
            return
        if trouble := await self._price_trouble(provider, model):
            raise HutchError(Reason.INVALID_PARAMS, f"A session with max_usd needs the price of its model. {trouble}")

    async def open_row(self, caller: Caller, row: SessionRow) -> m.Session:
        """Store a new session, and start its executor. A repeated idempotency key returns the first session."""

        def keep(tx: Tx) -> tuple[SessionRow, bool, tuple[SessionRow, ...]]:
            others = sessions.in_directory(tx, row.cwd)
            kept, fresh = sessions.insert(tx, row)
            if fresh:
                self._check_count(tx, row.account)
                details = {"cwd": row.cwd, "agent": row.agent, "mode": row.permission_mode}
                _record(tx, caller, row, "open_session", "opened", details)
            if kept.state == "open":
                tx.after_commit(partial(self._tasks.warm_up, kept.id, kept.owner))
            return kept, fresh, others

        kept, fresh, others = await self._store.write(keep)
        warning = None
        if others and fresh:
            names = ", ".join(one.name if caller.may_see(one.owner) else "another user's" for one in others)
            which = "Another open session works" if len(others) == 1 else "Other open sessions work"
            warning = f"{which} in {row.cwd}: {names}."
        return await self.view(kept, warning)

    async def list_sessions(self, caller: Caller, params: m.ListSessions) -> m.Sessions:
        """List the caller's sessions, or all users' if the caller asks for them and may see them."""
        owner = caller.scope if params.all_owners else caller.uid

        def read(conn: Executes) -> tuple[list[tuple[SessionRow, sessions.SessionActivity]], bool]:
            rows, more = sessions.page(conn, owner, params.state, params.limit)
            return [(row, sessions.activity(conn, row.id)) for row in rows], more

        found, more = await self._store.read(read)
        return m.Sessions(tuple(self._view(row, near) for row, near in found), more)

    async def get_session(self, caller: Caller, params: m.SessionRef) -> m.Session:
        """Return one session."""
        return await self.view(await self._access.session(caller, params.session))

    async def close_session(self, caller: Caller, params: m.CloseSession) -> m.Session:
        """Close a session and end its processes; `killed` is the verified result. A closed session is not changed."""
        row = await self._access.session(caller, params.session)
        if row.state == "open":
            if not params.force:
                busy = await self._store.read(lambda conn: sessions.activity(conn, row.id))
                if busy.active is not None or busy.queued:
                    raise HutchError(Reason.WRONG_STATE, "A turn is running or waiting; stop it, or close by force.")
            await self._tasks.start(row.id, row.owner).close(str(caller))
        return await self.view(await self._access.session(caller, row.id))

    async def delete_session(self, caller: Caller, params: m.SessionRef) -> m.Nothing:
        """Remove a closed session with its events; keep its audit. Its forks must have their conversation by then."""
        row = await self._access.session(caller, params.session)
        if row.state != "closed":
            raise HutchError(Reason.WRONG_STATE, "The session is open; close it first.")

        def delete(tx: Tx) -> None:
            if row.agent_dir is not None and (forks := sessions.unprepared_forks(tx, row.id)):
                names = ", ".join(one.name for one in forks)
                sentence = (
                    f"Forks of it have not copied its conversation yet: {names}. Submit a prompt there, or close them."
                )
                raise HutchError(Reason.WRONG_STATE, sentence)
            sessions.delete(tx, row.id)
            if row.agent_dir is not None:
                left_dirs.remove(tx, join(row.agent_dir, SCRATCH))
                left_dirs.add(tx, LeftDirRow(path=row.agent_dir, account=row.account))
            _record(tx, caller, row, "delete_session", "deleted")
            tx.after_commit(partial(self._on_deleted, row.id))

        await self._store.write(delete)
        return m.Nothing()

    def _check_count(self, tx: Tx, account: str) -> None:
        limit = self._isolation.limits.sessions
        if limit is not None and sessions.count_open(tx, account) > limit:
            raise HutchError(
                Reason.OVERLOADED,
                f"{account} has {limit} open sessions, which is the limit ([limits] sessions): close some with `hutch"
                " stop`.",
            )

    async def view(self, row: SessionRow, warning: str | None = None) -> m.Session:
        """Return the current state of a session for clients."""
        near = await self._store.read(lambda conn: sessions.activity(conn, row.id))
        return self._view(row, near, warning)

    def _view(self, row: SessionRow, near: sessions.SessionActivity, warning: str | None = None) -> m.Session:
        speaking = row.agent_session is not None and not row.agent_session.startswith(FORK_MARK)
        active, executor = near.active, self._roster.serving.get(row.id)
        unverified = combined(one.killed for one in self._roster.quarantined(row.id))
        return to_message(
            m.Session,
            row,
            journal=self._store.journal,
            agent_session=row.agent_session if speaking else None,
            executor=executor.id if executor is not None else None,
            executor_state=executor.state if executor is not None else None,
            active_turn=active.id if active is not None else None,
            active_state=shown_state(active.state, near.pending) if active is not None else None,
            pending=near.pending,
            queued=near.queued,
            usage=near.usage,
            warning=warning,
            executor_limits=executor.limits if executor is not None else None,
            killed=row.killed if unverified is None else unverified.result(),
        )


def _record(
    tx: Tx, caller: Caller, row: SessionRow, action: str, outcome: str, details: Mapping[str, str] | None = None
) -> None:
    audit.record(
        tx, actor=str(caller), owner=row.owner, action=action, outcome=outcome, session=row.id, details=details
    )
