"""The result of matching a call with the rules, and the directories of the call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from hutch_daemon.permissions.paths import PathTarget, path_target
from hutch_daemon.permissions.rules import Origin
from hutch_shared.messages import Suggestion


class RuleHit(NamedTuple):
    """A rule that matched, and the part of the call that it matched, as text for users."""

    origin: Origin
    what: str


@dataclass(frozen=True, slots=True)
class Assessment:
    """The rules that match a call, and the doubts about it. The mode then decides the call."""

    denied: RuleHit | None = None
    """The rule that denies the call, or None."""
    asked: RuleHit | None = None
    """The rule that asks about the call, or None."""
    allowed: tuple[RuleHit, ...] | None = None
    """The rules that allow the call; empty if it needs no rule, None if it is not allowed."""
    refused: str = ""
    """The reason why the call is not allowed, if `allowed` is None."""
    doubt: str | None = None
    """The reason why an unmatched rule might still deny the call or ask about it; None if none can."""
    destroys: str | None = None
    """The reason why the user must decide in every mode: the call would remove the root or the home. Otherwise None."""
    own: bool = False
    """True if the call only uses the agent's own files, which needs no rule in any mode."""
    programs: tuple[tuple[str, ...], ...] = ()
    """The commands found in a command line, each as its words."""
    suggestions: tuple[Suggestion, ...] = ()
    """Narrow rules that would allow the call."""


@dataclass(frozen=True, slots=True)
class CallContext:
    """The directories of a call, all absolute and resolved. `real` maps paths to resolved paths."""

    cwd: str
    home: str
    workspace: str
    real: Mapping[str, str]
    agent_dir: str | None = None
    """The directory of the agent's own files; None if the session has none."""

    def target(self, word: str, cwd: str | None = None) -> PathTarget:
        return path_target(word, cwd or self.cwd, self.home, self.real)
