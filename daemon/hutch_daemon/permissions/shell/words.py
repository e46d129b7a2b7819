"""Words and commands, the results of both parsers.

A `Word` is *sure* if the program gets exactly its text. A word that the shell still changes (a variable, a
substitution, a file name pattern, braces) is not sure; its text is the text of the line.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Joint = Literal["", "&&", "||", ";", "|", "&", "(", ")"]
"""The operator after a command. A parenthesis is a command without words."""


class Word(NamedTuple):
    text: str
    sure: bool = True


class SimpleCommand(NamedTuple):
    """One simple command: its words, redirections (`reads`, `writes`) and assignments, and the operator after it."""

    words: tuple[Word, ...]
    reads: tuple[Word, ...] = ()
    writes: tuple[Word, ...] = ()
    assigns: tuple[str, ...] = ()
    then: Joint = ""
