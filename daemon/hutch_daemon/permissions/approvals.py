"""The desk: where a tool call is put to the policy and, when the policy does not settle it, to a person.

A question is a record, not a call in flight. What is always true:

- One decision per question, the first one (a compare-and-set in the store); the decision, its event and its line in the
  audit are one transaction. Who comes later gets `already_settled` with what stands.
- A deny holds at once, also while nothing can be stored: nothing runs by it. It is stored as soon as that is possible.
- What was judged is what may run: a decision names the digest of its input, and an edited input is judged again.
- Only a turn that runs, in the executor that runs it, gets leave for anything: that is looked at where it is recorded.
- An ask that comes again with the same id gets the stored decision or waits on; a waiting ask that is cancelled leaves
  its question pending. A question ends otherwise by its expiry (awake time), by nobody being there, or is withdrawn
  because its turn or executor ended. None of these ends a turn by itself, except `stop`, which says so.
"""

from __future__ import annotations

import math
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, Protocol

import anyio
import msgspec
import structlog

from hutch_daemon.permissions.layers import Policy
from hutch_daemon.permissions.policy import Verdict, judge, paths_to_resolve
from hutch_daemon.permissions.rules import BadRuleError, parse_rule
from hutch_daemon.settings import PermissionSettings
from hutch_daemon.store import audit, permissions, rules, sessions, turns
from hutch_daemon.store.records import Executes
from hutch_daemon.store.rows import PermissionRow, RuleRow, SessionRow
from hutch_daemon.store.store import Store, Tx
from hutch_shared import messages as m
from hutch_shared.digest import input_digest
from hutch_shared.errors import HutchError, Reason
from hutch_shared.events import EventKind, PermissionAsked, PermissionSettled
from hutch_shared.failpoints import failpoint
from hutch_shared.ids import new_id
from hutch_shared.rpc.envelope import is_sound
from hutch_shared.times import now_ms, to_wire
from hutch_shared.vocabulary import to_call

__all__ = ["Asker", "Desk", "Journal", "PolicyOf", "permission_view"]

_log = structlog.get_logger(__name__)

_STORE_AGAIN: Final = 0.5
"""Seconds until what could not be stored is tried again."""
_IN_PAGE: Final = b'[[[{"data":{"permission":%b}}]]]'
"""As deep as a question ever lies in a frame: clients take none that is deeper than the wire allows."""
_FINAL: Final[dict[m.PermissionState, m.Decision]] = {
    "allowed": "allow",
    "answered": "answer",
    "denied": "deny",
    "expired": "deny",
    "withdrawn": "deny",
}


class Journal(Protocol):
    """Where the desk's own events go, in the transaction of what they tell."""

    def append(self, tx: Tx, session: str, turn: str | None, kind: EventKind, data: msgspec.Struct) -> Any: ...


class Asker(Protocol):
    """The executor that asks, for what only its account can do."""

    @property
    def id(self) -> str: ...

    async def real_paths(self, session: str, paths: tuple[str, ...]) -> Mapping[str, str]:
        """Resolve paths as the account; a path that cannot be is missing."""

    async def notify_somebody(self, question: m.Permission) -> m.Notified:
        """Run the notify command as the account."""


class PolicyOf(Protocol):
    """The policy in force for a session now, its project's file included."""

    def home_of(self, session: SessionRow) -> str: ...

    async def __call__(self, session: SessionRow, project: m.ProjectFile | None) -> Policy: ...


def permission_view(row: PermissionRow) -> m.Permission:
    """Return a question as clients see it."""
    return m.Permission(
        id=row.id,
        session=row.session,
        turn=row.turn,
        kind=row.kind,
        state=row.state,
        asked_at=to_wire(row.asked_at),
        call=row.call,
        digest=row.digest,
        expires_at=to_wire(row.expires_at) if row.expires_at is not None else None,
        why=row.why,
        rule=row.rule,
        layer=row.layer,
        questions=row.questions,
        plan=row.plan,
        suggestions=row.suggestions,
        settled_at=to_wire(row.settled_at) if row.settled_at is not None else None,
        settled_by=row.settled_by,
        scope=row.scope,
        message=row.message,
        updated_input=row.updated_input,
        decided_digest=row.decided_digest,
        answers=row.answers,
    )


