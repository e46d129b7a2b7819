"""What both readings of a line are made of.

A `Word` is *sure* when its text is exactly what the program will get. One that the shell would still change (a
variable, a substitution, a file name pattern, braces) is not: its text is then what was written.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Joint = Literal["", "&&", "||", ";", "|", "&", "(", ")"]
"""What follows a command; the parentheses stand for themselves."""


class Word(NamedTuple):
    text: str
    sure: bool = True


class SimpleCommand(NamedTuple):
    """One simple command: its words, the files it is connected to, the variables set for it, and what follows it."""

    words: tuple[Word, ...]
    reads: tuple[Word, ...] = ()
    writes: tuple[Word, ...] = ()
    assigns: tuple[str, ...] = ()
    then: Joint = ""
