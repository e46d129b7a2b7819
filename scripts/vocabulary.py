"""Reject retired names and phrases, and class names that mean two things.

Reads scripts/vocabulary.toml. Exit code 1 with one line per finding: place, word, and what to write instead.
`--count` prints the number of findings per folder and exits 0.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

TOP: Final = Path(__file__).resolve().parent.parent
PRODUCT: Final = ("daemon/", "executor/", "shared/")
EXEMPT: Final = ("scripts/vocabulary", "docs/decisions/", "CHANGELOG.md", "LICENSE", "tests/policy_data/")
"""Decision records and the changelog keep the words of their time."""
_TEXTS: Final = (tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", None))
"""The tokens that hold prose. From Python 3.12 on, an f-string has tokens of its own."""


class Found(NamedTuple):
    """One finding: the place, the retired text and its replacement."""

    path: str
    line: int
    text: str
    instead: str


def main() -> int:
    """Print the findings; return the exit code."""
    table = tomllib.loads((TOP / "scripts/vocabulary.toml").read_text())
    names = [(re.compile(pattern), instead) for pattern, instead in table["names"].items()]
    phrases = [(re.compile(pattern, re.IGNORECASE), instead) for pattern, instead in table["phrases"].items()]
    exceptions: dict[str, list[str]] = table["exceptions"]
    found = [*_duplicate_classes()]
    for path in _files():
        text = (TOP / path).read_text()
        if path.endswith(".py"):
            found += _in_python(path, text, names, phrases)
        else:
            found += _in_lines(path, enumerate(text.splitlines(), 1), phrases)
    found = [one for one in found if one.path not in exceptions.get(one.text, ())]
    if "--count" in sys.argv:
        for folder, count in sorted(Counter(_folder(one.path) for one in found).items()):
            print(f"{count:6} {folder}")
        return 0
    for one in found:
        print(f"{one.path}:{one.line}: {one.text!r} is retired; write: {one.instead}")
    return 1 if found else 0


def _files() -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "*.py", "*.md"],
        cwd=TOP,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    return [path for path in listed if not path.startswith(EXEMPT) and (TOP / path).is_file()]


def _folder(path: str) -> str:
    return "/".join(path.split("/")[:3]) if path.startswith(PRODUCT) else "/".join(path.split("/")[:2])


def _in_python(
    path: str, text: str, names: list[tuple[re.Pattern[str], str]], phrases: list[tuple[re.Pattern[str], str]]
) -> Iterator[Found]:
    tests = path.startswith(("tests/", "scripts/"))
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.NAME and not tests:
            for pattern, instead in names:
                if pattern.fullmatch(token.string):
                    yield Found(path, token.start[0], token.string, instead)
        elif token.type == tokenize.COMMENT or (token.type in _TEXTS and " " in token.string):
            lines = enumerate(token.string.splitlines(), token.start[0])
            yield from _in_lines(path, lines, phrases)


def _in_lines(
    path: str, lines: Iterator[tuple[int, str]], phrases: list[tuple[re.Pattern[str], str]]
) -> Iterator[Found]:
    for number, line in lines:
        for pattern, instead in phrases:
            if (match := pattern.search(line)) is not None:
                yield Found(path, number, match.group().strip(), instead)


def _duplicate_classes() -> Iterator[Found]:
    """Yield every top-level class of the product whose name another module uses too."""
    places: defaultdict[str, list[tuple[str, int]]] = defaultdict(list)
    for path in _files():
        if path.startswith(PRODUCT) and path.endswith(".py"):
            for node in ast.parse((TOP / path).read_text()).body:
                if isinstance(node, ast.ClassDef):
                    places[node.name].append((path, node.lineno))
    for name, used in places.items():
        for path, line in used if len(used) > 1 else ():
            others = ", ".join(other for other, _ in used if other != path)
            yield Found(path, line, f"class {name}", f"another name than in {others}")


if __name__ == "__main__":
    sys.exit(main())