@dataclass(slots=True, eq=False)
class _Waiting:
    """A pending question in memory."""

    row: PermissionRow
    deadline: float
    """On the desk's clock."""
    notified: bool = False
    settled: anyio.Event = field(default_factory=anyio.Event)


_Decide = Callable[[Tx], tuple[PermissionRow, bool]]
"""A decision as a unit of work: the question as it stands then, and whether this decided it."""


@dataclass(frozen=True, slots=True)
class _Unstored:
    """A deny that holds and could not be stored yet."""

    row: PermissionRow
    decide: _Decide


class Desk:
    """All pending questions of this hutchd."""

    def __init__(
        self,
        store: Store,
        journal: Journal,
        settings: Callable[[], PermissionSettings],
        policy_of: PolicyOf,
        *,
        somebody_there: Callable[[SessionRow], bool],
        stop_turn: Callable[[str, str, str], None],
        plan_approved: Callable[[Tx, str, str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`somebody_there`: a client that can answer follows it. `stop_turn(session, turn, why)` must not block.

        `plan_approved(tx, session, by)` belongs to the transaction that approves a plan.
        """
        self._store = store
        self._journal = journal
        self._settings = settings
        self._policy_of = policy_of
        self._somebody_there = somebody_there
        self._stop_turn = stop_turn
        self._plan_approved = plan_approved
        self._clock = clock
        self._waiting: dict[str, _Waiting] = {}
        self._unstored: dict[str, _Unstored] = {}
        """What was denied while nothing could be stored."""
        self._news = anyio.Event()
        self._tasks: anyio.abc.TaskGroup | None = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Take up the questions that wait in the store and keep the clock of all; leaving settles nothing."""
        await self._take_up_waiting()
        async with anyio.create_task_group() as tasks:
            self._tasks = tasks
            tasks.start_soon(self._watch_expiry)
            tasks.start_soon(self._nobody_came_back)
            try:
                yield
            finally:
                tasks.cancel_scope.cancel()

    async def _take_up_waiting(self) -> None:
        """Keep in memory, too, the questions that the store has waiting from before this boot."""
        settings = self._settings()
        for row in await self._store.read(lambda conn: permissions.list_(conn, state="pending", limit=1_000_000)):
            # Where this boot's clock stood when it was asked is not kept: what the calendar says, within the bounds.
            left = settings.expiry if row.expires_at is None else (row.expires_at - now_ms()) / 1000
            self._waiting[row.id] = _Waiting(
                row, self._clock() + min(max(left, 1.0), settings.expiry), notified=bool(settings.notify)
            )

    # ------------------------------------------------------------ asking

    async def ask(self, session: SessionRow, asker: Asker, params: m.RequestPermission) -> m.PermissionDecision:
        """Return what stands for one call: by the policy at once, else when somebody decided.

        Cancelled (the connection broke), the question stays and the same ask can be made again.
        """
        digest = input_digest(params.call.agent_tool, params.call.input)
        runs, made = await self._store.read(
            lambda conn: (_runs(conn, asker, params), permissions.by_ask(conn, asker.id, params.ask))
        )
        if not runs:
            return _too_late(params, digest)
        if made is not None:
            if (made.turn, made.kind, made.digest) != (params.turn, params.kind, digest):
                raise HutchError(Reason.CONFLICT, "The same ask was made before about something else.")
            await self._policy_of(session, params.project)  # its project's file: a restarted hutchd does not know it
            return await self._outcome(made)
        session, verdict = await self._judge(session, asker, params.call, params.cwd, params.project)
        decision = verdict.decision
        if params.kind != "tool" and decision == "allow":
            decision = "ask"  # a rule may let an agent ask; it cannot answer
        if decision != "ask":

            def record(tx: Tx) -> bool:
                if runs := _runs(tx, asker, params):
                    _record_verdict(tx, session, params, verdict, digest)
                return runs

            if not await self._store.write(record):
                return _too_late(params, digest)
            return m.PermissionDecision(
                decision=decision,
                state="allowed" if decision == "allow" else "denied",
                input=params.call.input,
                digest=digest,
                message=None if decision == "allow" else f"Denied: {verdict.why}",
            )
        settings = self._settings()
        now = now_ms()
        row = PermissionRow(
            id=new_id("permission"),
            session=session.id,
            turn=params.turn,
            executor=asker.id,
            ask=params.ask,
            kind=params.kind,
            asked_at=now,
            call=params.call,
            cwd=params.cwd,
            digest=digest,
            expires_at=now + int(settings.expiry * 1000),
            why=verdict.why,
            rule=verdict.rule,
            layer=verdict.layer,
            questions=params.questions,
            plan=params.plan,
            suggestions=tuple(verdict.suggestions),
        )

        if not is_sound(_IN_PAGE % msgspec.json.encode(permission_view(row))):
            raise HutchError(Reason.INVALID_PARAMS, "The call is nested too deeply to be shown to whoever decides.")

        def keep(tx: Tx) -> PermissionRow | None:
            if not _runs(tx, asker, params):
                return None
            kept, fresh = permissions.insert(tx, row)
            if fresh:
                asked = PermissionAsked(msgspec.to_builtins(permission_view(kept)))
                self._journal.append(tx, kept.session, kept.turn, "permission_asked", asked)
            return kept

        # Waiting begins before the write: cancelled in it, the question is stored all the same and must end some day.
        waiting = _Waiting(row, self._clock() + settings.expiry, notified=bool(settings.notify))
        self._waiting[row.id] = waiting
        self._news.set()
        try:
            kept = await self._store.write(keep)
        except HutchError:
            del self._waiting[row.id]
            raise
        if kept is None or kept.id != row.id:
            del self._waiting[row.id]
            return _too_late(params, digest) if kept is None else await self._outcome(kept)
        if settings.notify and self._tasks is not None:
            self._tasks.start_soon(self._notify, asker, waiting)
        await self._nobody_there(session, row.id)
        return await self._outcome(row)

    async def _judge(
        self, session: SessionRow, asker: Asker, call: m.ToolCall, cwd: str, project: m.ProjectFile | None
    ) -> tuple[SessionRow, Verdict]:
        """Judge by the rules and the mode as they are when the account has said what the paths lead to."""
        paths = paths_to_resolve(call, cwd, self._policy_of.home_of(session))
        real = await asker.real_paths(session.id, paths) if paths else {}
        now: SessionRow | None = await self._store.read(lambda conn: sessions.get(conn, session.id))
        session = now or session
        policy = await self._policy_of(session, project)
        return session, judge(
            policy,
            call,
            mode=session.permission_mode,
            cwd=cwd,
            real=real,
            home=policy.home,
            workspace=session.cwd,
        )

    async def _outcome(self, row: PermissionRow) -> m.PermissionDecision:
        waiting, unstored = self._waiting.get(row.id), self._unstored.get(row.id)
        if unstored is not None:
            row = unstored.row
        elif waiting is not None:
            await waiting.settled.wait()
            row = waiting.row
        elif row.state == "pending":  # settled since it was read: what is not settled is in memory
            row = await self.question(row.id)
            assert row.state != "pending"
        return m.PermissionDecision(
            decision=_FINAL[row.state],
            state=row.state,
            input=row.updated_input if row.updated_input is not None else row.call.input,
            digest=row.decided_digest or row.digest,
            message=row.message,
            interrupt=row.interrupt or row.state == "withdrawn",  # the turn is over: nothing follows the answer
            answers=row.answers,
        )

    async def _notify(self, asker: Asker, waiting: _Waiting) -> None:
        """Run the notify command; where it fails nobody was told, and the policy for that applies."""
        try:
            told = await asker.notify_somebody(permission_view(waiting.row))
        except HutchError as error:
            told = m.Notified(ok=False, detail=error.message)
        if not told.ok:
            _log.warning("nobody could be notified", permission=waiting.row.id, detail=told.detail)
            waiting.notified = False
            try:
                await self.nobody_left(waiting.row.session)
            except HutchError as error:  # its expiry ends it
                _log.error("a question waits on", permission=waiting.row.id, error=error.message)

    # ------------------------------------------------------------ settling

    async def question(self, permission: str) -> PermissionRow:
        """Return a question as it stands; `not_found`."""
        found: PermissionRow | None = await self._store.read(lambda conn: permissions.get(conn, permission))
        if found is None:
            raise HutchError(Reason.NOT_FOUND)
        unstored = self._unstored.get(permission)
        return found if unstored is None else unstored.row

    async def settle(
        self, session: SessionRow, asker: Asker | None, by: str, params: m.AnswerPermission
    ) -> m.Permission:
        """Decide a question; `by` names who, for the record. An edited input is judged and its digest stands.

        `not_found`; `already_settled` with the question as it stands; `invalid_params` when the decision does not fit
        the question; `policy_forbids` when a rule denies the edited input; `invalid_rule`. Then nothing was decided.
        """
        row = await self.question(params.permission)
        if row.state != "pending":
            raise _already(row)
        if params.decision == "answer" and row.kind != "question":
            raise HutchError(Reason.INVALID_PARAMS, f"A {row.kind} is allowed or denied; there is nothing to answer.")
        if params.interrupt and params.decision != "deny":
            raise HutchError(Reason.INVALID_PARAMS, "What is to go on cannot be stopped: `interrupt` goes with `deny`.")
        if params.decision == "allow" and row.kind == "question":
            raise HutchError(Reason.INVALID_PARAMS, "A question wants answers: the decision `answer` with `answers`.")
        digest = row.digest
        if params.updated_input is not None:
            digest = await self._judge_again(session, asker, row, params.updated_input)
        rule = self._rule_of(session, row, params)
        states: dict[m.Decision, m.PermissionState] = {"allow": "allowed", "deny": "denied", "answer": "answered"}
        decide = partial(
            self._decide,
            permission=row.id,
            state=states[params.decision],
            by=by,
            rule=rule,
            scope=params.scope,
            message=params.message,
            interrupt=params.interrupt,
            updated_input=params.updated_input,
            decided_digest=digest,
            answers=params.answers,
        )
        try:
            settled, won = await self._carry_out(decide)
        except HutchError as error:
            if error.reason is not Reason.STORE_UNAVAILABLE or params.decision != "deny":
                raise
            settled, won = await self._deny_unstored(row, by, params, decide)
        if not won:
            raise _already(settled)
        if params.interrupt:
            self._stop_turn(row.session, row.turn, f"{by} denied and stopped")
        return permission_view(settled)

    async def _judge_again(
        self, session: SessionRow, asker: Asker | None, row: PermissionRow, updated: dict[str, Any]
    ) -> str:
        call = to_call(row.call.agent_tool, updated, row.call.call_id, row.cwd)
        if call.action != row.call.action:
            raise HutchError(Reason.INVALID_PARAMS, f"An edited input of {row.call.agent_tool} cannot be judged here.")
        if asker is None:  # what its paths lead to is the account's to say
            raise HutchError(Reason.CONNECTION_LOST, "The executor is away, so that an edited input cannot be judged.")
        _, verdict = await self._judge(session, asker, call, row.cwd, None)
        if verdict.decision == "deny":
            raise HutchError(
                Reason.POLICY_FORBIDS, f"The edited input is not allowed: {verdict.why}", rule=verdict.rule
            )
        return input_digest(row.call.agent_tool, updated)

    def _rule_of(self, session: SessionRow, row: PermissionRow, params: m.AnswerPermission) -> RuleRow | None:
        """Return the rule that the answer adds; None for one that holds once."""
        if params.scope == "once" or params.decision == "answer":
            return None
        text = params.rule or (row.suggestions[0].rule if row.suggestions else None)
        if text is None:
            raise HutchError(Reason.INVALID_PARAMS, "There is no safe rule to suggest here: give one with `rule`.")
        effect = params.decision
        try:
            parse_rule(text, effect, "answered", "answer", base=session.cwd, home="/")
        except BadRuleError as error:
            raise HutchError(Reason.INVALID_RULE, f"The rule {text!r} cannot be used: {error}") from error
        return RuleRow(
            owner=session.owner,
            effect=effect,
            rule=text,
            created_at=now_ms(),
            project=session.cwd if params.scope == "always" else None,
            session=session.id if params.scope == "session" else None,
            origin=f"answered to {row.id}",
        )

    async def _settle(
        self, row: PermissionRow, state: m.PermissionState, by: str, *, rule: RuleRow | None = None, **fields: Any
    ) -> tuple[PermissionRow, bool]:
        return await self._carry_out(partial(self._decide, permission=row.id, state=state, by=by, rule=rule, **fields))

    async def _carry_out(self, decide: _Decide) -> tuple[PermissionRow, bool]:
        with anyio.CancelScope(shield=True):  # it is decided all the same when its caller goes: then tell, too
            settled, won = await self._store.write(decide)
            self._tell(settled)
        return settled, won

    def _decide(
        self, tx: Tx, permission: str, state: m.PermissionState, by: str, *, rule: RuleRow | None = None, **fields: Any
    ) -> tuple[PermissionRow, bool]:
        """Settle in a unit of work: the record, its event, the rule it adds and its line in the audit."""
        row, won = permissions.settle(tx, permission, state, settled_at=now_ms(), settled_by=by, **fields)
        if won:
            told = PermissionSettled(row.id, row.state, by, row.message)
            self._journal.append(tx, row.session, row.turn, "permission_settled", told)
            if rule is not None:
                rules.add(tx, rule)
            if row.kind == "plan" and state == "allowed":
                self._plan_approved(tx, row.session, by)
            owner = tx.execute("SELECT owner FROM sessions WHERE id = ?", (row.session,)).fetchone()[0]
            audit.record(
                tx,
                actor=by,
                owner=owner,
                action="permission",
                outcome=state,
                session=row.session,
                subject=row.id,
                rule=rule.rule if rule is not None else row.rule,
                digest=row.decided_digest or row.digest,
                details={"tool": row.call.agent_tool, "kind": row.kind, "scope": row.scope or "once"},
            )
            failpoint("desk.settle")
        return row, won

    async def _deny_unstored(
        self,
        row: PermissionRow,
        by: str,
        params: m.AnswerPermission,
        decide: _Decide,
    ) -> tuple[PermissionRow, bool]:
        """Let a deny hold now, in memory, and have it stored later. If hutchd dies before, the question waits again."""
        if row.id not in self._waiting:  # somebody was quicker
            return await self.question(row.id), False
        assert self._tasks is not None, "the desk runs"
        denied = replace(
            row,
            state="denied",
            settled_at=now_ms(),
            settled_by=by,
            scope=params.scope,
            message=params.message,
            interrupt=params.interrupt,
        )
        self._unstored[row.id] = _Unstored(denied, decide)
        self._tell(denied)
        self._tasks.start_soon(self._store_later, row.id)
        return denied, True

    async def _store_later(self, permission: str) -> None:
        while permission in self._unstored:
            await anyio.sleep(_STORE_AGAIN)
            try:
                await self._carry_out(self._unstored[permission].decide)
            except HutchError as error:
                if error.reason is Reason.STORE_UNAVAILABLE:
                    continue
                _log.error("a deny is not stored", permission=permission, error=error.message)
            del self._unstored[permission]

    def _tell(self, row: PermissionRow) -> None:
        waiting = self._waiting.pop(row.id, None)
        if waiting is not None:
            waiting.row = row
            waiting.settled.set()

    # ------------------------------------------------------------ ends without a person

    def withdraw(self, tx: Tx, turn: str, why: str) -> list[PermissionRow]:
        """Withdraw what a turn still asks, in the transaction that ends it; give the result to `withdrawn`."""
        settled = []
        for row in permissions.list_(tx, turn=turn, state="pending", limit=1_000_000):
            unstored = self._unstored.get(row.id)  # a deny that was first
            if unstored is not None:
                settled.append(unstored.decide(tx)[0])
            else:
                settled.append(self._decide(tx, row.id, "withdrawn", why, message=f"Withdrawn: {why}.")[0])
        return settled

    def withdrawn(self, rows: list[PermissionRow]) -> None:
        """Let go who waits for questions whose withdrawal is durable."""
        for row in rows:
            self._tell(row)

    async def withdraw_of(self, executor: str, why: str) -> None:
        """Withdraw all that an executor asks."""
        for waiting in [one for one in self._waiting.values() if one.row.executor == executor]:
            await self._settle(waiting.row, "withdrawn", why, message=f"Withdrawn: {why}.")

    async def nobody_left(self, session: str) -> None:
        """Apply the session's policy for nobody being there to what it asks. Called when the last client has gone."""
        row = await self._store.read(lambda conn: sessions.get(conn, session))
        if row is not None:
            for waiting in [one for one in self._waiting.values() if one.row.session == session]:
                await self._nobody_there(row, waiting.row.id)

    async def _nobody_came_back(self) -> None:
        """Once, when clients had time to come back after a restart: apply the policies for nobody being there."""
        asking = {waiting.row.session for waiting in self._waiting.values()}
        await anyio.sleep(self._settings().return_grace)
        for session in asking:
            try:
                await self.nobody_left(session)
            except HutchError as error:  # its expiry ends it
                _log.error("a question waits on", session=session, error=error.message)

    async def _nobody_there(self, session: SessionRow, permission: str) -> None:
        waiting = self._waiting.get(permission)
        if waiting is None or waiting.notified or session.when_nobody == "wait" or self._somebody_there(session):
            return
        stop = session.when_nobody == "stop"
        message = "Nobody is there to decide, and the session says to " + (
            "stop the turn then." if stop else "refuse then."
        )
        row, won = await self._settle(waiting.row, "denied", "nobody", message=message, interrupt=stop)
        if won and stop:
            self._stop_turn(row.session, row.turn, "nobody was there to decide")

    async def expire_due(self) -> None:
        """Expire the questions whose time is over on the desk's clock."""
        now = self._clock()
        for waiting in [one for one in self._waiting.values() if one.deadline <= now]:
            await self._settle(waiting.row, "expired", "expiry", message="Nobody answered in time.")

    async def _watch_expiry(self) -> None:
        while True:
            self._news = anyio.Event()
            next_one = min((one.deadline for one in self._waiting.values()), default=math.inf)
            with anyio.move_on_after(max(0.0, next_one - self._clock())):
                await self._news.wait()
                continue
            try:
                await self.expire_due()
            except HutchError as error:
                _log.error("questions cannot be expired", error=error.message)
                await anyio.sleep(1.0)


def _already(row: PermissionRow) -> HutchError:
    stands = permission_view(row)
    return HutchError(
        Reason.ALREADY_SETTLED,
        f"It was settled before: {row.state} by {row.settled_by}.",
        permission=msgspec.to_builtins(stands),
    )


def _runs(on: Executes, asker: Asker, params: m.RequestPermission) -> bool:
    """Tell whether the turn that asks was given to this executor and is not being stopped."""
    turn = turns.get(on, params.turn)
    return (
        turn is not None
        and (turn.session, turn.executor) == (params.session, asker.id)
        and turn.state in ("dispatching", "running")
    )


def _too_late(params: m.RequestPermission, digest: str) -> m.PermissionDecision:
    return m.PermissionDecision(
        decision="deny",
        state="withdrawn",
        input=params.call.input,
        digest=digest,
        message="The turn does not run, or is being stopped; nothing more of it starts.",
        interrupt=True,
    )


def _record_verdict(tx: Tx, session: SessionRow, params: m.RequestPermission, verdict: Verdict, digest: str) -> None:
    """Record what the policy decided by itself."""
    audit.record(
        tx,
        actor="rule" if verdict.rule is not None else f"mode {session.permission_mode}",
        owner=session.owner,
        action="permission",
        outcome="allowed" if verdict.decision == "allow" else "denied",
        session=session.id,
        subject=params.call.call_id,
        rule=verdict.rule,
        digest=digest,
        details={"tool": params.call.agent_tool, "why": verdict.why, "layer": verdict.layer or ""},
    )
