"""The state tables as drawings, for the documentation."""

from __future__ import annotations

from hutch_daemon.machine import mermaid
from hutch_daemon.pool.states import EXECUTOR
from hutch_daemon.sessions.states import PERMISSION, SESSION, TURN

__all__ = ["tables"]


def tables() -> dict[str, str]:
    """Return a Mermaid state diagram for each kind of thing that has states, by its name."""
    return {
        SESSION.name: mermaid(SESSION),
        TURN.name: mermaid(TURN),
        EXECUTOR.name: mermaid(EXECUTOR),
        PERMISSION.name: mermaid(PERMISSION),
    }
