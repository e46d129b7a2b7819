"""The executor's life: one session, its turns, and an end that leaves no process behind.

Theory. A request from hutchd runs in a task of the worker. So a lost connection cancels only the wait for the result;
when hutchd sends the same request again, it gets the result of the same run.

If the agent fails in an unexpected way (cannot be opened, does not stop, raises), the executor reports that and ends.
hutchd starts another executor, and the session goes on there.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

import anyio
from anyio.abc import TaskGroup
from msgspec.structs import replace

from hutch_executor.account.setup import Setup, set_up
from hutch_executor.background import BackgroundCall
from hutch_executor.events.reporter import Reporter
from hutch_executor.events.spool import Spool
from hutch_executor.link.daemon_link import DaemonLink, LinkState
from hutch_executor.link.daemon_port import LinkedDaemon
from hutch_executor.process.limits import LimitWatch
from hutch_executor.process.oom import find_choom
from hutch_executor.runners.port import AgentRunner
from hutch_executor.turns import INTERRUPT_DEADLINE, SessionTurns, report_limits
from hutch_shared import messages as m
from hutch_shared.errors import HutchError, Reason
from hutch_shared.events import TurnEnded
from hutch_shared.latch import Latch
from hutch_shared.rpc.dispatch import Handler, internal_error
from hutch_shared.tree import Tree, UnfitFileError

__all__ = ["MOVES", "State", "Worker"]

State = Literal["idle", "opening", "ready", "closing"]

MOVES: Final[dict[State, frozenset[State]]] = {
    "idle": frozenset({"opening", "closing"}),
    "opening": frozenset({"ready", "closing"}),
    "ready": frozenset({"closing"}),
    "closing": frozenset(),
}

_PATH_THREADS: Final = 4
_CLOSE_DEADLINE: Final = 15.0
_LAST_EVENTS_DEADLINE: Final = 5.0

_log: Final = logging.getLogger(__name__)
T = TypeVar("T")


class Worker:
    """Serves hutchd with one runner; `methods` has the handlers of hutchd's requests."""

    def __init__(
        self, boot: m.Boot, runner: AgentRunner, *, sweep: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        """Prepare to serve. Before the last events are sent, `sweep` kills the processes that the agent left."""
        self.state: State = "idle"
        self.reporter = Reporter()
        abilities = (*runner.abilities, "landlock")  # it knows `SandboxSpec.kind`, whatever its runner
        self.link = DaemonLink(boot, self.reporter, self._link_state, self._welcomed, abilities)
        self.boot = boot
        self.setup = Setup()
        """The account's PATH and umask, for the agent and the notify command; set when a session is opened."""
        self.path_threads = anyio.CapacityLimiter(_PATH_THREADS)
        """Threads for path look-ups. A look-up that hangs on a dead file server occupies its thread."""
        self._runner = runner
        self._sweep = sweep
        self._tasks: TaskGroup | None = None
        self._session: m.PrepareSession | None = None
        self._opened: BackgroundCall[m.Prepared] | None = None
        self._turns: SessionTurns | None = None
        self._leaving: m.Shutdown | None = None
        self._leave = anyio.Event()
        self._changed = Latch()
        """Notified when a turn ends and when `leave` is called."""
        self._hurry = anyio.Event()

    def __repr__(self) -> str:
        return f"<Worker {self.boot.executor} {self.state} {self._turns!r} {self.link!r} {self.reporter!r}>"

    @property
    def cwd(self) -> str:
        """The session's working directory; `/` without a session."""
        return self._session.cwd if self._session else "/"

    # ------------------------------------------------------------ life

    async def serve(self, handlers: Mapping[str, Handler[Any]]) -> None:
        """Dial hutchd and serve it until `leave` is called or the link ends with a final error."""
        async with anyio.create_task_group() as self._tasks:
            self._tasks.start_soon(self.reporter.keep_spool)
            self._tasks.start_soon(self._keep_link, handlers)
            await self._leave.wait()
            await self._end()
            self._tasks.cancel_scope.cancel()

    def leave(self, reason: str, *, finish_turn: bool = False) -> None:
        """End at once, or with `finish_turn` after the running turn. A later call can only bring the end forward."""
        if self._leaving is None or (self._leaving.finish_turn and not finish_turn):
            self._leaving = m.Shutdown(reason, finish_turn)
            _log.info("leaving: %s", reason)
        self._leave.set()
        self._changed.notify()
        if not finish_turn:
            self._hurry.set()

    async def wait_leaving(self) -> None:
        """Return when the worker ends without waiting for a turn."""
        await self._hurry.wait()

    async def _keep_link(self, handlers: Mapping[str, Handler[Any]]) -> None:
        error = await self.link.run(self, handlers)
        self.leave(error.message)

    async def _end(self) -> None:
        """Stop the turn, the agent and the connection, in this order, each by its deadline."""
        assert self._leaving is not None
        while self._running_turn is not None and self._leaving.finish_turn:
            await self._changed.wait()
        if self._turns is not None and self._turns.running is not None:
            cause = TurnEnded("stopped", "executor_stopped", f"The executor was stopped: {self._leaving.reason}")
            await self._turns.stop(self._turns.running, cause)
            with anyio.move_on_after(2 * INTERRUPT_DEADLINE):
                while self._running_turn is not None:
                    await self._changed.wait()
        self._hurry.set()
        self._move("closing")
        await self._close_runner()
        if self._sweep is not None:  # first: left-over processes may use up the threads that the last events need
            await self._sweep()
        with anyio.move_on_after(_LAST_EVENTS_DEADLINE):
            if self.link.is_up:
                await self.reporter.wait_acked(self.reporter.outbox.last)
        await self.link.close()
        if self.reporter.outbox.unacked:
            with anyio.move_on_after(_LAST_EVENTS_DEADLINE):
                await self.reporter.wait_safe()
        await self.reporter.close()

    async def _close_runner(self) -> None:
        with anyio.move_on_after(_CLOSE_DEADLINE):
            try:
                await self._runner.close()
            except Exception:  # noqa: BLE001  # the sweep kills what is left of the agent
                internal_error("closing the agent")

    def _move(self, state: State) -> None:
        if state not in MOVES[self.state]:
            raise AssertionError(f"{self!r} cannot become {state}")
        self.state = state

    @property
    def _running_turn(self) -> str | None:
        return self._turns.running if self._turns else None

    def _link_state(self) -> LinkState:
        session = self._session.session if self._session else None
        return LinkState(
            session, self._turns.unacknowledged if self._turns else None, is_busy=self._running_turn is not None
        )

    def _welcomed(self, welcome: m.Welcome) -> None:
        """Stop the running turn if hutchd has already ended it."""
        running = self._running_turn
        if running is not None and welcome.turn != running and self._tasks is not None and self._turns is not None:
            cause = TurnEnded("stopped", "interrupted", "hutchd had ended the turn when the executor came back.")
            self._tasks.start_soon(self._turns.stop, running, cause)

    # ------------------------------------------------------------ the session

    async def open_session(self, session: m.PrepareSession) -> m.Prepared:
        """Connect the agent. The same session sent again gets the same result."""
        if self._opened is None and self.state == "idle" and self._leaving is None:
            if session.agent != self.boot.agent:
                raise HutchError(Reason.WRONG_STATE, f"This executor drives {self.boot.agent}, not {session.agent}.")
            self._session = session
            self._opened = self.start(lambda: self._open(session))
        elif self._session is None or self._session.session != session.session:
            raise HutchError(Reason.WRONG_STATE, "This executor has a session already, or is leaving.")
        assert self._opened is not None
        return await self._opened.wait()

    async def _open(self, session: m.PrepareSession) -> m.Prepared:
        self._move("opening")
        try:
            if not await anyio.Path(session.cwd).is_dir() or not os.access(session.cwd, os.R_OK | os.X_OK):
                raise HutchError(
                    Reason.AGENT_UNAVAILABLE,
                    f"The directory {session.cwd} does not exist, or this account may not read it.",
                )
            if session.real_cwd:
                await anyio.to_thread.run_sync(_require_real, session.cwd)
            else:
                session = replace(session, cwd=str(await anyio.Path(session.cwd).resolve()))
            self._session = session
            spool = await anyio.to_thread.run_sync(
                lambda: Spool(Path(session.spool), self.boot.executor, session.session, session.spool_bytes)
            )
            self.reporter.begin(session.session, spool)
            await anyio.to_thread.run_sync(find_choom)
            self.setup = self._runner.setup = await set_up(session.setup, session.cwd, session.home)
            prepared = await self._open_runner(session)
            if self.state == "closing":
                raise HutchError(Reason.AGENT_UNAVAILABLE, "hutchd asked the executor to leave.")
        except BaseException:
            self.leave("the agent could not be started")
            raise
        self._move("ready")
        return replace(prepared, cwd=session.cwd)

    async def _open_runner(self, session: m.PrepareSession) -> m.Prepared:
        assert self._tasks is not None
        daemon = LinkedDaemon(self.link, self.reporter, session.session, session.cwd)
        limits = LimitWatch()
        self._turns = SessionTurns(
            self._runner,
            self.reporter,
            daemon.requests,
            limits,
            self._tasks,
            changed=self._changed,
            leave=self.leave,
            close_agent=self._close_runner,
        )
        try:
            return await self._runner.open(session, daemon)
        except HutchError as error:
            over = await report_limits(limits, self.reporter)
            if over is None:
                raise
            raise HutchError(error.reason, f"{over.message} {error.message}") from error

    def execute_prompt(self, prompt: m.ExecutePrompt) -> m.Accepted:
        """Start a turn. The same turn sent again is accepted and not run again."""
        self._require_session(prompt.session)
        if self._turns is not None and self._turns.was_accepted(prompt.turn):
            return m.Accepted(accepted=True)
        if self._leaving is not None:
            return m.Accepted(accepted=False, reason="leaving")
        if prompt.kind not in ("prompt", *self._runner.abilities):
            return m.Accepted(accepted=False, reason=f"its agent cannot {prompt.kind}")
        if self.state != "ready" or self._turns is None or self._turns.state != "ready":
            refusing = self._turns.state if self.state == "ready" and self._turns is not None else self.state
            return m.Accepted(accepted=False, reason=refusing)
        self._turns.begin(prompt)
        return m.Accepted(accepted=True)

    async def stop_turn(self, turn: str, cause: TurnEnded) -> bool:
        """Stop a turn; return whether it was running. After the return it starts nothing more."""
        turns = self._turns
        return turns is not None and await self.start(lambda: turns.stop(turn, cause)).wait()

    async def set_permission_mode(self, params: m.SetMode) -> None:
        """Pass the mode on to the agent, once it is open."""
        self._require_session(params.session)
        assert self._opened is not None
        await self._opened.wait()
        await self.start(lambda: self._runner.set_mode(params.mode)).wait()

    def _require_session(self, session: str) -> None:
        if self._session is None or session != self._session.session:
            raise HutchError(Reason.WRONG_STATE, "This executor does not have that session.")

    def start(self, work: Callable[[], Awaitable[T]]) -> BackgroundCall[T]:
        """Run `work` in a task of the worker, which a lost connection does not cancel."""
        assert self._tasks is not None
        call = BackgroundCall(work)
        self._tasks.start_soon(call.run)
        return call


def _require_real(cwd: str) -> None:
    """Raise `agent_unavailable` if a component of `cwd` is a link. Another agent could have put it there."""
    try:
        Tree(cwd).close()
    except UnfitFileError as error:
        why = f"{cwd} is not the directory any more in which the session was opened: it lies behind a symbolic link."
        raise HutchError(Reason.AGENT_UNAVAILABLE, why) from error
    except OSError as error:
        raise HutchError(Reason.AGENT_UNAVAILABLE, f"{cwd} cannot be entered: {error.strerror}.") from error
