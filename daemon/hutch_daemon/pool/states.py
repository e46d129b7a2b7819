"""The states of an executor. It is `gone`, and its slot free, only after a search found no process of it left."""

from __future__ import annotations

from typing import Final

from hutch_daemon.machine import TransitionTable
from hutch_shared.messages import ExecutorState

__all__ = ["EXECUTOR", "OVER"]

EXECUTOR: Final[TransitionTable[ExecutorState]] = TransitionTable(
    "executor",
    "starting",
    {
        "starting": frozenset({"ready", "draining"}),
        "ready": frozenset({"leased", "detached", "draining"}),
        "leased": frozenset({"detached", "draining"}),
        # it has no connection, because hutchd was restarted or the connection broke
        "detached": frozenset({"ready", "leased", "draining"}),
        "draining": frozenset({"gone", "quarantined"}),
        "quarantined": frozenset({"gone"}),
        "gone": frozenset(),
    },
)
OVER: Final = frozenset[ExecutorState]({"draining", "gone", "quarantined"})
"""The states of an executor that is ending or has ended, and so serves no session any more."""
