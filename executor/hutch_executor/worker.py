"""The executor's life: one session, its turns one at a time, and an end that leaves nothing behind.

Theory. What hutchd asks for runs in the worker's own tasks: a connection that is lost in the middle cancels the
waiting for an answer, never the work, and the same request sent again finds it. A turn reports `turn_started`, then
what the runner reports, then `turn_ended`, each exactly once, whatever happens to the connection meanwhile.

An executor whose agent failed in a way that it should not (it could not be opened, did not stop when told, raised)
reports that and ends: hutchd starts another, and the session goes on there.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final, Literal, TypeVar, cast

import anyio
from anyio.abc import TaskGroup
from msgspec.structs import replace

from hutch_executor.account.notify import run_notify
from hutch_executor.account.paths import resolve_paths
from hutch_executor.account.setup import Setup, set_up
from hutch_executor.events.orphan_spool import take_spool
from hutch_executor.events.reporter import Reporter
from hutch_executor.events.spool import Spool
from hutch_executor.link.daemon_link import Link, Standing
from hutch_executor.link.daemon_port import LinkedDaemon
from hutch_executor.process.limits import OVER_LIMIT, Watch, find_choom
from hutch_executor.runners.port import AgentRunner
from hutch_executor.signals import Change
from hutch_shared import messages as m
from hutch_shared.errors import HutchError, Reason
from hutch_shared.events import Notice, TurnEnded, TurnStarted
from hutch_shared.failpoints import failpoint, witness
from hutch_shared.rpc.dispatch import internal_error

__all__ = ["MOVES", "State", "Worker"]

State = Literal["idle", "opening", "ready", "running", "stopping", "closing"]

MOVES: Final[dict[State, frozenset[State]]] = {
    "idle": frozenset({"opening", "closing"}),
    "opening": frozenset({"ready", "closing"}),
    "ready": frozenset({"running", "closing"}),
    "running": frozenset({"ready", "stopping", "closing"}),
    "stopping": frozenset({"ready", "closing"}),
    "closing": frozenset(),
}

INTERRUPT_DEADLINE: Final = 10.0
"""Seconds for the runner to stop a turn, and again for `run` to return after that."""
_CLOSE_DEADLINE: Final = 15.0
_LAST_EVENTS_DEADLINE: Final = 5.0
_PATH_THREADS: Final = 4
_OF_LIMITS: Final = frozenset(
    {"agent_broken", "agent_died", "agent_stuck", "agent_unavailable", "internal", "no_result"}
)
"""Reasons that a limit gives when a session goes over it; the limit is then the better reason."""

_log: Final = logging.getLogger(__name__)
T = TypeVar("T")


class _Outcome:
    """What a piece of work came to, for everyone who waits for it."""

    def __init__(self) -> None:
        self._done = anyio.Event()
        self._value: Any = None

    async def run(self, work: Callable[[], Awaitable[Any]]) -> None:
        try:
            self._value = await work()
        except HutchError as error:
            self._value = error
        except Exception:  # noqa: BLE001  # the border: whoever waits is told by an id
            self._value = internal_error("a request")
        finally:
            self._done.set()

    async def wait(self) -> Any:
        await self._done.wait()
        if isinstance(self._value, HutchError):
            raise self._value
        return self._value


class Worker:
    """Serves hutchd with one runner. Its public methods without a docstring of their own are the wire's."""

    def __init__(
        self, boot: m.Boot, runner: AgentRunner, *, sweep: Callable[[], Awaitable[None]] | None = None, **link: Any
    ) -> None:
        """Be ready to serve; `sweep` ends all that the agent left, the options `link` go to the `Link`."""
        self.state: State = "idle"
        self.reporter = Reporter()
        self.link = Link(boot, self.reporter, self._standing, self._welcomed, **link)
        self._boot = boot
        self._runner = runner
        self._sweep = sweep
        self._tasks: TaskGroup | None = None
        self._session: m.PrepareSession | None = None
        self._daemon: LinkedDaemon | None = None
        self._opened: _Outcome | None = None
        self._accepted: set[str] = set()
        self._turn: str | None = None
        self._ended: tuple[str, int] | None = None
        """The last turn and the number of its `turn_ended`."""
        self._turn_scope = anyio.CancelScope()
        self._cause: TurnEnded | None = None
        """How a turn that was told to stop ends."""
        self._leaving: m.Shutdown | None = None
        self._leave = anyio.Event()
        self._changed = Change()
        self._hurry = anyio.Event()
        self._setup = Setup()
        self._watch: Watch | None = None
        self._path_threads = anyio.CapacityLimiter(_PATH_THREADS)

    def __repr__(self) -> str:
        return f"<Worker {self._boot.executor} {self.state} turn {self._turn} {self.link!r} {self.reporter!r}>"

    # ------------------------------------------------------------ life

    async def serve(self) -> None:
        """Dial hutchd and serve it until `shutdown`, or until the link is hopeless."""
        async with anyio.create_task_group() as self._tasks:
            self._tasks.start_soon(self.reporter.keep)
            self._tasks.start_soon(self._keep_link)
            await self._leave.wait()
            await self._end()
            self._tasks.cancel_scope.cancel()

    def leave(self, reason: str, *, finish_turn: bool = False) -> None:
        """End soon: after the running turn with `finish_turn`, else at once. A later call can only hurry it."""
        if self._leaving is None or (self._leaving.finish_turn and not finish_turn):
            self._leaving = m.Shutdown(reason, finish_turn)
            _log.info("leaving: %s", reason)
        self._leave.set()
        self._changed.happen()
        if not finish_turn:
            self._hurry.set()

    async def wait_leaving(self) -> None:
        """Return when it leaves without waiting for a turn."""
        await self._hurry.wait()

    async def _keep_link(self) -> None:
        error = await self.link.run(self, HANDLERS)
        self.leave(error.message)

    async def _end(self) -> None:
        """Stop the turn, the agent and the connection, in this order, each by its deadline."""
        assert self._leaving is not None
        while self._turn is not None and self._leaving.finish_turn:
            await self._changed.wait()
        if self._turn is not None:
            cause = TurnEnded("stopped", "executor_stopped", f"The executor was stopped: {self._leaving.reason}")
            await self._stop(self._turn, cause)
            with anyio.move_on_after(2 * INTERRUPT_DEADLINE):
                await self._wait_turn_over()
        self._hurry.set()
        self._move("closing")
        await self._close_runner()
        if self._sweep is not None:  # before the last events: what an agent left may leave no room for a thread
            await self._sweep()
        with anyio.move_on_after(_LAST_EVENTS_DEADLINE):
            if self.link.is_up:
                await self.reporter.wait_acked(self.reporter.outbox.last)
        await self.link.close()
        if self.reporter.outbox.unacked:
            with anyio.move_on_after(_LAST_EVENTS_DEADLINE):
                await self.reporter.wait_safe()
        await self.reporter.close()

    async def _wait_turn_over(self) -> None:
        while self._turn is not None:
            await self._changed.wait()

    async def _close_runner(self) -> None:
        with anyio.move_on_after(_CLOSE_DEADLINE):
            try:
                await self._runner.close()
            except Exception:  # noqa: BLE001  # whatever is left of the agent is killed afterwards
                internal_error("closing the agent")

    def _move(self, state: State) -> None:
        if state not in MOVES[self.state]:
            raise AssertionError(f"{self!r} cannot become {state}")
        self.state = state

    def _standing(self) -> Standing:
        turn = self._turn
        if turn is None and self._ended is not None and self._ended[1] > self.reporter.outbox.acked:
            turn = self._ended[0]
        return Standing(self._session.session if self._session else None, turn, self._turn is not None)

    def _welcomed(self, welcome: m.Welcome) -> None:
        """Stop a turn that hutchd does not believe to run: it ended it, and nothing more of it may happen."""
        if self._turn is not None and welcome.turn != self._turn and self._tasks is not None:
            cause = TurnEnded("stopped", "interrupted", "hutchd had ended the turn when the executor came back.")
            self._tasks.start_soon(self._stop, self._turn, cause)

    # ------------------------------------------------------------ the session

    async def prepare_session(self, params: m.PrepareSession) -> m.Prepared:
        """Connect the agent. Sent again for the same session it gives the same answer."""
        if self._opened is None and self.state == "idle" and self._leaving is None:
            if params.agent != self._boot.agent:
                raise HutchError(Reason.WRONG_STATE, f"This executor drives {self._boot.agent}, not {params.agent}.")
            self._session = params
            self._opened = self._start(lambda: self._open(params))
        elif self._session is None or self._session.session != params.session:
            raise HutchError(Reason.WRONG_STATE, "This executor has a session already, or is leaving.")
        assert self._opened is not None
        return cast("m.Prepared", await self._opened.wait())

    async def _open(self, session: m.PrepareSession) -> m.Prepared:
        self._move("opening")
        try:
            if not await anyio.Path(session.cwd).is_dir() or not os.access(session.cwd, os.R_OK | os.X_OK):
                raise HutchError(
                    Reason.AGENT_UNAVAILABLE, f"The directory {session.cwd} is not there, or closed to this account."
                )
            session = replace(session, cwd=str(await anyio.Path(session.cwd).resolve()))
            self._session = session
            spool = await anyio.to_thread.run_sync(
                lambda: Spool(Path(session.spool), self._boot.executor, session.session, session.spool_bytes)
            )
            self.reporter.begin(session.session, spool)
            self._daemon = LinkedDaemon(self.link, self.reporter, session.session, session.cwd)
            await anyio.to_thread.run_sync(find_choom)
            self._watch = Watch()
            self._setup = self._runner.setup = await set_up(session.setup, session.cwd, session.home)
            prepared = await self._open_runner(session, self._daemon)
            if self.state == "closing":
                raise HutchError(Reason.AGENT_UNAVAILABLE, "The executor was told to leave.")
        except BaseException:
            self.leave("the agent could not be started")
            raise
        self._move("ready")
        return replace(prepared, cwd=session.cwd)

    async def _open_runner(self, session: m.PrepareSession, daemon: LinkedDaemon) -> m.Prepared:
        try:
            return await self._runner.open(session, daemon)
        except HutchError as error:
            over = await self._tell_limits()
            if over is None:
                raise
            raise HutchError(error.reason, f"{over.message} {error.message}") from error

    # ------------------------------------------------------------ turns

    def execute_prompt(self, params: m.ExecutePrompt) -> m.Accepted:
        """Start a turn, once: the same turn sent again is accepted and not run again."""
        if self._session is None or params.session != self._session.session:
            raise HutchError(Reason.WRONG_STATE, "This executor does not have that session.")
        if params.turn in self._accepted:
            return m.Accepted(accepted=True)
        if self._leaving is not None or self.state != "ready":
            return m.Accepted(accepted=False, reason="leaving" if self._leaving is not None else self.state)
        assert self._tasks is not None
        assert self._daemon is not None
        self._move("running")
        self._accepted.add(params.turn)
        failpoint("executor.accepted")
        self._turn = self.reporter.turn = params.turn
        self._cause = None
        self._turn_scope = anyio.CancelScope()
        self._daemon.asks.begin_turn()
        self._tasks.start_soon(self._run_turn, params)
        return m.Accepted(accepted=True)

    async def _run_turn(self, prompt: m.ExecutePrompt) -> None:
        assert self._daemon is not None
        await self.reporter.report("turn_started", TurnStarted(prompt.prompt, prompt.number))
        await self._tell_limits()  # what happened between the turns is not this one's
        async with anyio.create_task_group() as group:
            if prompt.timeout is not None:
                group.start_soon(self._expire, prompt.turn, prompt.timeout)
            ended = await self._play(prompt)
            group.cancel_scope.cancel()
        over = await self._tell_limits()
        if over is not None and ended.state == "failed" and ended.reason in _OF_LIMITS:
            ended = replace(ended, reason=over.word, message=f"{over.message} {ended.message}")
        self._daemon.asks.stop()
        failpoint("executor.turn_over")
        n = await self.reporter.report("turn_ended", ended)
        self._ended = (prompt.turn, n)
        self._turn = self.reporter.turn = None
        if self.state != "closing":
            self._move("ready")
        self._changed.happen()

    async def _tell_limits(self) -> Notice | None:
        """Report what the session's limits did since the last call; return that it went over one of its own."""
        assert self._watch is not None
        found = self._watch.news()
        for notice in found:
            await self.reporter.report("notice", notice)
        return next((notice for notice in found if notice.word == OVER_LIMIT), None)

    async def _play(self, prompt: m.ExecutePrompt) -> TurnEnded:
        """Run the turn to an end of some kind."""
        ended: TurnEnded | None = None
        with self._turn_scope:
            try:
                ended = await self._runner.run(prompt)
            except HutchError as error:
                ended = TurnEnded("failed", error.reason.word, error.message)
            except Exception:  # noqa: BLE001  # the border: the person is told by an id
                mark = internal_error("the runner").details["id"]
                ended = TurnEnded("failed", "internal", f"The executor failed inside; see its log ({mark}).")
                self.leave("the runner failed")
        if ended is None:
            ended = TurnEnded("failed", "agent_stuck", "The agent did not stop when it was told to; it was killed.")
        if self._cause is not None and ended.state != "completed":
            return replace(ended, state=self._cause.state, reason=self._cause.reason, message=self._cause.message)
        return ended

    async def _expire(self, turn: str, timeout: float) -> None:
        await anyio.sleep(timeout)
        await self._stop(turn, _timed_out())

    async def interrupt_turn(self, params: m.InterruptExecutor) -> m.Interrupted:
        """Stop the turn. After the answer nothing of it starts any more."""
        cause = _timed_out() if params.timed_out else TurnEnded("stopped", "interrupted", "The turn was interrupted.")
        work = self._start(lambda: self._stop(params.turn, cause))
        return m.Interrupted(was_running=bool(await work.wait()))

    async def _stop(self, turn: str, cause: TurnEnded) -> bool:
        """Tell the runner to stop, and see that it does; return whether the turn was running."""
        if self._turn != turn:
            return False
        assert self._daemon is not None
        assert self._tasks is not None
        if self.state == "running":
            self._move("stopping")
            self._cause = cause
            self._tasks.start_soon(self._give_up, turn, self._turn_scope)
        self._daemon.asks.stop()
        has_stopped = False
        with anyio.move_on_after(INTERRUPT_DEADLINE):
            try:
                await self._runner.interrupt()
                has_stopped = True
            except Exception:  # noqa: BLE001  # a runner that cannot stop is closed instead
                internal_error("stopping the turn")
        if not has_stopped:
            await self._kill(self._turn_scope)
        return True

    async def _give_up(self, turn: str, scope: anyio.CancelScope) -> None:
        """Cancel a turn that goes on long after it was told to stop."""
        await anyio.sleep(2 * INTERRUPT_DEADLINE)
        if self._turn == turn:
            await self._kill(scope)

    async def _kill(self, scope: anyio.CancelScope) -> None:
        """End a turn together with its agent, and so this executor."""
        self.leave("the agent did not stop")
        await self._close_runner()
        scope.cancel()

    async def set_permission_mode(self, params: m.SetMode) -> m.Nothing:
        """Pass the mode on."""
        if self._session is None or params.session != self._session.session:
            raise HutchError(Reason.WRONG_STATE, "This executor does not have that session.")
        assert self._opened is not None
        await self._opened.wait()
        await self._start(lambda: self._runner.set_mode(params.mode)).wait()
        return m.Nothing()

    # ------------------------------------------------------------ as the account

    async def resolve_paths(self, params: m.ResolvePaths) -> m.ResolvedPaths:
        """Resolve paths."""
        cwd = self._session.cwd if self._session else "/"
        return m.ResolvedPaths(await resolve_paths(params.paths, cwd, self._path_threads))

    async def run_notify(self, params: m.RunNotify) -> m.Notified:
        """Run the notify command."""
        return await run_notify(params, self._setup)

    async def take_spool(self, params: m.TakeSpool) -> m.SpooledEvents:
        """Read what a dead executor left."""
        return await anyio.to_thread.run_sync(take_spool, Path(params.directory), params.acked)

    # ------------------------------------------------------------ the connection

    def ack_events(self, params: m.AckEvents) -> None:
        """Forget what hutchd has."""
        witness("acked", self._boot.executor, min(params.n, self.reporter.outbox.sent))
        self.reporter.acknowledge(params.n)

    def shutdown(self, params: m.Shutdown) -> m.Nothing:
        """Leave."""
        self.leave(params.reason, finish_turn=params.finish_turn)
        return m.Nothing()

    def _start(self, work: Callable[[], Awaitable[Any]]) -> _Outcome:
        """Run `work` in a task of the worker's own, which no lost connection cancels."""
        assert self._tasks is not None
        outcome = _Outcome()
        self._tasks.start_soon(outcome.run, work)
        return outcome


HANDLERS: Final = {
    name: getattr(Worker, name)
    for name in (
        "prepare_session",
        "execute_prompt",
        "interrupt_turn",
        "set_permission_mode",
        "resolve_paths",
        "run_notify",
        "take_spool",
        "shutdown",
        "ack_events",
    )
}


def _timed_out() -> TurnEnded:
    return TurnEnded("timed_out", "turn_timeout", "The turn took longer than it may.")
