"""The next step for a turn, from its state, its executor and the requests about it."""

from __future__ import annotations

import math
from itertools import product
from typing import Any, get_args

import pytest

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
from hutch_daemon.services.states import TURN
from hutch_shared.messages import TurnState

NOW = 100.0
SOON = 130.0
CONNECTED = TurnExecutor()
AWAY = TurnExecutor(connected=False)
DRAINING = TurnExecutor(over=True, detail="it was silent")
LEFT_BEHIND = TurnExecutor(connected=False, over=True, ended=True, quarantined=True, detail="it did not end")
GONE = TurnExecutor(connected=False, over=True, ended=True, detail="it was killed")
OVER_LIMIT = TurnExecutor(connected=False, over=True, ended=True, over_limit="It took too much memory.")
NEVER_CAME = TurnExecutor(connected=False, over=True, ended=True, said_hello=False, detail="it did not come back")
EXECUTORS = {
    "unknown": None,
    "connected": CONNECTED,
    "away": AWAY,
    "draining": DRAINING,
    "gone": GONE,
    "left behind": LEFT_BEHIND,
    "over a limit": OVER_LIMIT,
    "never came": NEVER_CAME,
}
REQUESTS: dict[str, dict[str, Any]] = {
    "nothing": {"deadline": SOON},
    "its time is over": {"deadline": NOW},
    "a stop": {"stop": "interrupted"},
    "a stop that was given time": {"stop": "interrupted", "stop_until": SOON},
    "a stop that was sent": {"stop": "interrupted", "stop_until": SOON, "stop_sent": True},
    "a stop whose time is over": {"stop": "interrupted", "stop_until": NOW, "stop_sent": True},
    "a prompt that was not sent": {"prompt_sent": False},
    "a prompt that was sent": {"prompt_sent": True},
    "a call that broke": {"retry_at": SOON, "stop": "interrupted", "stop_until": math.inf},
    "no storing": {"storable": False, "stop": "interrupted", "stop_until": NOW, "stop_sent": True, "halted": True},
}
LIVE: tuple[TurnState, ...] = ("queued", "dispatching", "running", "stopping")


def step(turn: TurnState, executor: TurnExecutor | None, **request: Any) -> Step:
    """Return the next step."""
    return next_step(turn, executor, TurnRequest(**request), NOW)


def spelled(found: Step) -> str:
    """Return a step in a few words."""
    match found:
        case Settle(ended=None):
            return "back to the queue"
        case Settle(ended=ended):
            assert ended is not None
            return f"{ended.state}: {ended.reason}"
        case Stop(action=action, why=why):
            return f"{action.name.lower()}, {why}"
        case WaitUntil(time=time):
            return "wait" if time == math.inf else f"wait until {time:.0f}"
        case Dispatch():
            return "dispatch"
        case Offer():
            return "offer"
        case HandOver():
            return "hand over"


@pytest.mark.parametrize(
    ("turn", "executor", "request_", "answer"),
    [
        ("queued", "unknown", "nothing", "dispatch"),
        ("queued", "gone", "nothing", "dispatch"),
        ("queued", "connected", "a stop", "stopped: interrupted"),
        ("dispatching", "connected", "nothing", "hand over"),
        ("dispatching", "connected", "a prompt that was sent", "hand over"),
        ("dispatching", "connected", "a stop", "hand over"),
        ("dispatching", "connected", "a call that broke", "wait until 130"),
        ("dispatching", "away", "nothing", "wait"),
        ("dispatching", "draining", "nothing", "wait"),
        ("dispatching", "gone", "a prompt that was not sent", "back to the queue"),
        ("dispatching", "gone", "a prompt that was sent", "failed: outcome_unknown"),
        ("dispatching", "gone", "nothing", "failed: outcome_unknown"),
        ("dispatching", "unknown", "a prompt that was not sent", "back to the queue"),
        ("running", "connected", "nothing", "wait until 130"),
        ("running", "away", "nothing", "wait until 130"),
        ("running", "draining", "nothing", "wait until 130"),
        ("running", "connected", "its time is over", "record, timed_out"),
        ("running", "away", "a stop", "record, interrupted"),
        ("running", "gone", "nothing", "failed: executor_lost"),
        ("running", "gone", "a stop", "failed: executor_lost"),
        ("running", "over a limit", "nothing", "failed: over_limit"),
        ("running", "never came", "nothing", "failed: outcome_unknown"),
        ("running", "unknown", "nothing", "failed: outcome_unknown"),
        ("running", "connected", "no storing", "give_time, interrupted"),
        ("stopping", "connected", "nothing", "give_time, interrupted"),
        ("stopping", "connected", "a stop", "give_time, interrupted"),
        ("stopping", "connected", "a stop that was given time", "ask, interrupted"),
        ("stopping", "away", "a stop that was given time", "wait until 130"),
        ("stopping", "connected", "a stop that was sent", "wait until 130"),
        ("stopping", "connected", "a stop whose time is over", "kill, interrupted"),
        ("stopping", "away", "a stop whose time is over", "kill, interrupted"),
        ("stopping", "connected", "a call that broke", "wait until 130"),
        ("stopping", "gone", "a stop", "stopped: interrupted"),
        ("stopping", "unknown", "nothing", "stopped: interrupted"),
        ("stopping", "over a limit", "a stop", "stopped: interrupted"),
    ],
)
def test_each_situation_has_one_step(turn: TurnState, executor: str, request_: str, answer: str) -> None:
    """A turn's state, its executor and the requests decide the step."""
    assert spelled(step(turn, EXECUTORS[executor], **REQUESTS[request_])) == answer


