"""The tables of sessions, turns and permissions."""

from __future__ import annotations

import pytest

from hutch_daemon.machine import IllegalMoveError, TransitionTable, mermaid
from hutch_daemon.services.states import PERMISSION, SESSION, TURN
from hutch_daemon.services.turn_lifecycle import settled_state
from hutch_shared.events import TurnEnded


@pytest.mark.parametrize("table", [SESSION, TURN, PERMISSION])
def test_every_state_is_reached_and_leads_to_an_end(table: TransitionTable[str]) -> None:
    """There is no state that nothing leads to, and none from which no end can be reached."""
    reached = {table.start}
    for _ in table.moves:
        reached |= {after for state in reached for after in table.moves[state]}
    ending = set(table.terminal)
    for _ in table.moves:
        ending |= {state for state, after in table.moves.items() if after & ending}

    assert reached == set(table.moves)
    assert ending == set(table.moves)


def test_terminal_states_never_change() -> None:
    """The ends of a turn and of a question are ends."""
    assert TURN.terminal == {"completed", "failed", "stopped", "timed_out"}
    assert PERMISSION.live == {"pending"}


def test_an_illegal_move_tells_the_story() -> None:
    """The error names the thing, where it stands, and where it could go."""
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
def test_what_fails_while_it_is_stopped_was_stopped(state: str, ended: str, settled: str) -> None:
    """A turn that fails while it is being stopped counts as stopped."""
    assert settled_state(state, TurnEnded(ended, "r", "m")) == settled  # type: ignore[arg-type]


def test_the_drawing_shows_every_move() -> None:
    """The documentation's diagram has a line for each move and each end."""
    drawn = mermaid(SESSION).splitlines()

    assert drawn == ["stateDiagram-v2", "    [*] --> open", "    open --> closed", "    closed --> [*]"]
