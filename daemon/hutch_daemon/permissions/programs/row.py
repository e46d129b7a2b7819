"""The type of a table row, and the search for options in a command.

An *open* rule (`Bash(sort:*)`) lets the agent choose the rest of the command. A row lists the options and words that
the agent may not choose. A rule that spells a whole command is not checked against the table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

__all__ = ["Check", "Program", "ProgramKind", "base_name", "names", "option_of", "rows", "subcommand"]

Argv = tuple[str, ...]
Check = Callable[[Argv, int], str | None]
"""Takes a command and the number of words that the rule spells; returns the reason why the rule fails, or None."""


class ProgramKind(Enum):
    """What a program can do with the words of its command line."""

    PLAIN = "does what its name says"
    READS = "only reads, whatever its options"
    WRITES = "writes the files it is given"
    PINNED = "runs what its operand names: the rule must name it too"
    EXACT = "runs whatever it is given: the rule must spell the whole command"


@dataclass(frozen=True, slots=True)
class Program:
    """One row of the table. An open rule never allows the options and words in `short`, `long` and `words`."""

    kind: ProgramKind = ProgramKind.PLAIN
    short: str = ""
    """Forbidden one-letter options, without dashes."""
    long: frozenset[str] = frozenset()
    """Forbidden long options, without dashes."""
    words: frozenset[str] = frozenset()
    """Forbidden whole words."""
    flags: frozenset[str] = frozenset()
    """Only for PINNED: options without a value that may come before the operand."""
    has_subcommands: bool = False
    """True if the first operand is a sub-command."""
    runs_next: frozenset[str] = frozenset()
    """Sub-commands (or Python modules) that run the program named by the next word, so a rule must spell that word."""
    exact: frozenset[str] = frozenset()
    """Sub-commands that are allowed only by a rule for the whole command."""
    hands_on: bool = False
    """True if the program passes the words after `--` to another program, so they are not its own options."""
    check: Check | None = field(default=None, repr=False)
    """A check that the other fields cannot express."""


def names(text: str) -> frozenset[str]:
    """Return the words of a text."""
    return frozenset(text.split())


def rows(*groups: tuple[str, Program]) -> dict[str, Program]:
    """Return rows by program name. Each group gives one row to several names. ValueError if a name has two rows."""
    table: dict[str, Program] = {}
    for group, program in groups:
        for name in group.split():
            if name in table:
                raise ValueError(f"{name} has two rows")
            table[name] = program
    return table


def base_name(program: str) -> str:
    """Return the name of a program without its directory."""
    return program.rsplit("/", 1)[-1]


def subcommand(argv: Argv) -> str:
    """Return the first word that is not an option; "" if there is none."""
    return next((word for word in argv[1:] if not word.startswith("-")), "")


def option_of(argv: Argv, short: str, long: frozenset[str], words: frozenset[str]) -> str | None:
    """Return a reason if the command has one of these options, or None.

    Finds abbreviated long options, and short options in a bundle. Some programs take long options after one dash too;
    three letters are needed to distinguish those from a bundle.
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
