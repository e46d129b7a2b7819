"""What follows for one turn from its state, its executor and what was requested: pure, no I/O and no clock.

The session's loop reads the store, calls `next_step`, carries the result out and looks again. Nothing is remembered
between two looks but `TurnRequest`, so that a lost wake-up, a restart or a failing store only delays a turn.

    state        executor            request            step
    queued       any                 stop               Settle: it is stopped
    queued       any                 none               Dispatch
    dispatching  ended               prompt not sent    Settle: back to the queue
    any later    ended               any                Settle: stopped, lost, over a limit, or outcome unknown
    dispatching  not connected       any                WaitUntil woken
    dispatching  connected           any                HandOver
    running      any                 none               WaitUntil its deadline; then as with a stop
    running      any                 stop               Stop: record it, ask the executor, wait, kill
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from hutch_daemon.services.turn_lifecycle import StopCause, lost, outcome_unknown, over_limit, stopped
from hutch_shared.events import TurnEnded
from hutch_shared.messages import TurnState

__all__ = [
    "Dispatch",
    "ExecutorView",
    "HandOver",
    "Settle",
    "Step",
    "Stop",
    "StopAction",
    "TurnRequest",
    "WaitUntil",
    "next_step",
]


@dataclass(frozen=True, slots=True)
class ExecutorView:
    """The executor that has a turn, as far as it matters for the next step."""

    connected: bool = True
    over: bool = False
    """It is being ended: it takes nothing any more."""
    ended: bool = False
    """Its processes are gone, or it is quarantined."""
    said_hello: bool = True
    """It has connected to this hutchd at least once."""
    over_limit: str = ""
    """A sentence, if the kernel ended it for a limit."""
    detail: str = ""


@dataclass(slots=True, eq=False)
class TurnRequest:
    """What was requested of a turn and what was done about it. It is in memory only."""

    stop: StopCause | None = None
    stop_sent: bool = False
    """The executor was asked to interrupt the turn."""
    stop_until: float | None = None
    """When the executor's time to stop the turn ends; None while it has been given none."""
    halted: bool = False
    """The executor replied that nothing of the turn starts any more."""
    deadline: float = math.inf
    """When a running turn has taken longer than it may."""
    retry_at: float = -math.inf
    """Nothing is sent to the executor before this time: the last call broke."""
    prompt_sent: bool | None = None
    """Whether the executor may have the prompt; None: an earlier hutchd dispatched it."""
    storable: bool = True
    """The store takes writes."""


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Get an executor and record that the turn is handed to it."""


@dataclass(frozen=True, slots=True)
class HandOver:
    """Send the prompt to the executor. Sent twice, it is answered alike: the turn id identifies it."""


class StopAction(Enum):
    """The steps of stopping a turn."""

    RECORD = "record that the turn is being stopped"
    GIVE_TIME = "give the executor its time to stop the turn"
    ASK = "ask the executor to interrupt the turn"
    KILL = "end the executor with all its processes, and the turn"


@dataclass(frozen=True, slots=True)
class Stop:
    """Take one step of stopping the turn."""

    action: StopAction
    why: StopCause


@dataclass(frozen=True, slots=True)
class Settle:
    """End the turn so, or queue it again (None)."""

    ended: TurnEnded | None


@dataclass(frozen=True, slots=True)
class WaitUntil:
    """Wait for a wake-up, or until this time."""

    time: float


Step = Dispatch | HandOver | Stop | Settle | WaitUntil


def next_step(turn: TurnState, executor: ExecutorView | None, request: TurnRequest, now: float) -> Step:
    """Return what to do for a live turn in this state; `executor` None: hutchd knows no executor that has it."""
    if turn == "queued":
        return Dispatch() if request.stop is None else Settle(stopped(request.stop))
    if executor is None or executor.ended:
        return Settle(_without_executor(turn, executor, request))
    if turn == "dispatching":
        if not executor.connected or executor.over:
            return WaitUntil(math.inf)
        return WaitUntil(request.retry_at) if now < request.retry_at else HandOver()
    if turn == "stopping" or request.stop is not None:
        return _stop(turn, executor, request, request.stop or "interrupted", now)
    if now >= request.deadline:
        return _stop(turn, executor, request, "timed_out", now)
    return WaitUntil(request.deadline)


def _stop(turn: TurnState, executor: ExecutorView, request: TurnRequest, why: StopCause, now: float) -> Step:
    """Record it, give the executor time and ask it; kill it when its time is over.

    While nothing can be stored, a turn that halted is not killed: its end is in the executor's spool.
    """
    if turn == "running" and request.storable:
        return Stop(StopAction.RECORD, why)
    if request.stop_until is None:
        return Stop(StopAction.GIVE_TIME, why)
    if now < request.retry_at:
        return WaitUntil(min(request.retry_at, request.stop_until))
    if not request.stop_sent and executor.connected:
        return Stop(StopAction.ASK, why)
    if now < request.stop_until:
        return WaitUntil(request.stop_until)
    if request.halted and not request.storable:
        return Stop(StopAction.GIVE_TIME, why)
    return Stop(StopAction.KILL, why)


def _without_executor(turn: TurnState, executor: ExecutorView | None, request: TurnRequest) -> TurnEnded | None:
    """Return how a turn ends whose executor is gone; None: it never had the prompt, and another one gets it."""
    if turn == "dispatching" and request.prompt_sent is False:
        return None
    if turn == "stopping":
        return stopped(request.stop or "interrupted", "Its executor is gone.")
    if executor is None:
        return outcome_unknown("its executor is gone")
    if turn == "running" and executor.said_hello:
        return over_limit(executor.over_limit) if executor.over_limit else lost(executor.detail)
    return outcome_unknown(executor.detail)
