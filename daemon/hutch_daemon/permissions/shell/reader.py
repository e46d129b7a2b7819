"""The strict reading: understands a subset of bash exactly and refuses everything else.

The subset: simple commands joined by `;`, newline, `&&`, `||`, `|`, `|&` and `&`, and parentheses around them; words of
plain characters, single quotes, double quotes without expansions, backslashes; file name patterns and `$?`, whose words
are not sure; redirections to and from named files and descriptors; comments; leading assignments of plain values. Every
rule here is narrower than bash's. A change that widens one must pass `tests/daemon/permissions/differential.py`.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass, field

from hutch_daemon.permissions.shell.words import Joint, SimpleCommand, Word

_BLANK = " \t"
_OPERATORS = "|&;<>()\n"
_GLOB = "*?["
_RESERVED_TEXT = "if then elif else fi do done case esac while until for function select coproc in time { } ! [[ ]]"
RESERVED = frozenset(_RESERVED_TEXT.split())
_JOINTS: dict[str, Joint] = {"&&": "&&", "||": "||", "|&": "|", "|": "|", ";": ";", "&": "&", "\n": ";"}
_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\[.*\])?\+?=", re.DOTALL)
_DESCRIPTOR = re.compile(r"[0-9-](?=[\s|&;)]|$)")
_OWN_HOME = re.compile(r"~(?=[/\s|&;<>)]|$)")
_GOES_ON = re.compile(r"(,|\.\.).*\}", re.DOTALL)
"""Matches the text after a closing brace if bash would continue the expansion: `{a}b,c}` expands to `a}b` and `c`."""
_PLAIN_RUN = re.compile(r"[A-Za-z0-9_./:,@%+-]+")


class NotUnderstoodError(Exception):
    """The line is outside the subset; the text explains the reason to the user."""


@dataclass(slots=True)
class _Parts:
    """The parts of the simple command that is being read."""

    words: list[Word] = field(default_factory=list)
    reads: list[Word] = field(default_factory=list)
    writes: list[Word] = field(default_factory=list)
    assigns: list[str] = field(default_factory=list)
    touched: bool = False

    def finish(self, then: Joint) -> SimpleCommand:
        return SimpleCommand(tuple(self.words), tuple(self.reads), tuple(self.writes), tuple(self.assigns), then)


class _Reader:
    def __init__(self, line: str) -> None:
        self.line = line
        self.at = 0
        self.out: list[SimpleCommand] = []
        self.parts = _Parts()
        self.depth = 0
        self.after: Joint = ";"
        """The joint before the current position: it decides whether a command may or must come next."""

    def read(self) -> tuple[SimpleCommand, ...]:
        line, end = self.line, len(self.line)
        while self.at < end:
            char = line[self.at]
            if char in _BLANK:
                self.at += 1
            elif char == "\\" and line.startswith("\\\n", self.at):
                self.at += 2
            elif char == "#":
                stop = line.find("\n", self.at)
                self.at = end if stop < 0 else stop
            elif char in "<>" or line.startswith("&>", self.at):
                self._redirection(descriptor="")
            elif char in _OPERATORS:
                self._operator(char)
            else:
                self._word()
        self._end(";", may_be_empty=self.after in {";", "&", ")"})
        if self.depth:
            raise NotUnderstoodError("a parenthesis is not closed")
        return tuple(self.out)

    # ------------------------------------------------------------ between commands

    def _operator(self, char: str) -> None:
        line = self.line
        if char == "(":
            if self.parts.touched or line.startswith("((", self.at) or self.after == ")":
                raise NotUnderstoodError("a parenthesis where the line needs more than a list of commands")
            self.at += 1
            self.depth += 1
            self.out.append(SimpleCommand((), then="("))
            self.after = "("
            return
        if char == ")":
            if not self.depth or (self.after in {"(", "&&", "||", "|"} and not self.parts.touched):
                raise NotUnderstoodError("a parenthesis that closes nothing")
            self._end(";", may_be_empty=True)
            self.at += 1
            self.depth -= 1
            self.out.append(SimpleCommand((), then=")"))
            self.after = ")"
            return
        text = next(text for text in _JOINTS if line.startswith(text, self.at))
        if text == ";" and line.startswith(";;", self.at):
            raise NotUnderstoodError("`;;` outside a case")
        self.at += len(text)
        if text == "\n":
            # A newline ends a command; after an operator or another newline it has no meaning.
            self._end(";", may_be_empty=True)
            return
        self._end(_JOINTS[text], may_be_empty=False)

    def _end(self, then: Joint, *, may_be_empty: bool) -> None:
        if self.parts.touched:
            if not self.parts.words:
                raise NotUnderstoodError("an assignment or a redirection without a command")
            self.out.append(self.parts.finish(then))
            self.parts = _Parts()
            self.after = then
        elif self.after == ")" and then != "":
            self.out.append(SimpleCommand((), then=then))
            self.after = then
        elif not may_be_empty:
            raise NotUnderstoodError("an operator without a command")

    # ------------------------------------------------------------ inside a command

    def _redirection(self, descriptor: str) -> None:
        line = self.line
        if self.after == ")":
            raise NotUnderstoodError("a redirection of a group")
        self.parts.touched = True
        for operator in ("&>>", "&>", "<<", "<>", "<&", "<(", ">(", ">>", ">|", ">&", ">", "<"):
            if line.startswith(operator, self.at):
                break
        if operator in {"<<", "<>", "<&", "<(", ">("} or (descriptor and operator[0] == "&"):
            raise NotUnderstoodError(f"`{operator}` is not read")
        self.at += len(operator)
        if operator == ">&":
            match = _DESCRIPTOR.match(line, self.at)
            if match is None:
                raise NotUnderstoodError("`>&` to something other than a descriptor")
            self.at = match.end()
            return
        while self.at < len(line) and line[self.at] in _BLANK:
            self.at += 1
        target, _ = self._take()
        if not target.text or not target.sure or target.text[0] == "!":
            # zsh reads `>!f` as `>|f`.
            raise NotUnderstoodError("a redirection to a name that is not plain")
        (self.parts.reads if operator == "<" else self.parts.writes).append(target)

    def _word(self) -> None:
        if self.after == ")":
            raise NotUnderstoodError("a word after a group")
        start = self.at
        word, quoted = self._take()
        raw = self.line[start : self.at]
        if self.at < len(self.line) and self.line[self.at] in "<>":
            if raw.isascii() and raw.isdigit():
                self._redirection(raw)
                return
            if raw.endswith("}"):
                raise NotUnderstoodError("a descriptor kept in a variable")
        parts = self.parts
        parts.touched = True
        if parts.words:
            if "~" in raw and _ASSIGNMENT.match(raw):
                raise NotUnderstoodError("a tilde in an assignment")
            parts.words.append(word)
            return
        if "=" in raw and _ASSIGNMENT.match(raw):
            if quoted or not word.sure or "~" in raw:
                raise NotUnderstoodError("an assignment of a value that is not plain")
            parts.assigns.append(word.text)
            return
        if word.text in RESERVED and word.text != "time":
            raise NotUnderstoodError(f"`{word.text}` begins more than a simple command")
        if not word.sure or not word.text.isascii() or not word.text or word.text[0] == "~":
            raise NotUnderstoodError("the name of the program is not plain")
        if word.text == "time" and (quoted or parts.assigns or parts.reads or parts.writes):
            raise NotUnderstoodError("`time` in a place where it is not a keyword")
        parts.words.append(word)

    def _take(self) -> tuple[Word, bool]:
        """Read one word; return it and whether a part of it was quoted."""
        line, end, start = self.line, len(self.line), self.at
        out: list[str] = []
        sure = True
        quoted = False
        braces = 0
        while self.at < end:
            run = _PLAIN_RUN.match(line, self.at)
            if run is not None:
                out.append(run.group())
                self.at = run.end()
                continue
            char = line[self.at]
            if char in _BLANK or char in _OPERATORS:
                if char == "(":
                    raise NotUnderstoodError("a parenthesis inside a word")
                break
            if char == "'":
                stop = line.find("'", self.at + 1)
                if stop < 0:
                    raise NotUnderstoodError("a quote is not closed")
                out.append(line[self.at + 1 : stop])
                quoted = True
                self.at = stop + 1
            elif char == '"':
                text, known = self._double_quoted()
                out.append(text)
                sure = sure and known
                quoted = True
            elif char == "\\":
                if self.at + 1 >= end:
                    raise NotUnderstoodError("a backslash at the end")
                if line[self.at + 1] == "\n":
                    raise NotUnderstoodError("a line continued inside a word")
                out.append(line[self.at + 1])
                quoted = True
                self.at += 2
            elif line.startswith("$?", self.at):
                out.append("$?")
                sure = False
                self.at += 2
            elif char == "$" or char == "`":
                raise NotUnderstoodError("an expansion whose value is not known")
            elif char == "{":
                stop = line.find("}", self.at)
                inner = line[self.at + 1 : stop]
                if stop < 0 or not re.fullmatch(r"[A-Za-z0-9_^/-]*", inner):
                    raise NotUnderstoodError("a brace expansion")
                out.append(line[self.at : stop + 1])
                self.at = stop + 1
                braces = braces or self.at
            elif char == "~" and (self.at == start or line[self.at - 1] in "=:"):
                if self.at != start or not _OWN_HOME.match(line, self.at):
                    raise NotUnderstoodError("a tilde whose meaning depends on the account")
                out.append(char)
                self.at += 1
            elif char == "=" and self.at == start:
                raise NotUnderstoodError("a word that starts with `=`, which some shells expand")
            else:
                if not char.isascii() and unicodedata.category(char)[0] in "ZC":
                    raise NotUnderstoodError("an invisible character outside quotes")
                sure = sure and char not in _GLOB
                out.append(char)
                self.at += 1
        text = "".join(out)
        if braces and _GOES_ON.search(line, braces, self.at):
            raise NotUnderstoodError("a brace expansion")
        if quoted and text[:1] == "~":
            raise NotUnderstoodError("a quoted tilde")
        return Word(text, sure), quoted

    def _double_quoted(self) -> tuple[str, bool]:
        """Read up to the closing quote; return the text, and whether the program gets exactly this text."""
        line = self.line
        out: list[str] = []
        sure = True
        at = self.at + 1
        while True:
            if at >= len(line):
                raise NotUnderstoodError("a quote is not closed")
            char = line[at]
            if char == '"':
                self.at = at + 1
                return "".join(out), sure
            if line.startswith("$?", at):
                out.append("$?")
                sure = False
                at += 2
                continue
            if char == "`" or (char == "$" and line[at + 1 : at + 2] != '"'):
                raise NotUnderstoodError("an expansion whose value is not known")
            if char == "\\":
                following = line[at + 1 : at + 2]
                if following == "\n":
                    raise NotUnderstoodError("a line continued inside quotes")
                if following and following in '$`"\\':
                    char = following
                    at += 1
            out.append(char)
            at += 1


def understand(line: str) -> tuple[SimpleCommand, ...]:
    """Return the simple commands of a line, in the order of the text. A parenthesis appears as a command without words.

    Raises `NotUnderstoodError` for a line outside the subset.
    """
    return _Reader(line).read()
