"""State machines as data: a table of legal moves, and the one function that makes them.

A table decides nothing by itself: who moves what, and when, stands where the move is made. An illegal move is a bug of
ours and raises with the story of the thing that moved.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

__all__ = ["IllegalMoveError", "TransitionTable", "mermaid"]

S = TypeVar("S", bound=str)


class IllegalMoveError(AssertionError):
    """Something was moved to a state that the table does not lead to."""


@dataclass(frozen=True, slots=True)
class TransitionTable(Generic[S]):
    """The legal moves of one kind of thing; a state without moves is terminal."""

    name: str
    start: S
    moves: Mapping[S, frozenset[S]]

    @property
    def terminal(self) -> frozenset[S]:
        """States that never change."""
        return frozenset(state for state, after in self.moves.items() if not after)

    @property
    def live(self) -> frozenset[S]:
        """States that may still change."""
        return frozenset(self.moves) - self.terminal

    def before(self, state: S) -> frozenset[S]:
        """Return the states from which `state` is reached: the `from` of a compare-and-set."""
        return frozenset(one for one, after in self.moves.items() if state in after)

    def allows(self, old: S, new: S) -> bool:
        """Tell whether the table leads from `old` to `new`."""
        return new in self.moves[old]

    def move(self, old: S, new: S, story: object) -> S:
        """Return `new`, or raise `IllegalMoveError` that tells `story`, what moved and where it could have gone."""
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
