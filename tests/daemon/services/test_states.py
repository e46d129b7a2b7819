"""The transition tables of sessions, turns and permission requests."""

from __future__ import annotations

import pytest

from hutch_daemon.machine import IllegalMoveError, TransitionTable, mermaid
from hutch_daemon.services.states import PERMISSION, SESSION, TURN
from hutch_daemon.services.turn_lifecycle import settled_state
from hutch_shared.events import TurnEnded


@pytest.mark.parametrize("table", [SESSION, TURN, PERMISSION])
def test_every_state_is_reached_and_leads_to_an_end(table: TransitionTable[str]) -> None:
    """Every state can be reached, and from every state an end can be reached."""
    reached = {table.start}
    for _ in table.moves:
        reached |= {after for state in reached for after in table.moves[state]}
    ending = set(table.terminal)
    for _ in table.moves:
        ending |= {state for state, after in table.moves.items() if after & ending}

    assert reached == set(table.moves)
    assert ending == set(table.moves)


def test_terminal_states_never_change() -> None:
    """No transition leads out of the final state of a turn or a permission request."""
    assert TURN.terminal == {"completed", "failed", "stopped", "timed_out"}
    assert PERMISSION.live == {"pending"}


def test_an_illegal_move_names_the_record_and_its_state() -> None:
    """The error also lists the states that the record could go to."""
    with pytest.raises(IllegalMoveError, match="turn t-1: queued does not lead to completed, only to"):
        TURN.move("queued", "completed", "t-1")


@pytest.mark.parametrize(
    ("state", "ended", "settled"),
    [
        ("running", "failed", "failed"),
        ("stopping", "failed", "stopped"),
        ("stopping", "completed", "completed"),
        ("stopping", "timed_out", "timed_out"),
    ],
)
def test_a_failure_while_stopping_counts_as_stopped(state: str, ended: str, settled: str) -> None:
    """A turn that fails while it is being stopped is stopped."""
    assert settled_state(state, TurnEnded(ended, "r", "m")) == settled  # type: ignore[arg-type]


def test_the_diagram_shows_every_move() -> None:
    """The documentation's diagram has a line for each move and each end."""
    drawn = mermaid(SESSION).splitlines()

    assert drawn == ["stateDiagram-v2", "    [*] --> open", "    open --> closed", "    closed --> [*]"]
