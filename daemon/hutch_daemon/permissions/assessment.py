"""What the rules say of a call, and where it happens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from hutch_daemon.permissions.paths import PathTarget, path_target
from hutch_daemon.permissions.rules import Origin
from hutch_shared.messages import Suggestion


class RuleHit(NamedTuple):
    """A rule that matched, and what it matched, for people."""

    origin: Origin
    what: str


@dataclass(frozen=True, slots=True)
class Assessment:
    """All that the rules say of a call. What to do with it is the mode's business."""

    denied: RuleHit | None = None
    asked: RuleHit | None = None
    allowed: tuple[RuleHit, ...] | None = None
    """None: not allowed by rules, `refused` tells why. Empty: allowed by what is built in."""
    refused: str = ""
    doubt: str | None = None
    """Why it cannot be shown that no rule denies it or asks; None if that was shown."""
    destroys: str | None = None
    """Why a person decides even where nothing else asks: it would remove the root or the home."""
    programs: tuple[tuple[str, ...], ...] = ()
    suggestions: tuple[Suggestion, ...] = ()


@dataclass(frozen=True, slots=True)
class CallContext:
    """Where a call happens. All directories are absolute and resolved; `real` maps paths to what they resolve to."""

    cwd: str
    home: str
    workspace: str
    real: Mapping[str, str]

    def path_target(self, word: str, cwd: str | None = None) -> PathTarget:
        return path_target(word, cwd or self.cwd, self.home, self.real)
