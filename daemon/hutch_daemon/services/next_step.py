"""Decides the next step for one turn from its state, its executor and the requests about it. Pure.

The session's loop reads the store, calls `next_step`, carries out the step, and starts again. Between two steps it
keeps only `TurnRequest` in memory, so that a lost wake-up, a restart or a failing store only delays a turn.

    state        executor            request            step
    queued       any                 stop               Settle: it is stopped
    queued       any                 none               Dispatch
    dispatching  ended               prompt not sent    Settle: back to the queue
    dispatching  processes gone      prompt sent        Offer, once, if the agent shows which prompts it got
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
    "HandOver",
    "Offer",
    "Settle",
    "Step",
    "Stop",
    "StopAction",
    "TurnExecutor",
    "TurnRequest",
    "WaitUntil",
    "next_step",
]


@dataclass(frozen=True, slots=True)
class TurnExecutor:
    """The executor of a turn, as far as it matters for the next step."""

    connected: bool = True
    over: bool = False
    """True if it is being ended or has ended, and so accepts nothing any more."""
    ended: bool = False
    """True if its processes are gone, or it is quarantined."""
    quarantined: bool = False
    """True if hutchd could not show that its processes are gone."""
    said_hello: bool = True
    """True if it has connected to this hutchd at least once."""
    over_limit: str = ""
    """A sentence if the kernel ended it because of a limit, otherwise ""."""
    detail: str = ""
    """The reason why it is being ended, and for a quarantined one what may be left of it."""


@dataclass(slots=True, eq=False)
class TurnRequest:
    """The requests about a turn and the progress in carrying them out. It is only in memory; times are monotonic."""

    stop: StopCause | None = None
    """The reason why the turn should stop; None if it should not."""
    stop_sent: bool = False
    """True if the executor was asked to interrupt the turn."""
    stop_until: float | None = None
    """The time by which the executor must have stopped the turn; None if it has no deadline yet."""
    halted: bool = False
    """True if the executor replied that it starts nothing more for the turn."""
    deadline: float = math.inf
    """The time at which a running turn exceeds its time limit."""
    retry_at: float = -math.inf
    """The time before which nothing is sent to the executor, because the last call failed."""
    prompt_sent: bool | None = None
    """False if the executor cannot have the prompt, True if it may have it; None if an earlier hutchd dispatched it."""
    storable: bool = True
    """True if the store can be written."""


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Get an executor, and record that it gets the turn."""


@dataclass(frozen=True, slots=True)
class HandOver:
    """Send the prompt to the executor. Sending it twice is harmless: the turn id identifies it."""


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
    """End the turn with this result, or queue it again if `ended` is None."""

    ended: TurnEnded | None


@dataclass(frozen=True, slots=True)
class Offer:
    """Queue the turn again. Its executor may have accepted the prompt: the next one looks whether the agent got it."""


@dataclass(frozen=True, slots=True)
class WaitUntil:
    """Wait for a wake-up, or until this time."""

    time: float


Step = Dispatch | HandOver | Stop | Settle | Offer | WaitUntil


def next_step(
    turn: TurnState, executor: TurnExecutor | None, request: TurnRequest, now: float, *, offerable: bool = False
) -> Step:
    """Return the next step for an unfinished turn. `executor` is None if hutchd knows no executor that has the turn.

    `offerable`: another executor can find out whether the agent got the prompt, and the turn was not offered before.
    """
    if turn == "queued":
        return Dispatch() if request.stop is None else Settle(stopped(request.stop))
    if executor is None or executor.ended:
        sent = turn == "dispatching" and request.prompt_sent is not False
        if sent and offerable and request.stop is None and not (executor is not None and executor.quarantined):
            return Offer()
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


def _stop(turn: TurnState, executor: TurnExecutor, request: TurnRequest, why: StopCause, now: float) -> Step:
    """Record that the turn stops, set a deadline, ask the executor to stop it, and kill the executor at the deadline.

    While the store cannot be written, the executor of a halted turn is not killed: the turn's end is in its spool.
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


def _without_executor(turn: TurnState, executor: TurnExecutor | None, request: TurnRequest) -> TurnEnded | None:
    """Return the end of a turn whose executor is gone; None to queue it again, if the executor never had the prompt."""
    if turn == "dispatching" and request.prompt_sent is False:
        return None
    if turn == "stopping":
        why = request.stop or "interrupted"
        if executor is not None and executor.quarantined:
            return stopped(why, f"Its executor was ended: {executor.detail}.", verified=False)
        return stopped(why, "Its executor is gone.")
    if executor is None:
        return outcome_unknown("its executor is gone")
    if turn == "running" and executor.said_hello:
        return over_limit(executor.over_limit) if executor.over_limit else lost(executor.detail)
    return outcome_unknown(executor.detail or "its executor is gone")
