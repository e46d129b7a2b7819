"""The task of one session: runs its turns one at a time in a leased executor, and closes the session.

The task is driven by state, not by messages: it reads the store, carries out one step (`next_step`), and waits for a
wake-up. Every change (the end of a turn, a connection that begins or breaks, a request to stop) only wakes it. So a
restarted hutchd continues with the same code, and a store that fails for some time only delays it. A repeated step is
harmless: changes of state are compare-and-set, and `execute_prompt` is idempotent by turn id.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from os.path import join
from typing import Final, Protocol

import anyio
import msgspec
import structlog

from hutch_daemon.environments.port import combined
from hutch_daemon.pool.executors import Executor
from hutch_daemon.pool.pool import Pool
from hutch_daemon.services.next_step import (
    Dispatch,
    HandOver,
    Offer,
    Settle,
    Step,
    Stop,
    StopAction,
    TurnExecutor,
    TurnRequest,
    WaitUntil,
    next_step,
)
from hutch_daemon.services.session_executors import SessionExecutors
from hutch_daemon.services.states import TURN
from hutch_daemon.services.turn_lifecycle import StopCause, TurnLifecycle, outcome_unknown, stopped
from hutch_daemon.settings import SettingsInForce
from hutch_daemon.store import audit, events, left_dirs, sessions, turns
from hutch_daemon.store.records import Tx
from hutch_daemon.store.rows import LeftDirRow, SessionRow, TurnRow
from hutch_daemon.store.store import Store
from hutch_shared import messages as m
from hutch_shared.agents import SCRATCH, keeps_conversation
from hutch_shared.backoff import Backoff
from hutch_shared.conditions import Conditions
from hutch_shared.errors import HutchError, Reason
from hutch_shared.events import Notice, TurnEnded
from hutch_shared.failpoints import failpoint
from hutch_shared.latch import Latch
from hutch_shared.times import now_ms

__all__ = ["SessionLoop", "TurnLeases"]

_log = structlog.get_logger(__name__)

_ACCEPT_TIMEOUT: Final = 10.0
"""Seconds within which an executor must accept a prompt. It answers before it does any work."""
_RETRY: Final = 0.1
"""Seconds before a failed call is tried again on a connection that seems to work."""
_STORE_PAUSES: Final = (0.25, 2.0)
"""The first and the longest pause, in seconds, before another look after the store failed."""
_REFUSALS: Final = 2
"""The number of refusals by executors after which a turn fails at the next one."""
_NO_LIMIT: Final = 1_000_000
"""A row limit that is never reached."""


@dataclass(slots=True, eq=False)
class _Active:
    """The part of the current turn's state that is not in the store."""

    turn: str
    executor: Executor | None = None
    request: TurnRequest = field(default_factory=TurnRequest)
    refusals: int = 0
    halted: anyio.Event = field(default_factory=anyio.Event)
    """Set once the turn starts nothing more."""


class TurnLeases(Protocol):
    """Lets the processes of a session use a model only during its turns. Both calls are idempotent."""

    async def begin_turn(self, session: str) -> None: ...
    async def end_turn(self, session: str) -> None: ...


