"""What a row of the table says, and how options are found in a command.

An *open* rule (`Bash(sort:*)`) lets the agent choose the rest of the command. A row lists what it may not choose.
A rule that spells a whole command is not checked against the table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

__all__ = ["Check", "Program", "ProgramKind", "base_name", "names", "option_of", "rows", "subcommand"]

Argv = tuple[str, ...]
Check = Callable[[Argv, int], str | None]
"""Takes a command and how many of its words the rule spells; returns why the rule does not open it, or None."""


class ProgramKind(Enum):
    """How far an open rule reaches."""

    PLAIN = "does what its name says"
    READS = "only reads, whatever its options"
    WRITES = "writes the files it is given"
    PINNED = "runs what its operand names: the rule must name it too"
    EXACT = "runs whatever it is given: the rule must spell the whole command"


@dataclass(frozen=True, slots=True)
class Program:
    """One row: the kind, then the options and words that an open rule never admits, then what needs code."""

    kind: ProgramKind = ProgramKind.PLAIN
    short: str = ""
    """Letters of options."""
    long: frozenset[str] = frozenset()
    """Names of options, without dashes."""
    words: frozenset[str] = frozenset()
    """Whole words."""
    flags: frozenset[str] = frozenset()
    """PINNED: options without a value that may stand before the operand."""
    has_subcommands: bool = False
    """The first operand is a sub-command."""
    runs_next: frozenset[str] = frozenset()
    """Sub-commands (or Python modules) that run what the next word names: the rule must name that too."""
    exact: frozenset[str] = frozenset()
    """Sub-commands that only a rule for the whole command opens."""
    hands_on: bool = False
    """Words after `--` are handed on, so they are not its own options."""
    check: Check | None = field(default=None, repr=False)
    """What options alone cannot say."""


def names(text: str) -> frozenset[str]:
    """The words of a text."""
    return frozenset(text.split())


def rows(*groups: tuple[str, Program]) -> dict[str, Program]:
    """Rows by program name; each group gives one row to several names. ValueError if a name has two rows."""
    table: dict[str, Program] = {}
    for group, program in groups:
        for name in group.split():
            if name in table:
                raise ValueError(f"{name} has two rows")
            table[name] = program
    return table


def base_name(program: str) -> str:
    """The name of a program without its directory."""
    return program.rsplit("/", 1)[-1]


def subcommand(argv: Argv) -> str:
    """The first word that is not an option; empty if there is none."""
    return next((word for word in argv[1:] if not word.startswith("-")), "")


def option_of(argv: Argv, short: str, long: frozenset[str], words: frozenset[str]) -> str | None:
    """Why one of these options forbids the command, or None. Long options match abbreviated, short ones in a bundle.

    Some programs take long options after one dash too; three letters are needed to tell those from a bundle.
    """
    for word in argv[1:]:
        if word in words:
            return f"{base_name(argv[0])} {word} writes files or runs programs"
        if word.startswith("--"):
            name = word[2:].split("=", 1)[0]
            if name and any(known.startswith(name) for known in long):
                return f"{base_name(argv[0])} --{name} writes files or runs programs"
        elif word.startswith("-") and (
            any(letter in short for letter in word[1:]) or _after_one_dash(word[1:].split("=", 1)[0], long)
        ):
            return f"{base_name(argv[0])} {word} may write files or run programs"
    return None


def _after_one_dash(name: str, long: frozenset[str]) -> bool:
    return name in long or (len(name) > 2 and any(known.startswith(name) for known in long))