def test_a_prompt_that_may_have_been_accepted_is_offered_if_the_agent_can_show_that_it_was_not() -> None:
    """Only while its executor never reported it, its processes are gone, and the user does not want it stopped."""
    offered = {
        (turn, executor, request)
        for turn, executor, request in product(LIVE, EXECUTORS, REQUESTS)
        if next_step(turn, EXECUTORS[executor], TurnRequest(**REQUESTS[request]), NOW, offerable=True) == Offer()
    }

    gone = ("unknown", "gone", "over a limit", "never came")
    assert offered == {
        ("dispatching", executor, request)
        for executor in gone
        for request in ("nothing", "its time is over", "a prompt that was sent")
    }


@pytest.mark.parametrize("turn", LIVE)
def test_every_situation_has_a_step_that_its_state_allows(turn: TurnState) -> None:
    """For every state, executor and request, the turn table allows the step."""
    for executor, request, offerable in product(EXECUTORS, REQUESTS, (False, True)):
        view = EXECUTORS[executor]
        print(executor, request, offerable, sep=", ")
        found = next_step(turn, view, TurnRequest(**REQUESTS[request]), NOW, offerable=offerable)
        _check_allowed(turn, view, found)


def _check_allowed(turn: TurnState, view: TurnExecutor | None, found: Step) -> None:
    match found:
        case Dispatch():
            assert TURN.allows(turn, "dispatching")
        case HandOver():
            assert turn == "dispatching"
            assert view is not None
            assert view.connected
            assert not view.over
        case Settle(ended=None) | Offer():
            assert TURN.allows(turn, "queued")
        case Settle(ended=ended):
            assert ended is not None
            assert TURN.allows(turn, ended.state)
        case Stop(action=StopAction.RECORD):
            assert TURN.allows(turn, "stopping")
        case Stop():
            assert turn in ("running", "stopping")
            assert view is not None
            assert not view.ended
        case WaitUntil(time=time):
            assert time > NOW


def test_the_situations_cover_all_live_states() -> None:
    """They are the states of the table that are not terminal."""
    assert set(LIVE) == TURN.live
    assert TURN.live | TURN.terminal == set(get_args(TurnState))


def test_a_stop_is_recorded_requested_awaited_and_then_a_kill() -> None:
    """hutchd records the stop, asks the executor, waits for the deadline, and kills."""
    request = TurnRequest(stop="closed")
    steps = [spelled(next_step("running", CONNECTED, request, NOW))]
    steps.append(spelled(next_step("stopping", CONNECTED, request, NOW)))
    request.stop_until = SOON
    steps.append(spelled(next_step("stopping", CONNECTED, request, NOW)))
    request.stop_sent = True
    steps.append(spelled(next_step("stopping", CONNECTED, request, NOW)))
    steps.append(spelled(next_step("stopping", CONNECTED, request, SOON)))

    assert steps == ["record, closed", "give_time, closed", "ask, closed", "wait until 130", "kill, closed"]


def test_a_halted_turn_is_not_killed_while_nothing_can_be_stored() -> None:
    """Its end is in the executor's spool. It gets more time, and is recorded once the store accepts writes."""
    request = TurnRequest(stop="interrupted", stop_until=NOW, stop_sent=True, halted=True, storable=False)

    assert spelled(next_step("running", CONNECTED, request, NOW)) == "give_time, interrupted"
    request.stop_until, request.storable = SOON, True
    assert spelled(next_step("running", CONNECTED, request, NOW)) == "record, interrupted"
    assert spelled(next_step("stopping", CONNECTED, request, NOW)) == "wait until 130"


def test_a_turn_that_does_not_stop_is_killed_even_while_nothing_can_be_stored() -> None:
    """An agent must not run on because a disk is full."""
    request = TurnRequest(stop="interrupted", stop_until=NOW, stop_sent=True, storable=False)

    assert spelled(next_step("running", CONNECTED, request, NOW)) == "kill, interrupted"
