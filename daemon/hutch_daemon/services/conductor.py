"""The conductor: where the parts meet. One method for each thing that a client or an executor may ask for.

A method takes the caller and the message's parameters and returns the message's result, or raises `HutchError`. Who may
call what is decided before, at the gate; whose things they are, here: what is not the caller's looks like what does not
exist. Each open session with something to do has a task of its own (`session_loop`), a child of `running`.
"""

from __future__ import annotations

import math
import os
import sqlite3
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from posixpath import basename, normpath

import anyio
import msgspec
import structlog

from hutch_daemon.environments.origin import insider_of
from hutch_daemon.environments.port import Account
from hutch_daemon.events.journal import event_json
from hutch_daemon.keys.vault import session_context
from hutch_daemon.permissions.approvals import Approvals
from hutch_daemon.permissions.requests import permission_view
from hutch_daemon.pool.executor import Executor
from hutch_daemon.services import adoption
from hutch_daemon.services.access import Caller
from hutch_daemon.services.account_map import account_for
from hutch_daemon.services.executors import ExecutorSide
from hutch_daemon.services.isolation import Walling, usual, walling
from hutch_daemon.services.keys import KeySide
from hutch_daemon.services.masking import Masking
from hutch_daemon.services.modes import change_mode, leave_plan
from hutch_daemon.services.orphan_spools import Spools
from hutch_daemon.services.parts import Parts, awake_ms
from hutch_daemon.services.policy import PolicySide, demand_absolute, with_tools
from hutch_daemon.services.policy_layers import Policies
from hutch_daemon.services.reports import Reports
from hutch_daemon.services.session_loop import SessionLoop
from hutch_daemon.services.states import TURN
from hutch_daemon.services.turn_lifecycle import Endings, stopped
from hutch_daemon.services.views import FORK_MARK, Around, around, audit_view, session_view, turn_view, usage_view
from hutch_daemon.store import audit, executors, permissions, sessions, turns, usage
from hutch_daemon.store.events import EVERY
from hutch_daemon.store.records import Executes
from hutch_daemon.store.rows import AuditRow, SessionRow, TurnRow
from hutch_daemon.store.tx import Tx
from hutch_shared import __version__
from hutch_shared import messages as m
from hutch_shared.agents import AGENTS
from hutch_shared.errors import HutchError, Reason
from hutch_shared.failpoints import failpoint
from hutch_shared.ids import new_id
from hutch_shared.times import from_wire, now_ms, to_wire

__all__ = ["Conductor"]

_log = structlog.get_logger(__name__)

_NOT_YET_AT_HAND = 0.02
"""Seconds until one looks again whether a session's task has taken up its turn."""
_ALL = 1_000_000
"""Rows: a bound that is none."""


