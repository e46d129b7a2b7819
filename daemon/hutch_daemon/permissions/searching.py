"""Finds the commands that a line might run and the files that it might use. Generous, for rules that deny or ask."""

from __future__ import annotations

import re
from collections.abc import Iterator

from hutch_daemon.permissions.paths import absolute, can_be_path, plain
from hutch_daemon.permissions.programs.row import ProgramKind, base_name
from hutch_daemon.permissions.programs.table import PRINTS_ITS_WORDS, lookup
from hutch_daemon.permissions.shell.grammar import LONGEST, find
from hutch_daemon.permissions.shell.words import SimpleCommand, Word
from hutch_daemon.permissions.wrappers import LOOKED_THROUGH, hidden_commands

NOWHERE = frozenset(["/dev/null", "/dev/stdout", "/dev/stderr", "/dev/stdin", "/dev/tty"])
"""Device names that a command may read or write without touching a file."""
_MOST_HIDDEN = 400
"""The largest number of commands inside commands. If there are more, the result is incomplete."""
_MOST_HIDDEN_WORDS = 2_500
"""The largest number of words in those commands; nested wrappers repeat the words of the command inside them."""
MOST_DIRECTORIES = 8
"""The largest number of directories, entered by `cd`, that are considered in a line."""
_MOST_PATHS = 200
_MAX_PATH_LENGTH = 1024
_TAKES_NO_FILE = PRINTS_ITS_WORDS | LOOKED_THROUGH
_EDITS_IN_PLACE = frozenset(["sed", "gsed", "perl", "ruby", "awk", "gawk"])
_IN_PLACE = re.compile(r"-[A-Za-z]*i|--in-place|inplace")


def everything_in(line: str) -> tuple[tuple[SimpleCommand, ...], bool]:
    """Return the commands of a line and the commands inside them (`sudo x`, `sh -c x`, `find -exec x`).

    The flag is False if some may be missing.
    """
    found = find(line)
    complete = found.complete
    commands = list(found.commands)
    pending = list(found.commands)
    budget, budget_of_words = _MOST_HIDDEN, _MOST_HIDDEN_WORDS
    while pending:
        command = pending.pop()
        argv = tuple(word.text for word in command.words)
        if not argv or not command.words[0].sure:
            complete = complete and not argv
            continue
        inside, lines = hidden_commands(argv, budget_of_words)
        budget -= len(inside) + len(lines)
        budget_of_words -= sum(map(len, inside))
        if budget < 0 or budget_of_words < 0:
            return tuple(dict.fromkeys(commands)), False
        if not inside and not lines:
            continue
        inner = [SimpleCommand(command.words[len(argv) - len(words) :]) for words in inside]
        for text in lines:
            # Some texts are not shell lines (a host, a user). Reading them as commands can only deny more.
            inner += find(text[:LONGEST]).commands
        commands += inner
        pending += inner
    return tuple(dict.fromkeys(commands)), complete


def directories_of(commands: tuple[SimpleCommand, ...], cwd: str, home: str) -> tuple[str, ...]:
    """Return the directories in which commands of the line may run, following its `cd` and `pushd`."""
    seen = [cwd]
    for command in commands:
        if len(command.words) == 2 and command.words[0].text in {"cd", "pushd"} and len(seen) < MOST_DIRECTORIES:
            seen += [plain(absolute(command.words[1].text, base, home)) for base in tuple(seen)]
    return tuple(dict.fromkeys(seen[:MOST_DIRECTORIES]))


def as_paths(word: str) -> Iterator[str]:
    """Iterate over the file names that a program may find in a word (`x`, `-ox`, `--output=x`, `host:x`)."""
    if len(word) > _MAX_PATH_LENGTH or not can_be_path(word):
        return
    if not word.startswith("-"):
        yield word
    elif len(word) > 2 and not word.startswith("--"):
        yield word[2:]
    for sign in "=:@":
        if sign in word and (after := word.partition(sign)[2]):
            yield after


def operands_of(command: SimpleCommand) -> Iterator[tuple[Word, bool, bool]]:
    """Iterate over the words of a command that may be files, with two flags: may be read, may be written."""
    for word in command.reads:
        yield word, True, False
    for word in command.writes:
        if word.text not in NOWHERE:
            yield word, False, True
    if not command.words or base_name(command.words[0].text) in _TAKES_NO_FILE:
        return
    in_place = base_name(command.words[0].text) in _EDITS_IN_PLACE and any(
        _IN_PLACE.match(w.text) for w in command.words
    )
    writes = in_place or lookup(command.words[0].text).kind is ProgramKind.WRITES
    for word in command.words[1:]:
        yield word, True, writes
    if "/" in command.words[0].text:
        yield command.words[0], True, False


def paths_of(line: str, cwd: str, home: str) -> tuple[str, ...]:
    """Return the absolute paths that judging the line needs, at most 200. They still contain `..`."""
    commands, _ = everything_in(line)
    directories = directories_of(commands, cwd, home)
    paths: dict[str, None] = {}
    for command in commands:
        for word, _, _ in operands_of(command):
            for text in as_paths(word.text):
                for directory in directories:
                    paths[absolute(text, directory, home)] = None
        if len(paths) > _MOST_PATHS:
            break
    return tuple(paths)[:_MOST_PATHS]


def shown(command: SimpleCommand) -> str:
    """Return the command as text for users, shortened if it is long."""
    text = " ".join(word.text for word in command.words)
    return text if len(text) <= 120 else text[:119] + "…"
