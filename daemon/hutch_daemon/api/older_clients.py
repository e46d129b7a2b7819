"""Results for clients that do not know a word of the wire that came later. Pure."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from hutch_shared import messages as m

__all__ = ["without_waiting_state"]


def without_waiting_state(result: Any) -> Any:
    """Return a result in which turns that are `awaiting_permission` are `running`, as before there was that state."""
    match result:
        case m.Turn(state="awaiting_permission") as turn:
            return replace(turn, state="running")
        case m.Session(active_state="awaiting_permission") as session:
            return replace(session, active_state="running")
        case m.Turns() as found:
            return replace(found, turns=tuple(map(without_waiting_state, found.turns)))
        case m.Sessions() as found:
            return replace(found, sessions=tuple(map(without_waiting_state, found.sessions)))
        case _:
            return result
