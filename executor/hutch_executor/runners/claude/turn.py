"""The state of a running turn, and the time limits of the CLI."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import anyio

from hutch_shared import messages as m
from hutch_shared.events import TurnEnded

__all__ = ["ALREADY_ACCEPTED", "CLEARED", "NOTHING_TO_COMPACT", "STOPPED", "ClaudeTimeouts", "ClaudeTurn"]

STOPPED: Final = TurnEnded("stopped", "interrupted", "The turn was stopped.")
ALREADY_ACCEPTED: Final = TurnEnded(
    "failed",
    "outcome_unknown",
    "The outcome of the turn is not known: its executor went away, and the agent may have got the prompt. It was not"
    " run again.",
)
CLEARED: Final = TurnEnded("completed", "completed", "The next prompt begins a new conversation.")
NOTHING_TO_COMPACT: Final = TurnEnded(
    "completed", "completed", "The conversation is empty: there was nothing to compact."
)


@dataclass(frozen=True, slots=True)
class ClaudeTimeouts:
    """The time limits of the CLI, in seconds, and the number of its retries."""

    connect: float = 60.0
    """From the start of the CLI until it is ready."""
    retries: int = 2
    """Times that the CLI repeats a failed model request."""
    stream_idle: float = 60.0
    """Silence of a model's stream after which the CLI gives the request up; the CLI accepts no less than 10."""
    model_silence: float = 180.0
    """Silence of the CLI during a model request after which the CLI counts as stuck: its own limits have failed."""
    turn_silence: float = 300.0
    """Silence of the CLI while nothing is in flight after which the turn counts as stuck; see `_watch_silence`."""
    probe_after: float = 20.0
    """Silence of the CLI after which the runner sends it a probe."""
    probe_answer: float = 20.0
    """From the probe to the response of the CLI."""
    interrupt: float = 5.0
    """From an interrupt to its acknowledgement by the CLI."""
    stop: float = 10.0
    """From the interrupt to the end of the turn; then the CLI is killed."""
    close: float = 10.0
    """From the closing of the CLI's input to its end."""
    store: float = 5.0
    """From the end of a turn, as the CLI reports it, until the CLI has stored the turn: normally tenths of a second."""

    @classmethod
    def of(cls, session: m.PrepareSession) -> ClaudeTimeouts:
        """Return the limits of a session: the runner probes the CLI when its stream has been silent for too long."""
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

    uuid: str
    """The uuid of the turn's prompt."""
    expects_model: bool = True
    """Whether the turn completes only if it asked the model."""
    stop_requested: anyio.Event = field(default_factory=anyio.Event)
    undecided: int = 0
    """The number of calls that wait for a decision."""
    call_cwds: dict[str, str] = field(default_factory=dict)
    """The directory that each call would run in: a sub-agent may have a working tree of its own."""
    decided: dict[str, str] = field(default_factory=dict)
    """The digest of the input that may run, by call."""
    is_counted: bool = False
    """Whether the CLI reported, in a way that can be read, what the turn used."""
    cause: TurnEnded | None = None
    """The end that Hutch gave the turn; it overrides the CLI's own report. None if the CLI decides."""

    @property
    def stopping(self) -> bool:
        """Whether the turn is stopping: it starts nothing more."""
        return self.stop_requested.is_set()

    def give_up(self, reason: str, message: str) -> None:
        """End the turn as failed; the first cause stands."""
        self.cause = self.cause or TurnEnded("failed", reason, message)
        self.stop_requested.set()
