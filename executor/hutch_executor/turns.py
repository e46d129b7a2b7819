"""Runs a session's turns, one at a time.

Theory. A turn reports `turn_started`, then the runner's events, then `turn_ended`. The first and the last are reported
exactly once, whatever happens to the connection. `stop` records the cause before it interrupts the runner. If the
runner does not stop in time, it is closed and the turn is cancelled. The turn then ends with the recorded cause, unless
the agent completed it first.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final, Literal

import anyio
from anyio.abc import TaskGroup
from msgspec.structs import replace

from hutch_executor.events.reporter import Reporter
from hutch_executor.link.open_requests import OpenRequests
from hutch_executor.process.limits import OVER_LIMIT, LimitWatch
from hutch_executor.runners.port import AgentRunner
from hutch_shared import messages as m
from hutch_shared.errors import HutchError
from hutch_shared.events import Notice, TurnEnded, TurnStarted
from hutch_shared.failpoints import failpoint
from hutch_shared.latch import Latch
from hutch_shared.rpc.dispatch import internal_error

__all__ = ["INTERRUPT_DEADLINE", "SessionTurns", "report_limits", "timed_out"]

INTERRUPT_DEADLINE: Final = 10.0
"""The runner's time limit in seconds, for `interrupt` and then again for the end of `run`."""
_CAUSED_BY_LIMITS: Final = frozenset(
    {"agent_broken", "agent_died", "agent_silent", "agent_stuck", "agent_unavailable", "internal", "no_result"}
)
"""Failure reasons that `over_limit` replaces if the session exceeded a limit during the turn."""


@dataclass(slots=True, eq=False)
class _RunningTurn:
    id: str
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    cause: TurnEnded | None = None
    """The end that a request to stop has set; None while the turn may run on."""


