"""The language of scripts: JSON lines, each with one thing for the script runner to do. Pure.

A line is an object with exactly one of the keys of `Line` that say what to do. A line `{"turn": true}` separates turns.
Blank lines are ignored.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

import msgspec
from msgspec import UNSET, Raw, UnsetType

from hutch_shared.errors import HutchError, Reason
from hutch_shared.events import Notice, UsageSeen

__all__ = ["Line", "Step", "read_script", "read_step"]


class Repeat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Play `line` `times` times."""

    times: int
    line: Raw


class End(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """End the turn at once."""

    state: Literal["completed", "failed"] = "completed"
    reason: str = "completed"
    message: str = "The script ended the turn."


class Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One line. Exactly one of the fields from `text` to `turn` is set; the fields after `turn` belong to `tool`."""

    text: str | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    thinking_delta: str | UnsetType = UNSET
    stderr: str | UnsetType = UNSET
    notice: Notice | UnsetType = UNSET
    usage: UsageSeen | UnsetType = UNSET
    tool: str | UnsetType = UNSET
    """Requests permission to call this tool with `input`.

    If the call is allowed, it runs its command in a shell with `run`; without `run` it returns `result`."""
    ask: list[dict[str, Any]] | UnsetType = UNSET
    """Questions, in the form of `AskUserQuestion`."""
    plan: str | UnsetType = UNSET
    pause: float | UnsetType = UNSET
    """Waits this many seconds."""
    wait_file: str | UnsetType = UNSET
    """Waits until this file exists."""
    repeat: Repeat | UnsetType = UNSET
    end: End | UnsetType = UNSET
    exit: int | UnsetType = UNSET
    """Ends the executor's process at once, with this code."""
    turn: Literal[True] | UnsetType = UNSET
    input: dict[str, Any] = {}
    run: bool = False
    result: str = ""
    is_error: bool = False

    def __post_init__(self) -> None:
        """Reject a line with nothing to do, or with two things."""
        actions = [name for name in _ACTIONS if getattr(self, name) is not UNSET]
        if len(actions) != 1:
            raise ValueError(f"a line has one thing to do, this one has {', '.join(actions) or 'none'}")


_ACTIONS: Final = tuple(name for name in Line.__struct_fields__ if name not in {"input", "run", "result", "is_error"})


@dataclass(frozen=True, slots=True)
class Step:
    """A line, and the bytes it was written in."""

    line: Line
    native: bytes


def read_script(text: str) -> list[list[Step]]:
    """Return the steps of each turn; HutchError names the first line that cannot be read."""
    turns: list[list[Step]] = [[]]
    for number, written in enumerate(text.split("\n"), 1):
        if not written.strip():
            continue
        step = read_step(written.encode(), f"Line {number} of the script")
        if step.line.turn is UNSET:
            turns[-1].append(step)
        else:
            turns.append([])
    return turns


def read_step(written: bytes, where: str) -> Step:
    """Read one line; `where` names it in the HutchError."""
    try:
        return Step(msgspec.json.decode(written, type=Line), written)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise HutchError(Reason.AGENT_UNAVAILABLE, f"{where} cannot be read: {error}") from error
