"""The states of an executor. Its slot is free only when it is `gone`: when a look found nothing left of it."""

from __future__ import annotations

from typing import Final

from hutch_daemon.machine import TransitionTable
from hutch_shared.messages import ExecutorState

__all__ = ["EXECUTOR"]

EXECUTOR: Final[TransitionTable[ExecutorState]] = TransitionTable(
    "executor",
    "starting",
    {
        "starting": frozenset({"ready", "draining"}),
        "ready": frozenset({"leased", "detached", "draining"}),
        "leased": frozenset({"detached", "draining"}),
        # without a connection: hutchd was restarted, or the connection broke
        "detached": frozenset({"ready", "leased", "draining"}),
        "draining": frozenset({"gone", "quarantined"}),
        "quarantined": frozenset({"gone"}),
        "gone": frozenset(),
    },
)
