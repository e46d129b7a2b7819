"""The state of a running turn, and the limits of what may take how long."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import anyio

from hutch_shared import messages as m
from hutch_shared.events import TurnEnded

__all__ = ["STOPPED", "ClaudeTurn", "OutputBounds"]

STOPPED: Final = TurnEnded("stopped", "interrupted", "The turn was stopped.")


@dataclass(frozen=True, slots=True)
class OutputBounds:
    """How long the CLI may take, in seconds, and how often it retries a model request."""

    connect: float = 60.0
    retries: int = 2
    stream_idle: float = 60.0
    """Silence of a model's stream after which the CLI gives the request up. The CLI accepts no less than 10."""
    model_silence: float = 180.0
    """Silence of the CLI while the model owes an answer: the CLI's own limits have failed then."""
    probe_after: float = 20.0
    """Silence of the CLI after which it is probed …"""
    probe_answer: float = 20.0
    """… and how long its response to the probe may take."""
    interrupt: float = 5.0
    stop: float = 10.0
    """From the interrupt to the end of the turn; then the CLI is killed."""
    close: float = 10.0

    @classmethod
    def of(cls, session: m.PrepareSession) -> OutputBounds:
        """Return the session's bounds: its CLI is probed as soon as its stream has been silent for too long."""
        idle = session.stream_idle
        probe = min(20.0, idle)
        return cls(
            retries=session.retries,
            stream_idle=idle,
            model_silence=2 * idle,
            probe_after=probe,
            probe_answer=probe,
        )


@dataclass(slots=True, eq=False)
class ClaudeTurn:
    """The running turn."""

    stop_requested: anyio.Event = field(default_factory=anyio.Event)
    undecided: int = 0
    """Calls that wait for a decision."""
    call_cwds: dict[str, str] = field(default_factory=dict)
    """The directory that each call would run in: a sub-agent may have a working tree of its own."""
    decided: dict[str, str] = field(default_factory=dict)
    """The digest of the input that may run, by call."""
    cause: TurnEnded | None = None
    """Why Hutch ended the turn; it overrides the CLI's own report."""

    @property
    def stopping(self) -> bool:
        """Whether the turn was told to stop: nothing of it starts any more."""
        return self.stop_requested.is_set()

    def give_up(self, reason: str, message: str) -> None:
        """End the turn as failed; the first cause stands."""
        self.cause = self.cause or TurnEnded("failed", reason, message)
        self.stop_requested.set()
