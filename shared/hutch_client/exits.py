"""The exit codes of `hutch`."""

from __future__ import annotations

from typing import Final

from hutch_shared.errors import HutchError, Reason

__all__ = [
    "FAILED",
    "INTERRUPTED",
    "NEEDS_ANSWER",
    "NOT_ALLOWED",
    "NO_DAEMON",
    "OK",
    "TIMED_OUT",
    "USAGE",
    "of_error",
    "of_turn",
]

OK: Final = 0
FAILED: Final = 1
USAGE: Final = 2
NO_DAEMON: Final = 3
NOT_ALLOWED: Final = 4
NEEDS_ANSWER: Final = 5
TIMED_OUT: Final = 124
INTERRUPTED: Final = 130

_OF_REASON: Final = {
    Reason.INVALID_PARAMS: USAGE,
    Reason.INVALID_RULE: USAGE,
    Reason.CONNECTION_LOST: NO_DAEMON,
    Reason.SHUTTING_DOWN: NO_DAEMON,
    Reason.PROTOCOL_MISMATCH: NO_DAEMON,
    Reason.NOT_ALLOWED: NOT_ALLOWED,
    Reason.INSIDER: NOT_ALLOWED,
    Reason.POLICY_FORBIDS: NOT_ALLOWED,
    Reason.TIMED_OUT: TIMED_OUT,
}
_OF_TURN: Final = {"completed": OK, "stopped": INTERRUPTED, "timed_out": TIMED_OUT}


def of_error(error: HutchError) -> int:
    """Return the exit code for an error that ended the command."""
    return _OF_REASON.get(error.reason, FAILED)


def of_turn(state: str) -> int:
    """Return the exit code for a turn's terminal state."""
    return _OF_TURN.get(state, FAILED)
