"""Judges pending requests again when the policy changes, so that no user is asked about a decided call.

The policy of a request changes with its owner's rules and trusted files, its session's mode and grants, its project's
file and the host's file. Each change marks the requests that it may concern as stale; each session with stale requests
has a task that judges them, one after the other. What is always true:

- A request is settled only by a verdict that no noticed change has overtaken: the transaction checks that.
- A change that arrives while a request is judged marks it as stale again. A change that arrives between the first
  verdict on a call and the record of its request does so too (`generation`), or makes the call be judged once more.
- Without the executor that asked no path is resolved, so nothing is allowed; a denial needs no paths.
- Questions and plans are never allowed, but a rule or the mode `unattended` may deny them.
- While the store cannot be written, the requests stay pending and stale; they are judged again after growing pauses.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from functools import partial
from typing import Final

import anyio
from anyio.abc import TaskGroup

from hutch_daemon.permissions import requests
from hutch_daemon.permissions.judging import CallJudge, PolicyOf, Requester
from hutch_daemon.permissions.pending import PendingAsks
from hutch_daemon.permissions.requests import PendingRequest
from hutch_daemon.permissions.transactions import RequestTransactions
from hutch_daemon.store import sessions
from hutch_daemon.store.rows import PermissionRow
from hutch_daemon.store.store import Store
from hutch_shared.backoff import Backoff
from hutch_shared.conditions import Conditions
from hutch_shared.errors import HutchError, Reason
from hutch_shared.latch import Latch

__all__ = ["Rejudging"]


_HOST_FILE: Final = 2.0
"""Seconds between looks at the host's policy file while a request is pending."""
_TRANSIENT: Final = frozenset({Reason.STORE_UNAVAILABLE, Reason.TIMED_OUT, Reason.OVERLOADED})
"""Errors after which a request is judged again without another change."""
_FIRST_PAUSE: Final = 0.5
_MAX_PAUSE: Final = 2.0


class Rejudging:
    """Marks pending requests as stale, and judges them."""

    def __init__(
        self,
        store: Store,
        policy_of: PolicyOf,
        judge: CallJudge,
        pending: PendingAsks,
        transactions: RequestTransactions,
        requester_of: Callable[[PermissionRow], Requester | None],
    ) -> None:
        """`requester_of(request)` returns the executor that asked, if it is connected."""
        self._store = store
        self._policy_of = policy_of
        self._judge = judge
        self._pending = pending
        self._transactions = transactions
        self._requester_of = requester_of
        self._active: set[str] = set()
        """The sessions that have a task."""
        self._changed = Latch()
        self._conditions = Conditions(logging.getLogger(__name__))
        self.generation = 0
        """Counts the changes of files, which the store does not count. Read it before a call is judged."""
        store.policy_changed.subscribe(self._owner_changed)

    # ------------------------------------------------------------ marking; on the event loop, never blocks

    def added(self, request: PendingRequest, generation: int) -> None:
        """Take up a request that was just added; `generation` was read before it was judged."""
        request.is_stale = request.is_stale or generation != self.generation
        self._changed.notify()

    def asked_again(self, permission: str) -> None:
        """Judge a request again whose executor asked again: its paths can be resolved, and its project is known."""
        request = self._pending.get(permission)
        if request is not None:
            request.may_be_allowed = request.is_stale = True
            self._changed.notify()

    def session_changed(self, session: str) -> None:
        """Judge the requests of a session again: its project's file changed."""
        self.generation += 1
        self._mark(lambda request: request.row.session == session)

    def _owner_changed(self, owner: int) -> None:
        self._mark(lambda request: request.owner == owner)

    def _mark(self, concerns: Callable[[PendingRequest], bool]) -> None:
        for request in self._pending:
            if concerns(request):
                request.is_stale = True
        self._changed.notify()

    def is_current(self) -> bool:
        """Return whether every pending request was judged after the last change that was noticed."""
        return not self._active and not any(request.is_stale for request in self._pending)

    # ------------------------------------------------------------ judging

    async def run(self) -> None:
        """Judge stale requests until cancelled."""
        async with anyio.create_task_group() as tasks:
            while True:
                await self.look_at_host()
                self._start_tasks(tasks)
                with anyio.move_on_after(_HOST_FILE if self._pending else math.inf):
                    await self._changed.wait()

    async def look_at_host(self) -> None:
        """Mark all requests as stale if the host's policy file has changed since the last look."""
        if self._pending and await self._policy_of.check_host_file():
            self.generation += 1
            self._mark(lambda _: True)

    def _start_tasks(self, tasks: TaskGroup) -> None:
        for session in {request.row.session for request in self._pending if request.is_stale} - self._active:
            self._active.add(session)
            tasks.start_soon(self._judge_session, session)

    async def _judge_session(self, session: str) -> None:
        """Judge the stale requests of a session until it has none."""
        backoff = Backoff(_FIRST_PAUSE, _MAX_PAUSE)
        try:
            while stale := [one for one in self._pending if one.is_stale and one.row.session == session]:
                for request in stale:
                    await self._judge_again(request, backoff)
        finally:
            self._active.discard(session)

    async def _judge_again(self, request: PendingRequest, backoff: Backoff) -> None:
        request.is_stale = False
        try:
            await self._settle_if_decided(request)
            self._conditions.end("pending requests are not judged again", "pending requests are judged again")
        except HutchError as error:
            if error.reason is Reason.NOT_FOUND:  # its session was removed
                return
            self._conditions.failed("pending requests are not judged again", error)
            if error.reason in _TRANSIENT:
                request.is_stale = True
                await anyio.sleep(backoff.next())

    async def _settle_if_decided(self, request: PendingRequest) -> None:
        row, requester = request.row, self._requester_of(request.row)
        session = await self._store.read(lambda conn: sessions.get(conn, row.session))
        if session is None or row.id not in self._pending:
            return
        judged = await self._judge.judge(session, requester, row.kind, row.call, row.cwd)
        decision = judged.verdict.decision
        if decision == "ask" or (decision == "allow" and (requester is None or not request.may_be_allowed)):
            return
        settlement = requests.settled_by_policy(judged.verdict, judged.session.permission_mode, row.digest)
        settle = partial(self._transactions.settle, permission=row.id, settlement=settlement)
        now, won = await self._store.write(partial(settle, version=judged.version, overtaken=lambda: request.is_stale))
        if not won and now.state == "pending":
            request.is_stale = True
