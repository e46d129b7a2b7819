"""Every command that the documents and the messages name exists, with its verb and its options."""

from __future__ import annotations

import argparse
import importlib
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from hutch_client.commands import MODULES, PRIVATE, Parser

TOP = Path(__file__).parents[2]
SOURCES = [
    *(TOP / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")),
    *sorted((TOP / "docs").rglob("*.md")),
    *sorted(path for part in ("daemon", "executor", "shared") for path in (TOP / part).rglob("*.py")),
]
QUOTED = re.compile(r"`(?:\d+ )?hutch((?: [^`\s|&>#]+)+)")
LINE = re.compile(r"(?:\$ )?(?:sudo )?hutch((?: [^\s|&>#]+)+)")
PLACEHOLDERS = {"COMMAND", "WORD", "help", "-h", "--help", "--version"}


def commands_in(text: str) -> Iterator[list[str]]:
    """Return the words after `hutch` of each command line in quotes or in a block of shell commands."""
    lines = filter(None, map(LINE.match, _shell_lines(text)))
    for found in (*QUOTED.finditer(text.replace("\n", " ")), *lines):
        words = found[1].split()
        yield words[1:] if words[0] == PRIVATE else words


def _shell_lines(text: str) -> Iterator[str]:
    """Return the lines of the blocks of shell commands: those without a language, and those of sh."""
    language: str | None = None
    for line in text.splitlines():
        if line.startswith("```"):
            language = line[3:] if language is None else None
        elif language in ("", "sh", "console"):
            yield line


@cache
def parser_of(name: str) -> argparse.ArgumentParser:
    command = importlib.import_module(f"hutch_client.commands.{MODULES[name]}").COMMANDS[name]
    parser = Parser(prog=f"hutch {name}")
    command.arguments(parser)
    return parser


def fault(words: list[str]) -> str | None:
    """Return what is wrong with a command line, or None. Values of arguments are not looked at."""
    name, *rest = words or ["COMMAND"]
    if name in PLACEHOLDERS or not re.fullmatch(r"[a-z][a-z-]*", name):
        return None
    if name not in MODULES:
        return f"there is no command {name}"
    parser = parser_of(name)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction) and rest and re.fullmatch(r"[a-z-]+", rest[0]):
            if rest[0] not in action.choices:
                return f"{name} has no verb {rest[0]}"
            parser = action.choices[rest[0]]
    known = {option for action in parser._actions for option in action.option_strings}
    unknown = [word for word in rest if re.fullmatch(r"--[a-z][a-z-]*", word) and word not in known]
    return f"{' '.join(words)} has no {unknown[0]}" if unknown else None


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(TOP)))
def test_every_named_command_exists(path: Path) -> None:
    """A user who does what a page or a message says does not meet an unknown command, verb or option."""
    wrong = [why for words in commands_in(path.read_text()) if (why := fault(words)) is not None]

    assert wrong == []


def test_a_command_that_does_not_exist_is_found() -> None:
    """The check knows commands, verbs and options, in quotes and in blocks."""
    text = (
        "`hutch close` `hutch key ls --everyone` `hutch key forget`\n```sh\n$ hutch frob x\nhutch --private ps\n```\n"
    )

    assert [fault(words) for words in commands_in(text)] == [
        "there is no command close",
        "key ls --everyone has no --everyone",
        "key has no verb forget",
        "there is no command frob",
        None,
    ]