class SessionLoop:
    """The task of one open session. Only `run` and `close` wait."""

    def __init__(
        self,
        session: str,
        owner: int,
        store: Store,
        pool: Pool,
        executors: SessionExecutors,
        lifecycle: TurnLifecycle,
        settings: SettingsInForce,
        on_closed: Callable[[str], None],
        import_spool: Callable[[str], Awaitable[bool]],
        leases: TurnLeases,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`on_closed(session)` is called after the session was closed; it must not block.

        `import_spool(executor)` imports what an executor left, and returns whether nothing is left of it. With `leases`
        the processes of a session can use a model only during its turns.
        """
        self.session = session
        self.owner = owner
        self._store = store
        self._pool = pool
        self._executors = executors
        self._lifecycle = lifecycle
        self._settings = settings
        self._on_closed = on_closed
        self._import_spool = import_spool
        self._leases = leases
        self._clock = clock
        self.turned = anyio.Event()
        """Set when the loop begins or leaves a turn, or ends, and then replaced by a new event."""
        self._changed = Latch()
        self._conditions = Conditions(logging.getLogger(__name__))
        self._active: _Active | None = None
        self._getting_executor: anyio.CancelScope | None = None
        self._warm = False
        self._closing_for: str | None = None
        self._closed = anyio.Event()

    # ------------------------------------------------------------ requests

    def wake(self) -> None:
        """Make the loop look at the state again."""
        self._changed.notify()

    def warm_up(self) -> None:
        """Make the loop get an executor before the first prompt arrives."""
        self._warm = True
        self.wake()

    def request_stop(self, turn: str, why: StopCause) -> anyio.Event | None:
        """Request that a turn is stopped. The returned event is set once the turn starts nothing more.

        Return None if this is not the current turn.
        """
        active = self._active
        if active is None or active.turn != turn:
            return None
        active.request.stop = active.request.stop or why
        self._give_up_executor()
        self.wake()
        return active.halted

    async def close(self, by: str) -> None:
        """Close the session: stop its turns and end its processes. `by` names the user in the audit."""
        self._closing_for = self._closing_for or by
        if self._active is not None:
            self.request_stop(self._active.turn, "closed")
        self._give_up_executor()
        self.wake()
        await self._closed.wait()

    async def before_end(self, turn: str) -> None:
        """Let the session's processes use no model any more, if this is the current turn.

        Call it before the turn's end is stored: a client that sees the end may rely on it.
        """
        if self._active is not None and self._active.turn == turn:
            await self._leases.end_turn(self.session)

    def _give_up_executor(self) -> None:
        if self._getting_executor is not None:
            self._getting_executor.cancel()

    # ------------------------------------------------------------ the task

    async def run(self) -> None:
        """Run turns until the session is closed or removed."""
        try:
            await self._work()
        finally:
            self.turned.set()

    async def _work(self) -> None:
        backoff: Backoff | None = None
        while True:
            try:
                session = await self._store.read(lambda conn: sessions.get(conn, self.session))
                if session is None or session.state == "closed":
                    await self._leases.end_turn(self.session)
                    self._closed.set()
                    return
                turn = await self._next_turn()
                if turn is None or turn.state == "queued":
                    await self._leases.end_turn(self.session)
                if turn is not None and not (self._closing_for and turn.state == "queued"):
                    await self._run_turn(turn)
                    continue
                if self._closing_for:
                    await self._finish(self._closing_for)
                    return
                if self._warm:
                    self._warm = False
                    await self._warm_executor(session)
                    continue
                self._note_idle()
            except HutchError as error:
                self._conditions.failed(f"session {self.session} waits", error)
                backoff = backoff or Backoff(*_STORE_PAUSES)
                await anyio.sleep(backoff.next())
                continue
            backoff = None
            self._conditions.end(f"session {self.session} waits", f"session {self.session} goes on")
            await self._changed.wait()

    async def _next_turn(self) -> TurnRow | None:
        return await self._store.read(
            lambda conn: turns.active(conn, self.session) or turns.next_queued(conn, self.session)
        )

    def _note_idle(self) -> None:
        executor = self._pool.roster.serving.get(self.session)
        if executor is not None:
            self._pool.roster.idle(executor)

    async def _warm_executor(self, session: SessionRow) -> None:
        try:
            with anyio.CancelScope() as self._getting_executor:
                await self._executors.obtain(session, self._changed)
        except HutchError as error:
            if error.reason is Reason.SHUTTING_DOWN:
                return
            notice = Notice("executor_not_started", error.message, {"reason": error.reason.word})
            await self._store.write(lambda tx: events.append(tx, self.session, None, "notice", notice))
        finally:
            self._getting_executor = None

    # ------------------------------------------------------------ one turn

    async def _run_turn(self, turn: TurnRow) -> None:
        """Carry out steps for one turn until it has ended."""
        active = self._active
        if active is None or active.turn != turn.id:
            active = _Active(turn.id)
            self._turn_to(active)
        if self._closing_for:
            active.request.stop = active.request.stop or "closed"
        while turn.state not in TURN.terminal:
            await self._carry_out(await self._look(active, turn), active, turn)
            found = await self._store.read(lambda conn: turns.get(conn, active.turn))
            if found is None:
                break
            turn = found
        active.halted.set()
        self._turn_to(None)

    def _turn_to(self, active: _Active | None) -> None:
        self._active = active
        self.turned.set()
        self.turned = anyio.Event()

    async def _look(self, active: _Active, turn: TurnRow) -> Step:
        """Return the next step from the state of the turn and its executor."""
        request = active.request
        if active.executor is None and turn.state != "queued":
            active.executor = self._pool.roster.by_id.get(turn.executor or "")
        if turn.state in ("running", "stopping") and request.deadline == math.inf:
            request.deadline = self._deadline(await self._row(), turn)
        request.storable = self._store.available
        executor = _view(active.executor) if active.executor is not None else None
        offerable = False
        if turn.state == "dispatching" and turn.offered_to is None and (executor is None or executor.ended):
            offerable = keeps_conversation((await self._row()).agent)
        return next_step(turn.state, executor, request, self._clock(), offerable=offerable)

    async def _carry_out(self, step: Step, active: _Active, turn: TurnRow) -> None:
        executor = active.executor
        match step:
            case Dispatch():
                await self._dispatch(active, turn)
            case WaitUntil(time=until):
                with anyio.move_on_after(max(0.0, until - self._clock())):
                    await self._changed.wait()
            case Settle(ended=ended):
                await self._settle(active, turn, ended)
            case Offer():
                await self._store.write(lambda tx: self._lifecycle.offer(tx, turn))
                failpoint("turn.offered")
                active.executor, active.request.prompt_sent = None, None
            case HandOver():
                assert executor is not None, "a prompt is handed over to the executor that was looked at"
                await self._hand_over(active, turn, executor)
            case Stop(action=action, why=why):
                assert executor is not None, "a turn without an executor is settled"
                await self._stop(action, why, active, turn, executor)

    async def _dispatch(self, active: _Active, turn: TurnRow) -> None:
        session = await self._row()
        try:
            with anyio.CancelScope() as self._getting_executor:
                executor = await self._executors.obtain(session, self._changed)
        except HutchError as error:
            if error.reason in (Reason.STORE_UNAVAILABLE, Reason.SHUTTING_DOWN):
                raise
            if error.reason in (Reason.CONNECTION_LOST, Reason.EXECUTOR_LOST) and active.refusals < _REFUSALS:
                active.refusals += 1
                return
            await self._end(turn, TurnEnded("failed", error.reason.word, error.message))
            return
        finally:
            cancelled = self._getting_executor is not None and self._getting_executor.cancel_called
            self._getting_executor = None
        if cancelled:
            return
        if turn.offered_to is not None and not await self._import_offered(turn, turn.offered_to):
            if (await self._row()).agent_session != session.agent_session:
                self._pool.retire(executor, "it was prepared for the conversation before that turn")
            return
        if (missing := _needs(turn) - {*executor.abilities}) and not executor.over:
            await self._replace(turn, executor, " ".join(missing))
            return
        active.executor, active.request.prompt_sent = executor, False
        await self._store.write(lambda tx: self._lifecycle.dispatch(tx, turn, executor.id))
        failpoint("turn.dispatching")

    async def _import_offered(self, turn: TurnRow, executor: str) -> bool:
        """Import the events of the executor that a turn was offered to; return whether the turn is still queued.

        It is not if the events show that the executor had accepted it. If they cannot be imported, end the turn: its
        outcome is unknown.
        """
        if not await self._import_spool(executor):
            await self._end(turn, outcome_unknown("its executor is gone, and its events cannot be read"))
            return False
        now = await self._store.read(lambda conn: turns.get(conn, turn.id))
        return now is not None and now.state == "queued"

    async def _replace(self, turn: TurnRow, executor: Executor, missing: str) -> None:
        """Give up an executor of an earlier version that cannot run the turn. The next one can."""
        if executor.adopted:
            self._pool.retire(executor, f"it is of an earlier version of Hutch, which cannot do this: {missing}")
        elif turn.offered_to is not None:
            await self._end(turn, outcome_unknown("its executor is gone"))
        else:
            await self._end(turn, TurnEnded("failed", "unsupported", f"The agent cannot do this: {missing}."))

    async def _hand_over(self, active: _Active, turn: TurnRow, executor: Executor) -> None:
        session = await self._row()
        attached = executor.attached
        prompt = m.ExecutePrompt(
            session=turn.session,
            turn=turn.id,
            number=turn.number,
            prompt=turn.prompt,
            timeout=self._timeout(session, turn),
            kind=turn.kind,
            offered=turn.offered_to is not None,
        )
        if executor.peer is None:  # it has gone since the look: nothing was sent
            return
        await self._leases.begin_turn(self.session)
        active.request.prompt_sent = True
        try:
            answer: m.Accepted = await executor.call("execute_prompt", prompt, _ACCEPT_TIMEOUT)
        except HutchError as error:
            if error.reason is not Reason.CONNECTION_LOST:
                self._pool.retire(executor, f"it did not accept a prompt: {error.message}")
            elif executor.attached == attached:
                active.request.retry_at = self._clock() + _RETRY
            return
        if answer.accepted:
            failpoint("turn.accepted")
            await self._store.write(lambda tx: self._lifecycle.begin(tx, turn))
            return
        active.refusals += 1
        self._pool.retire(executor, f"it refused a prompt: {answer.reason}")
        if active.refusals > _REFUSALS:
            message = f"The executor refused the prompt: {answer.reason}."
            await self._end(turn, TurnEnded("failed", "refused", message))
        else:
            await self._requeue(active, turn)

    async def _stop(
        self, action: StopAction, why: StopCause, active: _Active, turn: TurnRow, executor: Executor
    ) -> None:
        """Take one step of stopping a turn. This also works while the store cannot be written."""
        request = active.request
        request.stop = why
        match action:
            case StopAction.RECORD:
                await self._store.write(lambda tx: self._lifecycle.begin_stopping(tx, turn))
                failpoint("turn.stopping")
            case StopAction.GIVE_TIME:
                request.stop_until = self._clock() + self._settings.current.turns.interrupt_grace
            case StopAction.ASK:
                await self._ask_to_stop(active, turn, executor)
            case StopAction.KILL:
                killed = await self._pool.end(executor, "its turn did not stop")
                if killed.verified:
                    detail = f"The agent did not stop by itself and was ended; {killed.words()}."
                    await self._end(turn, stopped(why, detail))
                else:
                    detail = f"The agent did not stop by itself; {killed.words()}."
                    await self._end(turn, stopped(why, detail, verified=False))

    async def _ask_to_stop(self, active: _Active, turn: TurnRow, executor: Executor) -> None:
        request = active.request
        request.stop_sent = True
        ask = m.InterruptExecutor(turn=turn.id, timed_out=request.stop == "timed_out")
        try:
            await executor.call("interrupt_turn", ask, max(0.1, (request.stop_until or 0.0) - self._clock()))
        except HutchError as error:
            _log.info("an executor does not stop its turn", executor=executor.id, error=error.message)
            if error.reason is Reason.CONNECTION_LOST:
                request.stop_sent = False
                request.retry_at = self._clock() + _RETRY
        else:
            request.halted = True
            active.halted.set()

    async def _settle(self, active: _Active, turn: TurnRow, ended: TurnEnded | None) -> None:
        """End a turn, or queue it again."""
        if ended is None:
            await self._requeue(active, turn)
        else:
            await self._end(turn, ended)

    async def _requeue(self, active: _Active, turn: TurnRow) -> None:
        """Queue a turn again if its executor never accepted it."""
        await self._store.write(lambda tx: self._lifecycle.requeue(tx, turn))
        active.executor, active.request.prompt_sent = None, None

    async def _end(self, turn: TurnRow, ended: TurnEnded) -> None:
        """End a turn by hutchd's decision. If it has already ended, nothing changes."""
        await self.before_end(turn.id)
        await self._store.write(lambda tx: self._lifecycle.end(tx, turn, ended))

    def _timeout(self, session: SessionRow, turn: TurnRow) -> float:
        return turn.timeout or session.limits.turn_timeout or self._settings.current.turns.timeout

    def _deadline(self, session: SessionRow, turn: TurnRow) -> float:
        """Return the time when hutchd stops a turn. The executor has its own time limit, which ends a little earlier.

        The time starts now, because only the executor knows how long the turn ran before a restart of hutchd.
        """
        return self._clock() + self._timeout(session, turn) + self._settings.current.turns.interrupt_grace

    async def _row(self) -> SessionRow:
        row = await self._store.read(lambda conn: sessions.get(conn, self.session))
        if row is None:
            raise HutchError(Reason.NOT_FOUND)
        return row

    # ------------------------------------------------------------ the end

    async def _finish(self, by: str) -> None:
        """End the queued turns and the executor with all its processes, and close the session."""
        for turn in await self._store.read(lambda conn: turns.list_(conn, self.session, limit=_NO_LIMIT)):
            if turn.state == "queued":
                await self._end(turn, stopped("closed"))
        # The list includes executors that were given up.
        served_by = [one for one in self._pool.roster.all() if one.session == self.session]
        for executor in served_by:
            await self._pool.end(executor, "its session was closed", grace=3.0)

        def close(tx: Tx) -> None:
            killed = combined(one.killed for one in served_by)  # a later check may be known
            result = m.KillResult("gone", "it had no executor") if killed is None else killed.result()
            verified = result.outcome == "gone"
            word = "session_closed" if verified else "quarantined"
            message = f"The session was closed{'; ' if verified else ', but '}{result.message}."
            details = msgspec.to_builtins(result)
            row = sessions.update(tx, self.session, state="closed", closed_at=now_ms(), killed=result)
            if row.agent_dir is not None:  # a killed executor has not removed it
                left_dirs.add(tx, LeftDirRow(path=join(row.agent_dir, SCRATCH), account=row.account))
            events.append(tx, self.session, None, "notice", Notice(word, message, details))
            audit.record(
                tx,
                actor=by,
                owner=self.owner,
                action="close_session",
                outcome="closed" if verified else result.outcome,
                session=self.session,
                details=details,
            )
            tx.after_commit(self._note_closed)

        await self._store.write(close)

    def _note_closed(self) -> None:
        self._closed.set()
        self._on_closed(self.session)

    def __repr__(self) -> str:
        at = f"turn {self._active.turn}" if self._active is not None else "idle"
        return f"<SessionLoop {self.session} {'closing, ' if self._closing_for else ''}{at}>"


def _view(executor: Executor) -> TurnExecutor:
    return TurnExecutor(
        connected=executor.peer is not None,
        over=executor.over,
        ended=executor.ended.is_set(),
        quarantined=executor.state == "quarantined",
        said_hello=executor.attached > 0,
        over_limit=executor.killed.over if executor.killed is not None else "",
        detail=executor.explanation,
    )


def _needs(turn: TurnRow) -> set[str]:
    """Return the abilities that the turn's executor must have."""
    return ({turn.kind} if turn.kind != "prompt" else set()) | ({"offered"} if turn.offered_to is not None else set())