class Conductor:
    """All sessions of this hutchd."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self.policies = Policies(parts.store, parts.host_policy, parts.account_of, parts.account)
        self.approvals = Approvals(
            parts.store,
            lambda: parts.settings().permissions,
            self.policies,
            somebody_there=self._somebody_there,
            stop_turn=self._stop_turn,
            plan_approved=lambda tx, session, by: leave_plan(tx, parts.journal, session, by),
            clock=parts.clock,
        )
        self._endings = Endings(parts.journal, self.approvals)
        masking = Masking(parts.known, parts.journal)
        reports = Reports(parts.store, self._endings, self._poke, masking)
        self._executors = ExecutorSide(parts, self.approvals, reports, masking)
        self._spools = Spools(parts, reports)
        self._policy = PolicySide(parts, self.policies, self.session_of)
        self._keys = keys = KeySide(parts, self.session_of)
        self.fanout, self.journal = parts.fanout, parts.journal
        # the methods of the wire that stand elsewhere, by their names
        self.executor_hello = self._executors.hello
        self.executor_gone = self._executors.gone
        self.report_message = self._executors.report_message
        self.request_permission = self._executors.request_permission
        self.get_api_key = self._executors.get_api_key
        self.show_policy = self._policy.show_policy
        self.explain_policy = self._policy.explain_policy
        self.test_policy = self._policy.test_policy
        self.change_rules = self._policy.change_rules
        self.trust_policy = self._policy.trust_policy
        self.put_api_key = keys.put_api_key
        self.list_api_keys = keys.list_api_keys
        self.delete_api_key = keys.delete_api_key
        self.use_api_key = keys.use_api_key
        self.explain_key = keys.explain_key
        self.rotate_master_key = keys.rotate_master_key
        self.stop_wish: m.StopDaemon | None = None
        self.stop_wished = anyio.Event()
        self._loops: dict[str, SessionLoop] = {}
        self._tasks: anyio.abc.TaskGroup | None = None
        self._draining = False
        self._notices: dict[str, str] = {}
        parts.fanout.on_presence(self._presence_changed)

    # ------------------------------------------------------------ life

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Take over what an earlier hutchd left and work; leaving ends the tasks and no executor.

        When the body starts, executors may dial in; those that are expected have `executors.adopt_timeout` to do so.
        """
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._parts.pool.running())
            await stack.enter_async_context(self.approvals.running())
            self._tasks = await stack.enter_async_context(anyio.create_task_group())
            expected = await adoption.take_over(self._parts, self._loop)
            self._tasks.start_soon(adoption.settle, self._parts, expected)
            self._tasks.start_soon(self._spools.run)
            self._parts.pool.warm(adoption.keys_to_keep(self._parts))
            try:
                yield
            finally:
                self._tasks.cancel_scope.cancel()
                self._tasks = None

    async def stop(self, how: m.StopHow, timeout: float) -> None:
        """Take no new work and end what `how` says.

        `drain` lets turns end for `timeout`, `stop` stops them; then executors are ended, but for those whose turn has
        not ended: they live on, for the next hutchd to adopt. `leave` lets all live on that have a session.
        """
        self._draining = True
        self._parts.pool.stop_starting()
        if how == "stop":
            for turn in await self._parts.store.read(turns.live):
                if turn.state != "queued":
                    self._stop_turn(turn.session, turn.id, "hutchd stops")
        if how != "leave":
            with anyio.move_on_after(timeout):
                while any(  # noqa: ASYNC110 what is waited for is in the store, and this is rare
                    turn.state != "queued" for turn in await self._parts.store.read(turns.live)
                ):
                    await anyio.sleep(0.1)
            busy = {turn.session for turn in await self._parts.store.read(turns.live) if turn.state != "queued"}
            pool = self._parts.pool
            with anyio.move_on_after(self._parts.settings().executors.drain_timeout):
                async with anyio.create_task_group() as ends:
                    for executor in pool.all():
                        if executor.session not in busy and executor.state != "quarantined":
                            ends.start_soon(partial(pool.end, executor, "hutchd stops", grace=2.0))

    @property
    def draining(self) -> bool:
        """It takes no new work."""
        return self._draining

    def notices(self) -> tuple[str, ...]:
        """Return what an administrator should look at."""
        return tuple(self._notices.values())

    def insider_of(self, pid: int) -> str | None:
        """Return the executor that a process belongs to, if it is a process of a session."""
        return insider_of(pid, self._parts.pool.pids())

    # ------------------------------------------------------------ sessions

    async def open_session(self, caller: Caller, params: m.OpenSession) -> m.Session:
        """Open a session; it gets its executor in the background, before the first prompt comes."""
        self._refuse_when_draining()
        settings = self._parts.settings()
        if params.agent not in AGENTS:
            known = ", ".join(AGENTS)
            raise HutchError(Reason.AGENT_UNAVAILABLE, f"There is no agent {params.agent} here; known: {known}.")
        demand_absolute(params.cwd, "working directory")
        account = self._account(caller, params.account)
        environment = self._parts.environments.choose(params.environment, account)
        await environment.check_account(account)
        session = new_id("session")
        cwd = normpath(params.cwd)
        servers = params.options.mcp_servers
        sealed = self._parts.vault.seal(session_context(session), msgspec.json.encode(servers)) if servers else None
        having = await walling(self._parts, environment, params.agent, cwd, account, params.isolation)
        row = SessionRow(
            id=session,
            name=params.name or f"{basename(cwd) or 'root'}-{session[2:6]}",
            owner=caller.uid,
            account=account.name,
            agent=params.agent,
            cwd=cwd,
            created_at=now_ms(),
            permission_mode=params.permission_mode or settings.permissions.mode,
            when_nobody=params.when_nobody or settings.permissions.when_nobody,
            environment=environment.name,
            isolation=having.isolation,
            keys=having.keys,
            options=msgspec.structs.replace(params.options, mcp_servers={name: {} for name in servers}),
            sealed=sealed,
            rules=with_tools(params.rules, params.options),
            limits=params.limits,
            agent_session=params.resume,
            credential=params.credential,
            idempotency_key=params.idempotency_key,
        )
        self._policy.refuse_bad_rules(caller.uid, row.rules, base=cwd)
        await self._policy.refuse_forbidden_mode(row)
        return await self._open(caller, row)

    async def _open(self, caller: Caller, row: SessionRow) -> m.Session:
        def keep(tx: Tx) -> tuple[SessionRow, bool, tuple[SessionRow, ...]]:
            others = sessions.in_directory(tx, row.cwd)
            kept, fresh = sessions.insert(tx, row)
            if fresh:
                self._refuse_too_many(tx, row.account)
                details = {"cwd": row.cwd, "agent": row.agent, "mode": row.permission_mode}
                audit.write(tx, _audit(caller, row, "open_session", "opened", details=details))
            return kept, fresh, others

        kept, fresh, others = await self._parts.store.write(keep)
        warning = None
        if others and fresh:
            names = ", ".join(one.name if caller.may_see(one.owner) else "another user's" for one in others)
            who = "Another open session works" if len(others) == 1 else "Other open sessions work"
            warning = f"{who} in {row.cwd}: {names}."
        if kept.state == "open":
            self._loop(kept.id, kept.owner).warm_up()
        return await self._view(kept, warning)

    async def list_sessions(self, caller: Caller, params: m.ListSessions) -> m.Sessions:
        """List the caller's sessions; everybody's where that was asked for and may be seen."""
        owner = caller.scope if params.all_owners else caller.uid

        def read(conn: sqlite3.Connection) -> tuple[list[tuple[SessionRow, Around]], bool]:
            rows, more = sessions.page(conn, owner, params.state, params.limit)
            return [(row, around(conn, row.id)) for row in rows], more

        found, more = await self._parts.store.read(read)
        pool, journal = self._parts.pool, self._parts.store.journal
        return m.Sessions(tuple(session_view(row, near, journal, pool.of_session(row.id)) for row, near in found), more)

    async def get_session(self, caller: Caller, params: m.SessionRef) -> m.Session:
        """Return one session."""
        return await self._view(await self.session_of(caller, params.session))

    async def session_of(self, caller: Caller, ref: str) -> SessionRow:
        """Return the caller's session that `ref` means; `not_found`, `invalid_params` when it could be several."""
        return await self._parts.store.read(lambda conn: sessions.find(conn, caller.scope, ref, first=caller.uid))

    async def close_session(self, caller: Caller, params: m.CloseSession) -> m.Session:
        """Close a session and end its processes, verified; a closed one is returned as it is."""
        row = await self.session_of(caller, params.session)
        if row.state == "open":
            if not params.force:
                busy = await self._parts.store.read(lambda conn: around(conn, row.id))
                if busy.active is not None or busy.queued:
                    raise HutchError(Reason.WRONG_STATE, "A turn is running or waiting; stop it, or close by force.")
            await self._loop(row.id, row.owner).close()
            await self._parts.store.write(lambda tx: audit.write(tx, _audit(caller, row, "close_session", "closed")))
        return await self._view(await self.session_of(caller, row.id))

    async def delete_session(self, caller: Caller, params: m.SessionRef) -> m.Nothing:
        """Remove a closed session and its record; the audit stays."""
        row = await self.session_of(caller, params.session)
        if row.state != "closed":
            raise HutchError(Reason.WRONG_STATE, "The session is open; close it first.")

        def forget(tx: Tx) -> None:
            sessions.delete(tx, row.id)
            audit.write(tx, _audit(caller, row, "delete_session", "deleted"))

        await self._parts.store.write(forget)
        self._parts.fanout.remove(row.id)
        return m.Nothing()

    async def fork_session(self, caller: Caller, params: m.ForkSession) -> m.Session:
        """Open a session that goes on from another one's conversation, with the same settings."""
        self._refuse_when_draining()
        row = await self.session_of(caller, params.session)
        if row.agent_session is None:
            raise HutchError(Reason.WRONG_STATE, "The session has no conversation yet that a fork could go on from.")
        self._parts.demand_account(row)
        session = new_id("session")
        sealed = row.sealed
        if sealed is not None:
            plain = self._parts.vault.open(session_context(row.id), sealed)
            sealed = self._parts.vault.seal(session_context(session), plain)
        fork = replace(
            row,
            id=session,
            name=params.name or f"{row.name}-fork-{session[2:6]}",
            created_at=now_ms(),
            state="open",
            closed_at=None,
            sealed=sealed,
            agent_session=FORK_MARK + row.agent_session.removeprefix(FORK_MARK),
            forked_from=row.id,
            idempotency_key=None,
            head_seq=0,
            floor_seq=0,
            turns=0,
        )
        return await self._open(caller, fork)

    async def set_permission_mode(self, caller: Caller, params: m.SetPermissionMode) -> m.Session:
        """Change the mode; the next tool call is judged by it, also of the running turn."""
        row = await self.session_of(caller, params.session)
        if row.state == "closed":
            raise HutchError(Reason.SESSION_CLOSED)
        await self._policy.refuse_forbidden_mode(replace(row, permission_mode=params.mode))

        def change(tx: Tx) -> SessionRow:
            now = sessions.get(tx, row.id)
            if now is None or now.state == "closed":
                raise HutchError(Reason.SESSION_CLOSED)
            return change_mode(tx, self._parts.journal, now, params.mode, str(caller))

        changed = await self._parts.store.write(change)
        await self._tell_mode(changed)
        return await self._view(changed)

    async def _tell_mode(self, row: SessionRow) -> None:
        executor = self._parts.pool.of_session(row.id)
        if executor is not None and executor.prepared:
            await executor.send_mode(row.id, row.permission_mode)

    # ------------------------------------------------------------ turns

    async def submit_prompt(self, caller: Caller, params: m.SubmitPrompt) -> m.Turn:
        """Queue a prompt, durably; with a key that was used before, return the turn that it made."""
        self._refuse_when_draining()
        row = await self.session_of(caller, params.session)
        limits = self._parts.settings().turns
        if len(params.prompt.encode()) > limits.prompt:
            raise HutchError(Reason.INVALID_PARAMS, f"The prompt is longer than {limits.prompt} bytes.")
        if self._parts.known.find(params.prompt.encode()) is not None:
            raise HutchError(Reason.INVALID_PARAMS, "The prompt holds one of your stored keys; take it out.")
        turn = TurnRow(
            id=new_id("turn"),
            session=row.id,
            prompt=params.prompt,
            queued_at=now_ms(),
            idempotency_key=params.idempotency_key,
            timeout=params.timeout,
        )

        def queue(tx: Tx) -> TurnRow:
            kept, fresh = turns.insert(tx, turn)
            if fresh and turns.queued(tx, row.id) > limits.queued_per_session:
                raise HutchError(
                    Reason.OVERLOADED, f"{limits.queued_per_session} prompts wait in this session already."
                )
            failpoint("turn.queued")
            return kept

        with anyio.CancelScope(shield=True):  # it is queued all the same when its caller goes: then run it, too
            kept = await self._parts.store.write(queue)
            failpoint("turn.stored")
            if kept.state not in TURN.terminal:
                self._loop(row.id, row.owner).poke()
        return turn_view(kept)

    async def list_turns(self, caller: Caller, params: m.ListTurns) -> m.Turns:
        """List a session's turns."""
        row = await self.session_of(caller, params.session)
        found, more = await self._parts.store.read(lambda conn: turns.page(conn, row.id, params.limit))
        return m.Turns(tuple([await self._turn_view(turn) for turn in found]), more)

    async def get_turn(self, caller: Caller, params: m.TurnRef) -> m.Turn:
        """Return one turn."""
        return await self._turn_view((await self._turn_of(caller, params.turn))[1])

    async def cancel_turn(self, caller: Caller, params: m.TurnRef) -> m.Turn:
        """Take a turn out of the queue; `wrong_state` when it waits no more."""
        row, turn = await self._turn_of(caller, params.turn)

        def cancel(tx: Tx) -> None:
            now = turns.get(tx, turn.id)
            if now is None or now.state != "queued":
                raise HutchError(Reason.WRONG_STATE, "The turn does not wait any more; interrupt it.")
            self._endings.end(tx, now, stopped("interrupted", "It had not begun."))
            audit.write(tx, _audit(caller, row, "cancel_turn", "stopped", subject=turn.id))

        await self._parts.store.write(cancel)
        self._poke(row.id)
        return await self.get_turn(caller, params)

    async def interrupt_turn(self, caller: Caller, params: m.InterruptTurn) -> m.Turn:
        """Stop the running turn. When this returns nothing of it starts any more; its end may come a moment later.

        It works also while nothing can be stored: then the log has who asked, and the end is stored when it can be.
        """
        row = await self.session_of(caller, params.session)
        store = self._parts.store
        found = await store.read(lambda conn: turns.active(conn, row.id) or turns.next_queued(conn, row.id))
        if found is None or (params.turn is not None and params.turn != found.id):
            raise HutchError(Reason.WRONG_STATE, "No such turn is running.")
        turn, ref = found, m.TurnRef(found.id)
        try:
            await store.write(
                lambda tx: audit.write(tx, _audit(caller, row, "interrupt_turn", "asked", subject=ref.turn))
            )
        except HutchError as error:
            if error.reason is not Reason.STORE_UNAVAILABLE:
                raise
            _log.error("an interrupt is not in the audit", by=str(caller), turn=ref.turn, error=error.message)
        while turn.state not in TURN.terminal:
            halted = self._loop(row.id, row.owner).want_stop(turn.id, "interrupted")
            if halted is not None:
                await halted.wait()
                break
            if turn.state == "queued":
                try:
                    return await self.cancel_turn(caller, ref)
                except HutchError as error:
                    if error.reason is not Reason.WRONG_STATE:
                        raise  # else it has begun just now, and is at hand in a moment
            await anyio.sleep(_NOT_YET_AT_HAND)
            turn = (await self._turn_of(caller, turn.id))[1]
        return await self.get_turn(caller, ref)

    # ------------------------------------------------------------ questions

    async def list_permissions(self, caller: Caller, params: m.ListPermissions) -> m.Permissions:
        """List questions of one session, or of all that the caller may see."""
        session = (await self.session_of(caller, params.session)).id if params.session is not None else None
        rows, more = await self._parts.store.read(
            lambda conn: permissions.page(
                conn,
                owner=caller.scope,
                session=session,
                state=params.state,
                after=params.after,
                limit=params.limit,
            )
        )
        return m.Permissions(tuple(permission_view(row) for row in rows), more)

    async def answer_permission(self, caller: Caller, params: m.AnswerPermission) -> m.Permission:
        """Decide a permission request; see `Approvals.decide`."""
        request = await self.approvals.get(params.permission)
        row = await self._around(caller, request.session)
        settled = await self.approvals.decide(row, self._executors.requester_of(row.id), str(caller), params)
        failpoint("answer.stored")
        if settled.kind == "plan" and settled.state == "allowed":
            await self._tell_mode(await self.session_of(caller, row.id))
        return settled

    # ------------------------------------------------------------ usage, audit, status

    async def get_usage(self, caller: Caller, params: m.GetUsage) -> m.UsageTable:
        """Sum up tokens and dollars of what the caller may see: what agents report beside what the broker counted."""
        session = (await self.session_of(caller, params.session)).id if params.session is not None else None
        since = _time(params.since)
        table = partial(usage.table, by=params.by, owner=caller.scope, session=session, since=since)
        reported, counted = await self._parts.store.read(lambda conn: (table(conn), table(conn, source="broker")))
        return usage_view(reported, counted)

    async def read_audit(self, caller: Caller, params: m.ReadAudit) -> m.AuditPage:
        """Return a page of the audit of what the caller may see."""
        session = params.session
        limit = max(1, min(params.limit, 10_000))
        if session is not None:
            try:
                session = (await self.session_of(caller, session)).id
            except HutchError as error:
                if error.reason is not Reason.NOT_FOUND:  # a deleted session still has its audit, by its whole id
                    raise
        since = _time(params.since)
        rows, more = await self._parts.store.read(
            lambda conn: audit.read(
                conn,
                owner=caller.scope,
                session=session,
                action=params.action,
                outcome=params.outcome,
                since=since,
                after=params.after,
                limit=limit,
            )
        )
        return m.AuditPage(tuple(audit_view(row) for row in rows), more)

    async def get_status(self, caller: Caller, params: m.Nothing) -> m.Status:
        """Say how hutchd is. Counts are of what the caller may see, and so are the executors."""

        pool = self._parts.pool

        def served(conn: Executes) -> set[str]:
            named = [sessions.get(conn, one.session) for one in pool.all() if one.session is not None]
            return {row.id for row in named if row is not None and caller.may_see(row.owner)}

        def count(conn: Executes) -> tuple[int, int, int, int]:
            mine = {row.id for row in sessions.list_(conn, caller.scope, "open", _ALL)}
            live = [turn for turn in turns.live(conn) if turn.session in mine]
            waiting = sum(turn.state == "queued" for turn in live)
            return len(mine), len(live) - waiting, waiting, len(permissions.list_(conn, owner=caller.scope, limit=_ALL))

        parts = self._parts
        opened, running, queued, asked = await parts.store.read(count)
        shown = await parts.store.read(served)
        having = await self._usual(caller)
        return m.Status(
            version=__version__,
            protocol=m.PROTOCOL,
            pid=os.getpid(),
            started_at=to_wire(parts.about.started_at),
            mode=parts.about.mode,
            draining=self._draining,
            store=parts.store.status(),
            isolation=having.isolation,
            keys=having.keys,
            master_key=parts.vault.master_source,
            executors=tuple(
                one.status()
                for one in pool.all()
                if caller.admin or (one.session in shown if one.session else one.key.account.uid == caller.uid)
            ),
            sessions_open=opened,
            turns_running=running,
            turns_queued=queued,
            permissions_pending=asked,
            clients=parts.about.clients(),
            notices=(
                *(await self._of_the_host() if caller.admin or caller.uid == os.geteuid() else ()),
                *self._keys.notices(None if caller.scope is None else caller.uid),
            ),
            paths=dict(parts.about.paths),
            broker=await parts.leases.state(),
        )

    async def _of_the_host(self) -> tuple[str, ...]:
        """Return what who operates hutchd should look at; it may name anybody's sessions, keys and accounts."""
        return (*self._parts.about.notices(), *await self._parts.vault.notices(), *self._notices.values())

    async def stop_daemon(self, caller: Caller, params: m.StopDaemon) -> m.Nothing:
        """Wish for the end; the composition root waits for `stop_wished` and carries it out."""
        _log.warning("asked to stop", by=str(caller), how=params.how)
        self._draining = True
        self.stop_wish = params
        self.stop_wished.set()
        return m.Nothing()

    async def backup_store(self, caller: Caller, params: m.BackupStore) -> m.BackupDone:
        """Write a consistent copy of the database."""
        demand_absolute(params.path, "file of the copy")
        return await self._parts.store.backup(Path(params.path))

    # ------------------------------------------------------------ events

    async def followed_session(self, caller: Caller, params: m.FollowEvents | m.ReadEvents) -> str:
        """Return the id of what is to be followed or read, `"*"` for all; `journal_replaced` for another's cursor."""
        journal = self._parts.store.journal
        if params.journal is not None and params.journal != journal:
            raise HutchError(Reason.JOURNAL_REPLACED, journal=journal)
        return params.session if params.session == EVERY else (await self.session_of(caller, params.session)).id

    async def read_events(self, caller: Caller, params: m.ReadEvents) -> m.EventsPage:
        """Return a page of history."""
        session = await self.followed_session(caller, params)
        limit = max(1, min(params.limit, 10_000))
        journal = self.journal
        page = await journal.read(session, params.after, limit=limit, skip=params.skip, owner=caller.scope)
        bounds = await journal.seq_range(session, caller.scope)
        return m.EventsPage(
            tuple(msgspec.Raw(event_json(event)) for event in page.events), journal.id, bounds.head, page.more
        )

    # ------------------------------------------------------------ executors

    def heartbeat(self, executor: Executor, params: m.Heartbeat) -> None:
        """Note a sign of life at once; what follows from it is a task."""
        self._parts.pool.heard(executor, params)
        if self._tasks is not None and executor.session is not None and awake_ms() >= executor.renew_at:
            executor.renew_at = sys.maxsize
            self._tasks.start_soon(self._executors.renew_token, executor)

    # ------------------------------------------------------------ inside

    def _loop(self, session: str, owner: int) -> SessionLoop:
        loop = self._loops.get(session)
        if loop is None:
            if self._tasks is None:
                raise HutchError(Reason.SHUTTING_DOWN)
            loop = self._loops[session] = SessionLoop(session, owner, self._parts, self._endings, self._closed)
            if self._parts.fanout.answering(session, owner):
                loop.last_there = math.inf
            self._tasks.start_soon(self._run_loop, loop)
        return loop

    async def _run_loop(self, loop: SessionLoop) -> None:
        """Run a session's task; a bug in it costs that session alone: it is logged and the task begins again."""
        pause = 1.0
        while True:
            try:
                await loop.run()
            except Exception:  # noqa: BLE001 the border of one session
                _log.exception("a session's task broke", loop=repr(loop))
                self.noticed(f"broken:{loop.session}", f"The session {loop.session} met a bug; the log has it.")
                await anyio.sleep(pause)
                pause = min(pause * 2, 60.0)
            else:
                self._loops.pop(loop.session, None)
                return

    def _closed(self, session: str) -> None:
        self.policies.forget(session)

    def _poke(self, session: str) -> None:
        if (loop := self._loops.get(session)) is not None:
            loop.poke()

    def _stop_turn(self, session: str, turn: str, why: str) -> None:
        _log.info("a turn is stopped", session=session, turn=turn, why=why)
        if (loop := self._loops.get(session)) is not None:
            loop.want_stop(turn, "interrupted")

    def executor_changed(self, executor: Executor) -> None:
        """Wake whoever waits for an executor whose state or connection changed."""
        if executor.session is not None:
            self._poke(executor.session)
        if executor.peer is not None:
            self._spools.look()
        if executor.ended.is_set() and self._tasks is not None:
            self._tasks.start_soon(self._clear_up, executor)

    async def _clear_up(self, executor: Executor) -> None:
        """Withdraw what an executor that is over still asked, and remove its spool if everything was handed in.

        What cannot be stored now is done by others: the end of its turn withdraws too, and spools are tried again.
        """
        try:
            await self._parts.leases.revoke_executor(executor.id)
            await self.approvals.withdraw_of(executor.id, "its executor is gone")
            if executor.environment.spool_of(executor.key.account, executor.id) is not None:
                self._spools.look()  # only its account can tell whether it left something
                return
            await anyio.to_thread.run_sync((self._parts.spool_dir / executor.id).rmdir)
            await self._parts.store.write(lambda tx: executors.update(tx, executor.id, spool=None))
        except FileNotFoundError:  # it never had one
            return
        except (OSError, HutchError) as error:  # it holds events, or the store is not there
            if isinstance(error, HutchError):
                _log.error("what an executor left is not cleared up", executor=executor.id, error=error.message)
            self._spools.look()

    def noticed(self, word: str, message: str) -> None:
        """Keep a notice for administrators; a later one of the same word replaces it."""
        _log.warning("notice", word=word, message=message)
        self._notices.pop(word, None)
        self._notices[word] = message

    def _somebody_there(self, session: SessionRow) -> bool:
        if self._parts.fanout.answering(session.id, session.owner):
            return True
        loop = self._loops.get(session.id)
        grace = self._parts.settings().permissions.return_grace
        return loop is not None and self._parts.clock() - loop.last_there < grace

    def _presence_changed(self) -> None:
        """Note for each session since when nobody is there, and look at its questions when the grace is over."""
        now = self._parts.clock()
        left: list[SessionLoop] = []
        for loop in self._loops.values():
            if self._parts.fanout.answering(loop.session, loop.owner):
                loop.last_there = math.inf
            elif loop.last_there == math.inf:
                loop.last_there = now
                left.append(loop)
        if left and self._tasks is not None:
            self._tasks.start_soon(self._nobody_came_back, left, now)

    async def _nobody_came_back(self, left: list[SessionLoop], since: float) -> None:
        await anyio.sleep(self._parts.settings().permissions.return_grace)
        for loop in left:
            if loop.last_there == since:
                try:
                    await self.approvals.nobody_left(loop.session)
                except HutchError as error:  # its expiry ends it
                    _log.error("a question waits on", session=loop.session, error=error.message)

    def _account(self, caller: Caller, wanted: str | None) -> Account:
        """Return the account that a caller's new session runs as."""
        own = self._parts.account_of(caller.uid)
        if self._parts.about.mode != "system":
            if wanted not in (None, own.name):
                raise HutchError(Reason.NOT_ALLOWED, f"This hutchd is {own.name}'s alone: it runs agents as no other.")
            return own
        if caller.uid == os.geteuid() and wanted in (None, own.name):
            return own
        accounts = self._parts.settings().accounts
        name = account_for(own.name, caller.uid, wanted, accounts, admin=caller.admin, uid_of=self._uid_of)
        account = own if name == own.name else self._parts.account_named(name)
        if account.uid == os.geteuid():
            raise HutchError(Reason.NOT_ALLOWED, f"{name} is the account of hutchd itself: no agent runs as it.")
        return account

    def _uid_of(self, name: str) -> int | None:
        try:
            return self._parts.account_named(name).uid
        except HutchError:
            return None

    def _refuse_too_many(self, tx: Tx, account: str) -> None:
        limit = self._parts.limits().sessions
        if limit is not None and sessions.count_open(tx, account) > limit:
            raise HutchError(
                Reason.OVERLOADED,
                f"{account} has {limit} open sessions, which is the limit ([limits] sessions): close some with `hutch"
                " stop`.",
            )

    async def _usual(self, caller: Caller) -> Walling:
        """Return what a session of the caller would have; of who can have none, what was tried last counts."""
        environment = self._parts.environments.default
        await environment.probe()
        try:
            walls = await environment.probe_sandbox(self._account(caller, None))
        except HutchError:
            walls = environment.last_probe()
        return usual(self._parts, environment, walls)

    def _refuse_when_draining(self) -> None:
        if self._draining:
            raise HutchError(Reason.SHUTTING_DOWN)

    async def _view(self, row: SessionRow, warning: str | None = None) -> m.Session:
        near = await self._parts.store.read(lambda conn: around(conn, row.id))
        return session_view(row, near, self._parts.store.journal, self._parts.pool.of_session(row.id), warning)

    async def _turn_of(self, caller: Caller, ref: str) -> tuple[SessionRow, TurnRow]:
        turn = await self._parts.store.read(lambda conn: turns.get(conn, ref))
        if turn is None:
            raise HutchError(Reason.NOT_FOUND)
        return await self._around(caller, turn.session), turn

    async def _around(self, caller: Caller, session: str) -> SessionRow:
        """Return the session of a turn or a question; one of another's is refused in the words for one that is not."""
        row = await self._parts.store.read(lambda conn: sessions.get(conn, session))
        if row is None:
            raise HutchError(Reason.NOT_FOUND)
        caller.demand(row.owner)
        return row

    async def _turn_view(self, turn: TurnRow) -> m.Turn:
        if turn.state in TURN.terminal:
            return turn_view(turn)
        asked = await self._parts.store.read(lambda conn: permissions.list_(conn, turn=turn.id))
        return turn_view(turn, len(asked))


def _audit(
    caller: Caller,
    row: SessionRow,
    action: str,
    outcome: str,
    *,
    subject: str | None = None,
    details: Mapping[str, str] | None = None,
) -> AuditRow:
    return AuditRow(
        at=now_ms(),
        owner=row.owner,
        actor=str(caller),
        action=action,
        outcome=outcome,
        session=row.id,
        subject=subject,
        details=dict(details) if details is not None else None,
    )


def _time(text: str | None) -> int | None:
    if text is None:
        return None
    try:
        return from_wire(text)
    except ValueError as error:
        raise HutchError(Reason.INVALID_PARAMS, f"The time cannot be read: {error}.") from error
