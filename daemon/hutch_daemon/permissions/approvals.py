"""Approvals: judges each tool call by the policy and, if the policy does not decide, asks a user.

A permission request is a stored record; it outlives the executor's call. What is always true:

- The first decision about a request is final (a compare-and-set in the store). The decision, its event and its audit
  line are one transaction. A later decision gets `already_settled` with the current record.
- A denial takes effect at once, even while the store cannot be written. It is stored as soon as possible.
- Only the judged input may run: a decision contains the digest of its input, and an edited input is judged again.
- A call is allowed only while its turn runs in the executor that asks. The transaction that records the permission
  checks this.
- An executor that asks again with the same id gets the stored decision, or waits for it. If a waiting call is
  cancelled, its request stays pending.
- When the policy changes, the pending requests that it concerns are judged again (`rejudging`).
- A request that no user decides expires (time asleep does not count), is denied because no user is present, or is
  withdrawn because its turn or executor ended. None of these stops the turn, unless the session's policy is `stop`.

`requests.next_step` decides what happens to a pending request; the task of `running` carries it out.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Final

import anyio
import structlog
from msgspec.structs import replace as replace_fields

from hutch_daemon.permissions import requests
from hutch_daemon.permissions.judging import CallJudge, PolicyOf, Requester
from hutch_daemon.permissions.pending import PendingAsks, UnstoredDenial
from hutch_daemon.permissions.rejudging import Rejudging
from hutch_daemon.permissions.requests import PendingRequest, Settlement, permission_view
from hutch_daemon.permissions.transactions import NotRecorded, RequestTransactions, turn_runs
from hutch_daemon.settings import PermissionSettings, SettingsInForce
from hutch_daemon.store import permissions, sessions
from hutch_daemon.store.records import Executes, Tx
from hutch_daemon.store.rows import PermissionRow, SessionRow
from hutch_daemon.store.store import Store
from hutch_shared import messages as m
from hutch_shared.backoff import Backoff
from hutch_shared.conditions import Conditions
from hutch_shared.digest import input_digest
from hutch_shared.errors import HutchError, Reason
from hutch_shared.ids import new_id
from hutch_shared.latch import Latch
from hutch_shared.times import now_ms
from hutch_shared.vocabulary import named_by_server

__all__ = ["Approvals"]

_log = structlog.get_logger(__name__)

_FIRST_PAUSE: Final = 0.5
_MAX_PAUSE: Final = 2.0
"""The longest pause, in seconds, between attempts to store a settlement while the store cannot be written."""


class Approvals:
    """All permission requests of this hutchd."""

    def __init__(
        self,
        store: Store,
        settings: SettingsInForce,
        policy_of: PolicyOf,
        *,
        somebody_there: Callable[[SessionRow], bool],
        stop_turn: Callable[[str, str, str], None],
        plan_approved: Callable[[Tx, str, str], None],
        plan_entered: Callable[[Tx, str], None],
        requester_of: Callable[[PermissionRow], Requester | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`somebody_there(session)` returns whether a client that can answer follows the session.

        `stop_turn(session, turn, why)` never blocks. `plan_approved(tx, session, by)` is called in the transaction
        that approves a plan, `plan_entered(tx, session)` in the one that lets the agent
        enter the mode `plan`. `requester_of(request)` returns the executor that asked, if it is connected.
        """
        self._store = store
        self._settings = settings
        self._policy_of = policy_of
        self._judge = CallJudge(store, policy_of)
        self._somebody_there = somebody_there
        self._stop_turn = stop_turn
        self._clock = clock
        self._pending = PendingAsks()
        self._transactions = RequestTransactions(self._pending, stop_turn, plan_approved, plan_entered)
        self._rejudging = Rejudging(store, policy_of, self._judge, self._pending, self._transactions, requester_of)
        self._changed = Latch()
        self._conditions = Conditions(logging.getLogger(__name__))
        self._tasks: anyio.abc.TaskGroup | None = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """While the block runs, settle requests when they become due. Start with the requests pending in the store.

        Leaving the block settles nothing.
        """
        await self._take_up_pending()
        async with anyio.create_task_group() as tasks:
            self._tasks = tasks
            tasks.start_soon(self._run)
            tasks.start_soon(self._rejudging.run)
            try:
                yield
            finally:
                tasks.cancel_scope.cancel()

    async def _take_up_pending(self) -> None:
        """Add the requests that an earlier hutchd recorded.

        A new boot has a new monotonic clock, so the wall clock gives the time that each request has left: at least
        `return_grace`, at most the whole expiry. Clients have `return_grace` to reconnect before hutchd checks for
        presence.
        All are judged again, since the policy may have changed meanwhile.
        """
        settings, now = self._settings.current.permissions, self._clock()

        def waiting(conn: Executes) -> list[tuple[PermissionRow, int]]:
            rows = permissions.list_(conn, state="pending", limit=1_000_000)
            owners = {one.id: one.owner for id_ in {row.session for row in rows} if (one := sessions.get(conn, id_))}
            return [(row, owners[row.session]) for row in rows]

        for row, owner in await self._store.read(waiting):
            left = settings.expiry if row.expires_at is None else (row.expires_at - now_ms()) / 1000
            deadline = now + min(max(left, settings.return_grace), settings.expiry)
            grace_ends = now + settings.return_grace
            self._pending.add(
                PendingRequest(
                    row,
                    deadline,
                    grace_ends,
                    notified=bool(settings.notify),
                    owner=owner,
                    is_stale=True,
                    may_be_allowed=False,
                )
            )

    def session_changed(self, session: str) -> None:
        """Judge the pending requests of a session again: its project's policy file changed. Never blocks."""
        self._rejudging.session_changed(session)

    async def look_at_host(self) -> bool:
        """Judge all pending requests again if the host's policy file changed; return whether none is being judged.

        hutchd does so by itself every two seconds.
        """
        await self._rejudging.look_at_host()
        return self._rejudging.is_current()

    # ------------------------------------------------------------ asking

    async def ask(self, session: SessionRow, requester: Requester, params: m.RequestPermission) -> m.PermissionDecision:
        """Return the decision about one call: the policy's at once, or a user's as soon as it is made.

        If the call is cancelled (the connection broke), the request stays pending, and the executor can ask again with
        the same id.
        """
        params = replace_fields(params, call=named_by_server(params.call, session.options.mcp_servers))
        digest = input_digest(params.call.agent_tool, params.call.input)
        runs, made = await self._store.read(
            lambda conn: (turn_runs(conn, requester.id, params), permissions.by_ask(conn, requester.id, params.ask))
        )
        if not runs:
            return requests.too_late(params, digest)
        if made is not None:
            if (made.turn, made.kind, made.digest) != (params.turn, params.kind, digest):
                raise HutchError(Reason.CONFLICT, "The same ask id was used before for another call.")
            self._policy_of.note_project(session.id, params.project, asked_again=True)
            self._rejudging.asked_again(made.id)
            return await self._decision(made)
        self._policy_of.note_project(session.id, params.project)
        while (decided := await self._judge_and_record(session, requester, params, digest)) == "changed":
            pass  # the policy changed after the verdict
        if decided == "ended":
            return requests.too_late(params, digest)
        return await self._decision(decided) if isinstance(decided, PermissionRow) else decided

    async def _judge_and_record(
        self, session: SessionRow, requester: Requester, params: m.RequestPermission, digest: str
    ) -> m.PermissionDecision | PermissionRow | NotRecorded:
        """Return the policy's decision or the recorded request; or why nothing could be recorded."""
        generation = self._rejudging.generation
        judged = await self._judge.judge(session, requester, params.kind, params.call, params.cwd)
        if judged.verdict.decision != "ask":
            record = partial(self._transactions.record_verdict, executor=requester.id, params=params)
            refused = await self._store.write(partial(record, judged=judged, digest=digest))
            return refused or requests.decided_by_policy(params, judged.verdict, digest)
        settings = self._settings.current.permissions
        row = requests.new_request(
            params,
            judged.verdict,
            id_=new_id("permission"),
            executor=requester.id,
            digest=digest,
            now=now_ms(),
            expiry=settings.expiry,
        )
        wait = partial(self._wait_for, settings=settings, owner=session.owner, generation=generation)
        kept = await self._store.write(
            partial(self._transactions.record_request, row=row, params=params, judged=judged, after=wait)
        )
        if isinstance(kept, PermissionRow) and kept.id == row.id and settings.notify and self._tasks is not None:
            self._tasks.start_soon(self._notify, requester, kept)
        return kept

    def _wait_for(self, row: PermissionRow, settings: PermissionSettings, owner: int, generation: int) -> None:
        now = self._clock()
        request = PendingRequest(row, now + settings.expiry, now, notified=bool(settings.notify), owner=owner)
        self._pending.add(request)
        self._rejudging.added(request, generation)
        self._changed.notify()

    async def _decision(self, row: PermissionRow) -> m.PermissionDecision:
        """Return the decision about a request as soon as there is one."""
        looks = 0
        while row.state == "pending":
            if (settled := await self._pending.settled(row.id)) is not None:
                row = settled
                break
            # The row was read after its commit, but before the commit's callbacks added it to `_pending`. A write
            # returns after the callbacks of all earlier commits, so read the row again in a write.
            looks += 1
            assert looks < 3, "a pending request is in memory"
            now = await self._store.write(partial(permissions.get, permission=row.id))
            if now is None:
                raise HutchError(Reason.NOT_FOUND)
            row = now
        return requests.standing(row)

    async def _notify(self, requester: Requester, row: PermissionRow) -> None:
        """Run the notify command. If it fails, the session's policy for an absent user applies."""
        try:
            done = await requester.notify_somebody(permission_view(row))
        except HutchError as error:
            done = m.Notified(ok=False, detail=error.message)
        if done.ok:
            return
        _log.warning("nobody could be notified", permission=row.id, detail=done.detail)
        for request in self._pending:
            if request.row.id == row.id:
                request.notified, request.presence_due = False, self._clock()
        self._changed.notify()

    # ------------------------------------------------------------ deciding

    async def get(self, permission: str) -> PermissionRow:
        """Return the current record of a request; `not_found`."""
        found = await self._store.read(lambda conn: permissions.get(conn, permission))
        if found is None:
            raise HutchError(Reason.NOT_FOUND)
        denial = self._pending.denial(permission)
        return found if denial is None else denial.row

    async def decide(
        self, session: SessionRow, requester: Requester | None, by: str, params: m.AnswerPermission
    ) -> m.Permission:
        """Decide a request; `by` names the user in the record. An edited input is judged first; its digest is recorded.

        Raises, without deciding anything: `not_found`; `already_settled`, with the current record; `invalid_params` if
        the decision does not fit the request; `policy_forbids` if a rule denies the edited input; `invalid_rule`.
        """
        row = await self.get(params.permission)
        requests.check_answer(row, params)
        settled, won = row, False
        while not won and settled.state == "pending":  # again if the policy changed after the edited input was judged
            edited = None
            if params.updated_input is not None:
                edited = await self._judge.judge_edited(session, requester, row, params.updated_input)
            version = None if edited is None else edited.version
            if edited is not None and edited.digest == row.digest:
                edited = None  # the user changed nothing
            rule = requests.rule_of_answer(session, row, params, now_ms())
            settlement = requests.settlement_of_answer(row, params, by, edited, rule)
            try:
                settled, won = await self._store.write(
                    partial(self._transactions.settle, permission=row.id, settlement=settlement, version=version)
                )
            except HutchError as error:
                if error.reason is not Reason.STORE_UNAVAILABLE or params.decision != "deny":
                    raise
                settled, won = await self._deny_unstored(row, settlement)
            if version is None:
                break
        if not won:
            raise requests.already_settled(settled)
        return permission_view(settled)

    async def _deny_unstored(self, row: PermissionRow, settlement: Settlement) -> tuple[PermissionRow, bool]:
        """Keep a denial in memory until it can be stored. If hutchd dies before that, the request is pending again."""
        if row.id not in self._pending:  # an earlier decision was stored
            return await self.get(row.id), False
        denied = settlement.applied_to(row, now_ms())
        self._pending.deny(UnstoredDenial(denied, replace(settlement, stop_reason=None)))
        if settlement.stop_reason is not None:
            self._stop_turn(row.session, row.turn, settlement.stop_reason)
        self._changed.notify()
        return denied, True

    # ------------------------------------------------------------ settling without a user

    def withdraw(self, tx: Tx, turn: str, why: str) -> None:
        """Withdraw a turn's pending requests in the transaction that ends the turn. An unstored denial comes first."""
        for row in permissions.list_(tx, turn=turn, state="pending", limit=1_000_000):
            self._transactions.settle(tx, row.id, requests.withdrawn(why))

    async def withdraw_of(self, executor: str, why: str) -> None:
        """Withdraw the pending requests of an executor."""
        for request in self._pending:
            if request.row.executor == executor:
                await self._carry_out(request.row, requests.withdrawn(why))

    async def nobody_left(self, session: str) -> None:
        """Apply the session's policy for an absent user to its pending requests."""
        for request in self._pending:
            if request.row.session == session:
                request.presence_due = self._clock()
        await self.settle_due()

    async def settle_due(self) -> float:
        """Store the unstored denials and settle the requests that are due; return when the next request is due.

        STORE_UNAVAILABLE if the store cannot be written; the unsettled requests stay due.
        """
        for denial in self._pending.denials():
            await self._carry_out(denial.row, denial.settlement)
        next_one = math.inf
        for request in self._pending:
            step = await self._next_step(request)
            if isinstance(step, Settlement):
                await self._carry_out(request.row, step)
            else:
                next_one = min(next_one, step.at)
        return next_one

    async def _next_step(self, request: PendingRequest) -> Settlement | requests.DueAt:
        now = self._clock()
        when_nobody: m.WhenNobody = "wait"
        if request.presence_due <= now:
            session = await self._store.read(lambda conn: sessions.get(conn, request.row.session))
            if session is not None and not self._somebody_there(session):
                when_nobody = session.when_nobody
        step = requests.next_step(request, now, when_nobody)
        if isinstance(step, requests.DueAt) and request.presence_due <= now:
            request.presence_due = math.inf
        return step

    async def _carry_out(self, row: PermissionRow, settlement: Settlement) -> None:
        """Settle a request. If its record was removed, still wake the executor's call with the settlement."""
        try:
            await self._store.write(partial(self._transactions.settle, permission=row.id, settlement=settlement))
        except HutchError as error:
            if error.reason is not Reason.NOT_FOUND:
                raise
            self._pending.settle(settlement.applied_to(row, now_ms()))

    async def _run(self) -> None:
        """Settle requests when they become due. If the store cannot be written, retry after growing pauses."""
        backoff = Backoff(_FIRST_PAUSE, _MAX_PAUSE)
        while True:
            try:
                until = await self.settle_due()
            except HutchError as error:
                self._conditions.failed("permission requests cannot be settled", error)
                await anyio.sleep(backoff.next())
                continue
            backoff.reset()
            self._conditions.end("permission requests cannot be settled", "permission requests are settled again")
            with anyio.move_on_after(max(0.0, until - self._clock())):
                await self._changed.wait()
