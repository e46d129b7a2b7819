"""One session's own task: runs its turns one at a time, in an executor that it leases, and ends what must end.

It is driven by state, not by messages: at each step it reads what is stored, does the one thing that follows, and waits
to be woken. Whatever happens beside it (an event that ends the turn, a connection that comes or breaks, a wish to stop)
only wakes it. So a restarted hutchd continues with the same code, a store that fails for a while only delays it, and a
step that is done twice does no harm: moves are compare-and-set, and `execute_prompt` is idempotent by turn id.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import anyio
import msgspec
import structlog

from hutch_daemon.environments.levels import is_less
from hutch_daemon.environments.port import Killed
from hutch_daemon.keys.vault import session_context
from hutch_daemon.pool.executor import Executor, ExecutorKey
from hutch_daemon.services.isolation import least, walling
from hutch_daemon.services.parts import Parts
from hutch_daemon.services.states import TURN
from hutch_daemon.services.turn_lifecycle import Endings, Stopping, lost, outcome_unknown, over_limit, stopped
from hutch_daemon.services.views import FORK_MARK
from hutch_daemon.store import executors, sessions, turns
from hutch_daemon.store.rows import SessionRow, TurnRow
from hutch_daemon.store.tx import Tx
from hutch_shared import messages as m
from hutch_shared.agents import provider_of
from hutch_shared.errors import HutchError, Reason
from hutch_shared.events import Notice, TurnEnded
from hutch_shared.failpoints import failpoint
from hutch_shared.times import now_ms

__all__ = ["SessionLoop"]

_log = structlog.get_logger(__name__)

_ACCEPT_TIMEOUT: Final = 10.0
"""Seconds for an executor to say that it took a prompt: it does no work before it answers."""
_STORE_PAUSE: Final = 0.5
_REFUSALS: Final = 2
"""How often a prompt may be refused before it was accepted until its turn fails."""


@dataclass(slots=True, eq=False)
class _Active:
    """The turn at hand, as far as it is not in the store."""

    turn: str
    executor: Executor | None = None
    handed_over: bool | None = None
    """Whether its executor may have got the prompt; None when an earlier hutchd dispatched it."""
    stop: Stopping | None = None
    stop_sent: bool = False
    stop_deadline: float = math.inf
    deadline: float | None = None
    refusals: int = 0
    halted: anyio.Event = field(default_factory=anyio.Event)
    """Nothing of the turn starts any more."""


class SessionLoop:
    """The task of one open session. Its methods other than `run` never wait, but for `stop` and `close`."""

    def __init__(
        self, session: str, owner: int, parts: Parts, endings: Endings, on_closed: Callable[[str], None]
    ) -> None:
        self.session = session
        self.owner = owner
        self._parts = parts
        self._endings = endings
        self._on_closed = on_closed
        self._wake = anyio.Event()
        self._active: _Active | None = None
        self._getting_executor: anyio.CancelScope | None = None
        self._warm = False
        self._closing = False
        self._closed = anyio.Event()
        self._killed: Killed | None = None
        self.last_there = -math.inf
        """When somebody who can answer was there last; infinite while somebody is."""

    # ------------------------------------------------------------ wishes

    def poke(self) -> None:
        """Have it look again."""
        self._wake.set()

    def warm_up(self) -> None:
        """Have it get an executor before the first prompt comes."""
        self._warm = True
        self.poke()

    def want_stop(self, turn: str, why: Stopping) -> anyio.Event | None:
        """Have the turn at hand stopped; the event is set once nothing of it starts any more. None: not at hand."""
        active = self._active
        if active is None or active.turn != turn:
            return None
        if active.stop is None:
            active.stop = why
        if self._getting_executor is not None:
            self._getting_executor.cancel()
        self.poke()
        return active.halted

    async def close(self) -> Killed:
        """End the session: its turns are stopped, its processes ended; return what was found of them."""
        self._closing = True
        if self._active is not None:
            self.want_stop(self._active.turn, "closed")
        if self._getting_executor is not None:
            self._getting_executor.cancel()
        self.poke()
        await self._closed.wait()
        return self._killed or Killed(verified=True)

    # ------------------------------------------------------------ the task

    async def run(self) -> None:
        """Work until the session is closed. Returns early for none but a session that is closed or gone."""
        while True:
            self._wake = wake = anyio.Event()
            try:
                session = await self._parts.store.read(lambda conn: sessions.get(conn, self.session))
                if session is None or session.state == "closed":
                    self._closed.set()
                    return
                turn = await self._next_turn()
                if turn is not None and not (self._closing and turn.state == "queued"):
                    await self._run_turn(turn)
                    continue
                if self._closing:
                    await self._finish(session)
                    return
                if self._warm:
                    self._warm = False
                    await self._warm_executor(session)
                    continue  # what came meanwhile woke that, not what follows
                self._note_idle()
            except HutchError as error:
                _log.warning("a session waits", session=self.session, reason=error.reason.word, error=error.message)
                await anyio.sleep(_STORE_PAUSE)
                continue
            await wake.wait()

    async def _next_turn(self) -> TurnRow | None:
        store = self._parts.store
        return await store.read(lambda conn: turns.active(conn, self.session) or turns.next_queued(conn, self.session))

    def _note_idle(self) -> None:
        executor = self._parts.pool.of_session(self.session)
        if executor is not None:
            self._parts.pool.idle(executor)

    async def _warm_executor(self, session: SessionRow) -> None:
        try:
            with anyio.CancelScope() as self._getting_executor:
                await self._have_executor(session)
        except HutchError as error:
            if error.reason is Reason.SHUTTING_DOWN:
                return
            notice = Notice("executor_not_started", error.message, {"reason": error.reason.word})
            await self._parts.store.write(
                lambda tx: self._parts.journal.append(tx, self.session, None, "notice", notice)
            )
        finally:
            self._getting_executor = None

    # ------------------------------------------------------------ one turn

    async def _run_turn(self, turn: TurnRow) -> None:
        """Bring one turn to its end, from whatever state it is in."""
        if self._active is None or self._active.turn != turn.id:
            self._active = _Active(turn.id)
        active = self._active
        if self._closing:
            active.stop = active.stop or "closed"
        wake = self._wake  # of before the turn was looked at
        while turn.state not in TURN.terminal:
            deadline = await self._step(active, turn)
            if deadline is not None:
                with anyio.move_on_after(max(0.0, deadline - self._parts.clock())):
                    await wake.wait()
            self._wake = wake = anyio.Event()  # before the look: what happens while it is under way must not be missed
            found = await self._parts.store.read(lambda conn: turns.get(conn, active.turn))
            if found is None:
                break
            turn = found
        active.halted.set()
        self._active = None

    async def _step(self, active: _Active, turn: TurnRow) -> float | None:
        """Do the next thing for a turn; return until when to wait to be woken, or None to look again at once."""
        if turn.state == "queued":
            await self._dispatch(active, turn)
            return None
        if active.executor is None:
            active.executor = self._parts.pool.get(turn.executor or "")
        executor = active.executor
        if executor is None or executor.ended.is_set():
            await self._settle_lost(active, turn, executor)
            return None
        if turn.state == "dispatching":
            return await self._hand_over(active, turn, executor)
        if active.deadline is None:
            active.deadline = self._deadline(await self._row(), turn)
        now = self._parts.clock()
        if turn.state == "stopping" or active.stop is not None:
            return await self._stop(active, turn, executor, now)
        if now >= active.deadline:
            active.stop = "timed_out"
            return None
        return active.deadline

    async def _dispatch(self, active: _Active, turn: TurnRow) -> None:
        if active.stop is not None:
            await self._end(turn, stopped(active.stop))
            return
        try:
            with anyio.CancelScope() as self._getting_executor:
                executor = await self._have_executor(await self._row())
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
        active.executor, active.handed_over = executor, False
        await self._parts.store.write(
            lambda tx: turns.move(tx, turn.id, TURN.before("dispatching"), "dispatching", executor=executor.id)
        )
        failpoint("turn.dispatching")

    async def _hand_over(self, active: _Active, turn: TurnRow, executor: Executor) -> float | None:
        """Give the prompt to the executor. Done again on a new connection: it answers the same for the same turn."""
        if executor.peer is None:
            return math.inf  # its end, or its next hello, wakes us
        session = await self._row()
        timeout = self._timeout(session, turn)
        attached = executor.attached
        prompt = m.ExecutePrompt(
            session=turn.session, turn=turn.id, number=turn.number, prompt=turn.prompt, timeout=timeout
        )
        active.handed_over = True
        try:
            answer: m.Accepted = await executor.call("execute_prompt", prompt, _ACCEPT_TIMEOUT)
        except HutchError as error:
            if error.reason is Reason.CONNECTION_LOST:
                return None if executor.attached != attached or executor.peer is None else self._parts.clock() + 0.1
            self._parts.pool.retire(executor, f"it did not take a prompt: {error.message}")
            return math.inf
        if answer.accepted:
            failpoint("turn.accepted")
            await self._parts.store.write(lambda tx: self._endings.begin(tx, turn))
            return None
        active.refusals += 1
        self._parts.pool.retire(executor, f"it refused a prompt: {answer.reason}")
        if active.refusals > _REFUSALS:
            message = f"The executor refused the prompt: {answer.reason}."
            await self._end(turn, TurnEnded("failed", "refused", message))
        else:
            await self._back_to_queue(active, turn)
        return None

    async def _back_to_queue(self, active: _Active, turn: TurnRow) -> None:
        """Queue a turn again that its executor never took."""
        await self._parts.store.write(lambda tx: turns.move(tx, turn.id, {"dispatching"}, "queued", executor=None))
        active.executor, active.handed_over = None, None

    async def _stop(self, active: _Active, turn: TurnRow, executor: Executor, now: float) -> float | None:
        """Stop a running turn: ask the executor, and end it with all its processes when it does not.

        While nothing can be stored it is stopped all the same; what came of it is stored when it can be.
        """
        grace = self._parts.settings().turns.interrupt_grace
        why: Stopping = active.stop or "interrupted"
        active.stop = why
        if turn.state == "running" and self._parts.store.available:
            await self._parts.store.write(lambda tx: self._begin_stopping(tx, turn))
            failpoint("turn.stopping")
            return None
        if math.isinf(active.stop_deadline):
            active.stop_deadline = now + grace
        if not active.stop_sent and executor.peer is not None:
            active.stop_sent = True
            try:
                ask = m.InterruptExecutor(turn=turn.id, timed_out=why == "timed_out")
                await executor.call("interrupt_turn", ask, max(0.1, active.stop_deadline - now))
            except HutchError as error:
                _log.info("an executor does not stop its turn", executor=executor.id, error=error.message)
                active.stop_sent = error.reason is not Reason.CONNECTION_LOST
            else:
                active.halted.set()
        if self._parts.clock() < active.stop_deadline:
            return active.stop_deadline
        if active.halted.is_set() and not self._parts.store.available:  # it did stop, and cannot say so yet
            active.stop_deadline = self._parts.clock() + grace
            return active.stop_deadline
        killed = await self._parts.pool.end(executor, "its turn did not stop")
        detail = "The agent did not stop by itself and was ended with all its processes."
        if not killed.verified:
            detail = f"The agent did not stop, and these processes of it could not be ended: {killed.left}."
        await self._end(turn, stopped(why, detail))
        return None

    def _begin_stopping(self, tx: Tx, turn: TurnRow) -> None:
        if turns.move(tx, turn.id, {"running"}, "stopping"):
            self._endings.approvals.withdraw(tx, turn.id, "the turn is being stopped")

    async def _settle_lost(self, active: _Active, turn: TurnRow, executor: Executor | None) -> None:
        if turn.state == "dispatching" and active.handed_over is False:
            await self._back_to_queue(active, turn)
        elif turn.state == "stopping":
            await self._end(turn, stopped(active.stop or "interrupted", "Its executor is gone."))
        elif executor is not None and turn.state == "running" and executor.attached > 0:
            over = executor.killed.over if executor.killed is not None else ""
            await self._end(turn, over_limit(over) if over else lost(executor.detail))
        else:
            await self._end(turn, outcome_unknown(executor.detail if executor is not None else "its executor is gone"))

    async def _end(self, turn: TurnRow, ended: TurnEnded) -> None:
        """End a turn by hutchd's own word; whoever was first stays right."""
        await self._parts.store.write(lambda tx: self._endings.end(tx, turn, ended))

    def _timeout(self, session: SessionRow, turn: TurnRow) -> float:
        return turn.timeout or session.limits.turn_timeout or self._parts.settings().turns.timeout

    def _deadline(self, session: SessionRow, turn: TurnRow) -> float:
        """Return when hutchd stops a turn: after the executor should have, which counts by itself.

        Counted from now: of a turn that ran before hutchd was restarted, the executor alone knows how long.
        """
        return self._parts.clock() + self._timeout(session, turn) + self._parts.settings().turns.interrupt_grace

    async def _row(self) -> SessionRow:
        row = await self._parts.store.read(lambda conn: sessions.get(conn, self.session))
        if row is None:
            raise HutchError(Reason.NOT_FOUND)
        return row

    # ------------------------------------------------------------ the executor

    async def _have_executor(self, session: SessionRow) -> Executor:
        """Return an executor that serves the session, connected and prepared; lease one if there is none."""
        pool, account = self._parts.pool, self._parts.demand_account(session)
        executor = pool.of_session(self.session)
        if executor is not None:
            executor = await self._still_good(session, executor)
        if executor is None:
            key = ExecutorKey(account, session.agent, session.environment)
            executor = await pool.lease(self.session, key)
        executor.idle_since = None
        while executor.peer is None and not executor.over:
            wake = self._wake = anyio.Event()
            await wake.wait()
        if executor.over:
            raise HutchError(Reason.EXECUTOR_LOST, f"The executor went away: {executor.detail}.")
        if not executor.prepared:
            await self._prepare(session, executor)
        return executor

    async def _still_good(self, session: SessionRow, executor: Executor) -> Executor | None:
        """Return the executor, if it may go on by what the settings and the launcher's list say now; else it is ended.

        Where the launcher cannot be asked, what runs goes on.
        """
        try:
            await executor.environment.check_account(executor.key.account)
        except HutchError as error:
            if error.details.get("refused"):
                self._parts.pool.retire(executor, f"its account may run no agents any more: {error.message}")
                raise
        if executor.prepared and is_less(session.isolation.level, least(self._parts, session.isolation.asked)):
            await self._parts.pool.end(executor, "more isolation is demanded than it has", grace=3.0)
            return None
        return executor

    async def _prepare(self, session: SessionRow, executor: Executor) -> None:
        parts, settings = self._parts, self._parts.settings()
        provider = provider_of(session.agent)
        options = session.options
        if session.sealed is not None:
            servers = msgspec.json.decode(parts.vault.open(session_context(session.id), session.sealed))
            options = msgspec.structs.replace(options, mcp_servers=servers)
        resume = session.agent_session
        fork = resume is not None and resume.startswith(FORK_MARK)
        account, environment = executor.key.account, executor.environment
        spool = environment.spool_of(account, executor.id)
        if spool is None:
            spool = parts.spool_dir / executor.id
            await anyio.to_thread.run_sync(partial(spool.mkdir, mode=0o700, parents=True, exist_ok=True))
        await parts.store.write(lambda tx: executors.update(tx, executor.id, spool=str(spool)))
        home, asked = account.home, session.isolation.asked
        grouped = executor.launched is None or bool(executor.launched.state.get("cgroup"))
        having = await walling(parts, environment, session.agent, session.cwd, account, asked, grouped=grouped)
        apart, accounts = environment.isolation_offered().separate_account, settings.accounts
        prepare = m.PrepareSession(
            session=session.id,
            agent=session.agent,
            cwd=session.cwd,
            permission_mode=session.permission_mode,
            options=options,
            limits=session.limits,
            spool=str(spool),
            home=home,
            sandbox=having.sandbox,
            apart=apart,
            setup=m.AccountSetup(accounts.path, accounts.umask) if apart else m.AccountSetup(),
            instructions=accounts.instructions,
            base_url=settings.provider(provider).base_url if provider is not None else None,
            resume=resume.removeprefix(FORK_MARK) if resume is not None else None,
            fork=fork,
            retries=settings.turns.retries,
            stream_idle=settings.turns.stream_idle,
            permission_expiry=settings.permissions.expiry,
            spool_bytes=settings.executors.spool,
        )
        try:
            prepared: m.Prepared = await executor.call("prepare_session", prepare, settings.executors.prepare_timeout)
        except HutchError as error:
            error = HutchError(error.reason, parts.known.mask_text(error.message), **error.details)
            parts.pool.retire(executor, f"it could not open its session: {error.message}")
            raise error from None
        except anyio.get_cancelled_exc_class():
            parts.pool.retire(executor, "the session was closed while it was opened")
            raise
        executor.prepared = True
        agent_session = prepared.agent_session or session.agent_session
        row = await parts.store.write(
            lambda tx: sessions.update(
                tx,
                session.id,
                keys=prepared.keys,
                isolation=having.isolation,
                agent_session=agent_session,
                cwd=prepared.cwd or session.cwd,
            )
        )
        if row.permission_mode != session.permission_mode:  # it was changed meanwhile, and nobody told the agent
            await executor.send_mode(row.id, row.permission_mode)

    # ------------------------------------------------------------ the end

    async def _finish(self, session: SessionRow) -> None:
        """End what is left: queued turns, the executor with all its processes, the session itself."""
        store = self._parts.store
        for turn in await store.read(lambda conn: turns.list_(conn, self.session, limit=1_000_000)):
            if turn.state == "queued":
                await self._end(turn, stopped("closed"))
        pool, left = self._parts.pool, list[int]()
        for executor in [one for one in pool.all() if one.session == self.session]:  # one that was given up too
            left += (await pool.end(executor, "its session was closed", grace=3.0)).left
        self._killed = Killed(verified=not left, left=tuple(left))
        word, message = "session_closed", "The session was closed; nothing of it is left running."
        if left:
            word = "quarantined"
            message = f"The session was closed, but these processes of it could not be ended: {self._killed.left}."

        def close(tx: Tx) -> None:
            sessions.update(tx, self.session, state="closed", closed_at=now_ms())
            self._parts.journal.append(tx, self.session, None, "notice", Notice(word, message))

        await store.write(close)
        self._closed.set()
        self._on_closed(self.session)

    def __repr__(self) -> str:
        at = f"turn {self._active.turn}" if self._active is not None else "idle"
        return f"<SessionLoop {self.session} {'closing, ' if self._closing else ''}{at}>"
