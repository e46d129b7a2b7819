"""Words and commands, the result of both readings of a line.

A `Word` is *sure* if its text is exactly what the program gets. A word that the shell still changes (a variable, a
substitution, a file name pattern, braces) is not sure; its text is what was written.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Joint = Literal["", "&&", "||", ";", "|", "&", "(", ")"]
"""What follows a command; a parenthesis is a command without words."""


class Word(NamedTuple):
    text: str
    sure: bool = True


class SimpleCommand(NamedTuple):
    """One simple command: its words, the files it is redirected from and to, its variables, and what follows it."""

    words: tuple[Word, ...]
    reads: tuple[Word, ...] = ()
    writes: tuple[Word, ...] = ()
    assigns: tuple[str, ...] = ()
    then: Joint = ""
