"""State machines as data: a table of legal moves, and the function that makes a move.

The table only says which moves are legal; the calling code decides when to make one. An illegal move is a bug in
hutchd, so it raises an error that describes the object.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

__all__ = ["IllegalMoveError", "TransitionTable", "mermaid"]

S = TypeVar("S", bound=str)


class IllegalMoveError(AssertionError):
    """A move that the table does not allow."""


@dataclass(frozen=True, slots=True)
class TransitionTable(Generic[S]):
    """The legal moves of one kind of object. A state without moves is terminal."""

    name: str
    start: S
    moves: Mapping[S, frozenset[S]]
    terminal: frozenset[S] = field(init=False)
    """States that never change."""
    live: frozenset[S] = field(init=False)
    """States that may still change."""
    before: Mapping[S, frozenset[S]] = field(init=False)
    """For each state, those from which it is reached: the `from` of a compare-and-set."""

    def __post_init__(self) -> None:
        """Derive the sets."""
        terminal = frozenset(state for state, after in self.moves.items() if not after)
        before = {state: frozenset(one for one, after in self.moves.items() if state in after) for state in self.moves}
        object.__setattr__(self, "terminal", terminal)
        object.__setattr__(self, "live", frozenset(self.moves) - terminal)
        object.__setattr__(self, "before", before)

    def allows(self, old: S, new: S) -> bool:
        """Return whether the move from `old` to `new` is legal."""
        return new in self.moves[old]

    def move(self, old: S, new: S, story: object) -> S:
        """Return `new`, or raise `IllegalMoveError` with `story`, a description of the object, and the legal moves."""
        if not self.allows(old, new):
            after = ", ".join(sorted(self.moves[old])) or "nothing: it is terminal"
            raise IllegalMoveError(f"{self.name} {story}: {old} does not lead to {new}, only to {after}")
        return new


def mermaid(table: TransitionTable[S]) -> str:
    """Return the table as a Mermaid state diagram, for the documentation."""
    lines = ["stateDiagram-v2", f"    [*] --> {table.start}"]
    for state, after in table.moves.items():
        lines += [f"    {state} --> {other}" for other in sorted(after)] or [f"    {state} --> [*]"]
    return "\n".join(lines)
