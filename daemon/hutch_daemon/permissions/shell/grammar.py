"""The generous reading: finds every command that a line might run, for rules that deny or ask.

The grammar is tree-sitter-bash. It differs from bash (it reads a carriage return as a blank, and has no node for
back-ticks in a here-document), so a line is allowed only if `reader` finds the same commands. Tree walks are iterative,
because a line can nest as deep as it is long.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import tree_sitter_bash
from tree_sitter import Language, Node, Parser

from hutch_daemon.permissions.shell.words import SimpleCommand, Word

_LANGUAGE = Language(tree_sitter_bash.language())
_UNESCAPE = re.compile(r"\\(.)", re.DOTALL)
_UNESCAPE_QUOTED = re.compile(r'\\([$`"\\])')
_CHANGED_BY_SHELL = re.compile(r"(?<!\\)(?:\\\\)*[*?\[$`]")
_NOTHING_TO_READ = re.compile(r"[A-Za-z0-9_./:,@%+=-]+")
_BRACES = re.compile(r"\{[^{}]*(?:,|\.\.)|\{.*[{'\"]", re.DOTALL)
_DESCRIPTOR = re.compile(r"[0-9]+|-")
_QUOTED = re.compile(r"'[^']*'|\"[^\"$`\\]*\"")
_QUOTES = re.compile(r"['\"\\]")
_CUTS = re.compile(r"[;&|\n(){}`<>]+")
_LEAVES = frozenset({"word", "number", "raw_string", "string_content", "comment", "file_descriptor", "variable_name"})
_ENDS_WITH_COMMAND = frozenset({"list", "pipeline", "negated_command", "redirected_statement"})
LONGEST = 10_000
"""The longest line, in characters, that the grammar parses. Longer lines are only split at operators."""
MOST_LOOKED_AT = 20_000
"""The number of characters of a line that are read at all. A longer line is never allowed."""
LONGEST_BARE = 2_000
"""The most characters outside quotes. The grammar may take quadratic time for them: over 400 ms for 8,000."""
MOST_OPENERS = 250
"""The most quotes and opening brackets outside quotes. The grammar takes quadratic time for brackets left open."""
_COMMANDS = frozenset({"command", "declaration_command", "unset_command"})
_WORDS_TEXT = (
    "word number raw_string string concatenation ansi_c_string translated_string simple_expansion expansion "
    "command_substitution process_substitution arithmetic_expansion variable_assignment variable_name brace_expression "
    "test_operator extglob_pattern regex"
)
_WORDS = frozenset(_WORDS_TEXT.split())


@dataclass(frozen=True, slots=True)
class ParsedLine:
    """All commands of a line at any depth; `complete` is False if some may be missing."""

    commands: tuple[SimpleCommand, ...]
    complete: bool


def find(line: str) -> ParsedLine:
    """Return every command in the line and in its substitutions. Takes any text; never raises."""
    return _find(line[:MOST_LOOKED_AT])


@lru_cache(maxsize=256)
def _find(line: str) -> ParsedLine:
    joined = line.replace("\\\n", "")
    bare = _QUOTED.sub("", joined) if len(joined) > LONGEST_BARE else joined
    openers = sum(map(bare.count, "([{<")) + sum(map(joined.count, "\"'"))
    if len(joined) > LONGEST or len(bare) > LONGEST_BARE or openers > MOST_OPENERS:
        return ParsedLine(_roughly(joined), complete=False)
    commands, complete, rest = _parsed(joined)
    for text in rest:
        commands += _parsed(text)[0]
    if not complete:
        commands += _roughly(joined)
    return ParsedLine(tuple(commands), complete)


def _roughly(line: str) -> tuple[SimpleCommand, ...]:
    """Return possible commands without using the grammar: the texts between operators, with quotes removed."""
    bare = _QUOTES.sub("", line)
    pieces = dict.fromkeys(piece.strip() for piece in _CUTS.split(bare))
    return tuple(SimpleCommand(tuple(Word(word) for word in piece.split())) for piece in pieces if piece)


def _parsed(line: str) -> tuple[list[SimpleCommand], bool, list[str]]:
    """Return the commands, whether the grammar read the whole line, and the texts that the shell reads as lines."""
    source = line.encode("utf-8", "replace")
    root = Parser(_LANGUAGE).parse(source).root_node
    complete = not root.has_error
    commands: list[SimpleCommand] = []
    rest: list[str] = []
    for path in _walk(root):
        node = path.node
        kind = node.type
        if kind in _COMMANDS or (kind == "ERROR" and node.named_child_count):
            commands.append(_command(path, source))
        elif kind == "file_redirect" and not _belongs_to_command(path):
            # `>f` alone or after a group: it names a file, but no program.
            reads: list[Word] = []
            writes: list[Word] = []
            extra: list[Word] = []
            _redirect(node, source, extra, reads, writes)
            commands.append(SimpleCommand(tuple(extra), tuple(reads), tuple(writes)))
        elif kind == "heredoc_body" and "`" in (body := _text(node, source)):
            complete = False
            rest += body.split("`")
    return commands, complete, rest


class _NodePath(NamedTuple):
    """A node and its ancestors. (In tree-sitter, looking up a parent walks from the root.)"""

    node: Node
    up: _NodePath | None


def _walk(root: Node) -> Iterator[_NodePath]:
    """Iterate over the nodes that may contain commands, in the order of the text, without recursion."""
    stack = [_NodePath(root, None)]
    while stack:
        path = stack.pop()
        yield path
        stack.extend(
            _NodePath(child, path) for child in reversed(path.node.named_children) if child.type not in _LEAVES
        )


def _belongs_to_command(redirect: _NodePath) -> bool:
    """Return whether `_command` collects this redirection together with its command."""
    if redirect.up is None or redirect.up.node.type == "command":
        return redirect.up is not None
    body = redirect.up.node.child_by_field_name("body")
    while body is not None and body.type in _ENDS_WITH_COMMAND:
        body = body.named_children[-1] if body.named_child_count else None
    return body is not None and body.type in _COMMANDS


def _redirects_around(path: _NodePath) -> Iterator[Node]:
    """Iterate over redirections of enclosing nodes that belong to this command.

    The grammar reads `a && b >f` as (`a && b`) `>f`, but bash redirects only `b`.
    """
    here = path
    while (up := here.up) is not None:
        if up.node.type == "redirected_statement" and up.node.child_by_field_name("body") == here.node:
            yield from (part for part in up.node.named_children if part.type.endswith("redirect"))
        elif up.node.type not in _ENDS_WITH_COMMAND or up.node.named_children[-1] != here.node:
            return
        here = up


def _command(path: _NodePath, source: bytes) -> SimpleCommand:
    node = path.node
    words: list[Word] = []
    reads: list[Word] = []
    writes: list[Word] = []
    assigns: list[str] = []
    parts = list(node.children if node.type != "ERROR" else node.named_children)
    if node.type in _COMMANDS:
        parts += _redirects_around(path)
    for part in parts:
        kind = part.type
        if kind == "command_name":
            words.append(word_of(part.children[0], source) if part.child_count else Word(_text(part, source), False))
        elif kind == "variable_assignment" and node.type == "command" and not words:
            assigns.append(_text(part, source))
        elif kind in _WORDS or (node.type != "ERROR" and not part.is_named):
            words.append(word_of(part, source))
        elif kind == "file_redirect":
            _redirect(part, source, words, reads, writes)
        elif kind == "heredoc_redirect":
            # Words after `<<EOF` on the same line belong to the command.
            words += [word_of(child, source) for child in part.named_children if child.type in _WORDS]
            for child in part.named_children:
                if child.type == "file_redirect":
                    _redirect(child, source, words, reads, writes)
    return SimpleCommand(tuple(words), tuple(reads), tuple(writes), tuple(assigns))


def _redirect(node: Node, source: bytes, words: list[Word], reads: list[Word], writes: list[Word]) -> None:
    """Collect a redirection. The grammar puts later words of the command below it; only the first word is the file."""
    targets = node.children_by_field_name("destination")
    operator = next((child.type for child in node.children if not child.is_named), "")
    if not targets:
        return
    target = word_of(targets[0], source)
    if not (operator in {">&", "<&"} and _DESCRIPTOR.fullmatch(target.text)):
        (reads if operator.startswith("<") else writes).append(target)
        if operator == "<>":
            writes.append(target)
    words += [word_of(child, source) for child in targets[1:]]


def _text(node: Node, source: bytes) -> str:
    return source[node.start_byte : node.end_byte].decode("utf-8", "replace")


def word_of(node: Node, source: bytes) -> Word:
    """Return the word of a node; sure if its text alone determines what the program gets."""
    kind = node.type
    text = _text(node, source)
    if _NOTHING_TO_READ.fullmatch(text) and kind in {"word", "number"}:
        return Word(text)
    if kind == "raw_string":
        return Word(text[1:-1])
    if kind == "string":
        plain = all(child.type == "string_content" for child in node.named_children)
        return Word(_UNESCAPE_QUOTED.sub(r"\1", text[1:-1]), plain)
    if kind == "concatenation":
        pieces = [word_of(child, source) for child in node.children]
        whole = sum(child.end_byte - child.start_byte for child in node.children) == node.end_byte - node.start_byte
        sure = whole and all(piece.sure for piece in pieces) and not _BRACES.search(text)
        return Word("".join(piece.text for piece in pieces), sure)
    if kind in {"word", "number"} or not node.is_named:
        if node.named_child_count:
            return Word(text, False)
        return Word(_UNESCAPE.sub(r"\1", text), not _CHANGED_BY_SHELL.search(text) and not _BRACES.search(text))
    return Word(text, kind == "variable_name")