class SessionTurns:
    """Runs the turns of one session with one runner."""

    def __init__(
        self,
        runner: AgentRunner,
        reporter: Reporter,
        requests: OpenRequests,
        limits: LimitWatch,
        tasks: TaskGroup,
        *,
        changed: Latch,
        leave: Callable[[str], None],
        close_agent: Callable[[], Awaitable[None]],
    ) -> None:
        """Start without a turn. Notifies `changed` when a turn ends; calls `leave` when the agent cannot go on."""
        self._runner = runner
        self._reporter = reporter
        self._requests = requests
        self._limits = limits
        self._tasks = tasks
        self._changed = changed
        self._leave = leave
        self._close_agent = close_agent
        self._accepted: set[str] = set()
        self._running: _RunningTurn | None = None
        self._last: tuple[str, int] | None = None
        """The last turn that ended, and the number of its `turn_ended`."""

    def __repr__(self) -> str:
        return f"<SessionTurns {self.state} {self.running}>"

    @property
    def running(self) -> str | None:
        """The id of the running turn, also while it is being stopped; None between turns."""
        return self._running.id if self._running else None

    @property
    def state(self) -> Literal["ready", "running", "stopping"]:
        """The phase of the current turn; `ready` between turns."""
        if self._running is None:
            return "ready"
        return "running" if self._running.cause is None else "stopping"

    @property
    def unacknowledged(self) -> str | None:
        """The running turn, or the last one if hutchd has not acknowledged its `turn_ended`."""
        if self._running is None and self._last is not None and self._last[1] > self._reporter.outbox.acked:
            return self._last[0]
        return self.running

    def was_accepted(self, turn: str) -> bool:
        """Whether `begin` has already accepted this turn."""
        return turn in self._accepted

    def begin(self, prompt: m.ExecutePrompt) -> None:
        """Start a turn in a task of its own. Only in the state `ready`."""
        assert self._running is None
        self._running = _RunningTurn(prompt.turn)
        self._accepted.add(prompt.turn)
        failpoint("executor.accepted")
        self._reporter.turn = prompt.turn
        self._requests.begin_turn()
        self._tasks.start_soon(self._run, prompt, self._running)

    async def _run(self, prompt: m.ExecutePrompt, turn: _RunningTurn) -> None:
        await self._reporter.report("turn_started", TurnStarted(prompt.prompt, prompt.number, prompt.kind))
        await report_limits(self._limits, self._reporter)  # limits exceeded between turns do not belong to this turn
        async with anyio.create_task_group() as group:
            if prompt.timeout is not None:
                group.start_soon(self._expire, turn, prompt.timeout)
            ended = await self._play(prompt, turn)
            group.cancel_scope.cancel()
        over = await report_limits(self._limits, self._reporter)
        if over is not None and ended.state == "failed" and ended.reason in _CAUSED_BY_LIMITS:
            ended = replace(ended, reason=over.word, message=f"{over.message} {ended.message}")
        self._requests.stop()
        failpoint("executor.turn_over")
        n = await self._reporter.report("turn_ended", ended)
        self._last = (turn.id, n)
        self._running = self._reporter.turn = None
        self._changed.notify()

    async def _play(self, prompt: m.ExecutePrompt, turn: _RunningTurn) -> TurnEnded:
        """Run the turn and return how it ended."""
        ended: TurnEnded | None = None
        with turn.scope:
            try:
                ended = await self._runner.run(prompt)
            except HutchError as error:
                ended = TurnEnded("failed", error.reason.word, error.message)
            except Exception:  # noqa: BLE001  # the boundary: the user gets an id that the log explains
                mark = internal_error("the runner").details["id"]
                ended = TurnEnded("failed", "internal", f"The executor failed inside; see its log ({mark}).")
                self._leave("the runner failed")
        if ended is None:
            ended = TurnEnded("failed", "agent_stuck", "The agent did not stop on request; it was killed.")
        if turn.cause is not None and ended.state != "completed":
            return replace(ended, state=turn.cause.state, reason=turn.cause.reason, message=turn.cause.message)
        return ended

    async def _expire(self, turn: _RunningTurn, timeout: float) -> None:
        await anyio.sleep(timeout)
        await self.stop(turn.id, timed_out())

    # ------------------------------------------------------------ stopping

    async def stop(self, turn_id: str, cause: TurnEnded) -> bool:
        """Stop a turn; return whether it was running. From then on it starts nothing more. The first cause stands."""
        turn = self._running
        if turn is None or turn.id != turn_id:
            return False
        if turn.cause is None:
            turn.cause = cause
            self._tasks.start_soon(self._kill_later, turn)
        self._requests.stop()
        has_stopped = False
        with anyio.move_on_after(INTERRUPT_DEADLINE):
            try:
                await self._runner.interrupt()
                has_stopped = True
            except Exception:  # noqa: BLE001  # a runner that cannot interrupt is closed instead
                internal_error("stopping the turn")
        if not has_stopped:
            await self._kill(turn)
        return True

    async def _kill_later(self, turn: _RunningTurn) -> None:
        """Kill a turn that still runs long after the request to stop."""
        await anyio.sleep(2 * INTERRUPT_DEADLINE)
        if self._running is turn:
            await self._kill(turn)

    async def _kill(self, turn: _RunningTurn) -> None:
        """Close the agent, cancel the turn and let this executor end."""
        self._leave("the agent did not stop")
        await self._close_agent()
        turn.scope.cancel()


def timed_out() -> TurnEnded:
    """Return the end of a turn that exceeded its time limit."""
    return TurnEnded("timed_out", "turn_timeout", "The turn exceeded its time limit.")


async def report_limits(watch: LimitWatch, reporter: Reporter) -> Notice | None:
    """Report the limits exceeded since the last call; return the notice `over_limit`, if there is one."""
    notices = watch.take_notices()
    for notice in notices:
        await reporter.report("notice", notice)
    return next((notice for notice in notices if notice.word == OVER_LIMIT), None)
