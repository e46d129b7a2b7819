"""Narrow rules that are safe to accept with `always`.

The rule for a command spells the program, sub-command and script name, if that is narrow enough; otherwise exactly the
words of the command. A suggested open rule never allows an option or word that could write files or run programs. A
suggested rule always allows the call that it is suggested for.
"""

from __future__ import annotations

import re
import shlex

from hutch_daemon.permissions.programs.row import ProgramKind, base_name
from hutch_daemon.permissions.programs.table import lookup
from hutch_daemon.permissions.programs.veto import veto
from hutch_daemon.permissions.shell.words import Word
from hutch_shared.messages import Suggestion

_RUNS_REPOSITORY_CODE = "allows code in this repository to run"
_ONLY_THIS = "only this exact command"
_SCRIPT_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:/@-]*")
_OPEN_BY_SUBCOMMAND: dict[str, frozenset[str]] = {
    "git": frozenset(
        (
            *("status", "log", "show", "diff", "add", "commit", "blame", "shortlog", "describe", "rev-parse"),
            *("rev-list", "ls-files", "ls-tree", "cat-file", "grep", "reflog", "fetch", "merge-base", "check-ignore"),
        )
    ),
    "cargo": frozenset(["build", "check", "test", "clippy", "fmt", "doc", "tree", "metadata"]),
    "go": frozenset(["build", "test", "vet", "fmt", "list", "doc", "version"]),
    "npm": frozenset(["test", "ls", "outdated", "view"]),
    "pnpm": frozenset(["test", "ls", "outdated"]),
    "yarn": frozenset(["test", "list", "outdated"]),
    "docker": frozenset(["ps", "images", "logs", "inspect", "version"]),
    "kubectl": frozenset(["get", "describe", "logs", "version"]),
    "pip": frozenset(["list", "show", "freeze", "check"]),
}
_SCRIPT_RUNNERS = frozenset(["npm run", "npm run-script", "pnpm run", "yarn run", "bun run"])
_TEST_PROGRAMS = frozenset(
    ["pytest", "tox", "nox", "jest", "vitest", "mypy", "ruff", "eslint", "tsc", "black", "prettier"]
)
_CODE_RUNNERS = frozenset(
    ["cargo", "go", "npm", "pnpm", "yarn", "bun", "make", "pytest", "tox", "nox", "jest", "vitest"]
)
_MODULES = frozenset(["pytest", "unittest", "mypy", "ruff", "black", "build", "compileall", "tox", "nox"])


def of_command(argv: tuple[Word, ...]) -> Suggestion | None:
    """Return the suggestion for a command that no rule allows, or None if no narrow rule would allow it."""
    if not argv or not all(word.sure for word in argv):
        return None
    words = [word.text for word in argv]
    stem = _stem(words)
    if stem and veto(tuple(words), len(stem)) is None:
        note = _RUNS_REPOSITORY_CODE if stem[0] in _CODE_RUNNERS or stem[1:2] == ["-m"] else ""
        return Suggestion(rule=f"Bash({shlex.join(stem)}:*)", note=note)
    if any("\n" in word or "\0" in word for word in words) or "\\" in words[0]:
        return None
    note = _ONLY_THIS
    if "/" in words[0] or lookup(words[0]).kind is ProgramKind.PINNED:
        note += "; " + _RUNS_REPOSITORY_CODE
    return Suggestion(rule=f"Bash({shlex.join(words)})", note=note)


def _stem(words: list[str]) -> list[str] | None:
    """Return the words of a safe open rule, or None if only a rule for the whole command is narrow enough."""
    name = words[0]
    if name in _TEST_PROGRAMS:
        return [name]
    if "/" in name or len(words) < 2 or not _SCRIPT_NAME.fullmatch(words[1].lstrip("-")):
        return (
            [name] if "/" not in name and lookup(name).kind is ProgramKind.READS and base_name(name) != "echo" else None
        )
    if " ".join(words[:2]) in _SCRIPT_RUNNERS:
        return words[:3] if len(words) > 2 and _SCRIPT_NAME.fullmatch(words[2]) else None
    if name.rstrip("0123456789.") == "python" and words[1] == "-m" and words[2:3] and words[2] in _MODULES:
        return words[:3]
    if name == "make" and _SCRIPT_NAME.fullmatch(words[1]):
        return words[:2]
    if words[1] in _OPEN_BY_SUBCOMMAND.get(name, frozenset()):
        return words[:2]
    return [name] if lookup(name).kind is ProgramKind.READS else None


def of_path(tool: str, path: str) -> Suggestion | None:
    """Return a rule for this file by its absolute path; None if a rule cannot contain its name."""
    if any(ord(char) < 32 for char in path) or len(path) > 500:
        return None
    spelled = re.sub(r"([*?\[])", r"[\1]", path)
    return Suggestion(rule=f"{tool}(/{spelled})", note="only this file")


def of_host(host: str) -> Suggestion:
    return Suggestion(rule=f"WebFetch(domain:{host})", note="any page of this host")


def of_tool(name: str) -> Suggestion | None:
    """Return a rule for a tool by its whole name; None if a rule cannot contain the name."""
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_.\-]*", name):
        return None
    return Suggestion(rule=name, note="every call of this tool, whatever its input")
