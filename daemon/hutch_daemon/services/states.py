"""The states of sessions, turns and permission requests. Terminal states never change; the first writer wins."""

from __future__ import annotations

from typing import Final

from hutch_daemon.machine import TransitionTable
from hutch_shared.messages import PermissionState, SessionState, ShownTurnState, TurnState

__all__ = ["PERMISSION", "SESSION", "TURN", "shown_state"]

SESSION: Final[TransitionTable[SessionState]] = TransitionTable(
    "session", "open", {"open": frozenset({"closed"}), "closed": frozenset()}
)

TURN: Final[TransitionTable[TurnState]] = TransitionTable(
    "turn",
    "queued",
    {
        "queued": frozenset({"dispatching", "stopped", "failed"}),
        # back to queued if the executor refused the prompt, never got it, or is gone and may have accepted it: then the
        # next executor runs it only if the agent never got it
        "dispatching": frozenset({"queued", "running", "failed"}),
        "running": frozenset({"stopping", "completed", "failed", "stopped", "timed_out"}),
        "stopping": frozenset({"stopped", "timed_out", "completed"}),
        "completed": frozenset(),
        "failed": frozenset(),
        "stopped": frozenset(),
        "timed_out": frozenset(),
    },
)

PERMISSION: Final[TransitionTable[PermissionState]] = TransitionTable(
    "permission",
    "pending",
    {
        "pending": frozenset({"allowed", "denied", "answered", "expired", "withdrawn"}),
        "allowed": frozenset(),
        "denied": frozenset(),
        "answered": frozenset(),
        "expired": frozenset(),
        "withdrawn": frozenset(),
    },
)


def shown_state(state: TurnState, pending: int) -> ShownTurnState:
    """Return the state that readers see of a turn with this number of pending permission requests."""
    return "awaiting_permission" if state == "running" and pending else state
