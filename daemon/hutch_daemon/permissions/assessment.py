"""What the rules say about a call, and where the call happens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from hutch_daemon.permissions.paths import PathTarget, path_target
from hutch_daemon.permissions.rules import Origin
from hutch_shared.messages import Suggestion


class RuleHit(NamedTuple):
    """A rule that matched, and what it matched, for users."""

    origin: Origin
    what: str


@dataclass(frozen=True, slots=True)
class Assessment:
    """Everything the rules say about a call. The mode decides what follows."""

    denied: RuleHit | None = None
    asked: RuleHit | None = None
    allowed: tuple[RuleHit, ...] | None = None
    """None: no rule allows it, and `refused` says why. Empty: it is allowed without a rule."""
    refused: str = ""
    doubt: str | None = None
    """Why a rule might deny it or ask after all; None if certainly none does."""
    destroys: str | None = None
    """Why the user must decide in every mode: it would remove the root or the home; None otherwise."""
    programs: tuple[tuple[str, ...], ...] = ()
    suggestions: tuple[Suggestion, ...] = ()


@dataclass(frozen=True, slots=True)
class CallContext:
    """Where a call happens. All directories are absolute and resolved; `real` maps paths to resolved paths."""

    cwd: str
    home: str
    workspace: str
    real: Mapping[str, str]

    def target(self, word: str, cwd: str | None = None) -> PathTarget:
        return path_target(word, cwd or self.cwd, self.home, self.real)
