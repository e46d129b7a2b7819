"""The instruction files of an account and a project, as text for the system prompt, with a list of what was left out.

Hutch reads them itself, since the CLI would read them together with settings files, whose hooks and helpers are
commands that run unasked. It follows Claude Code's documentation: `CLAUDE.md`, `.claude/CLAUDE.md` and
`CLAUDE.local.md` of each folder, `AGENTS.md` of a folder without the first two, rules in `.claude/rules`, and imports
with `@path`.

Theory. An agent can change the files in its working directory: it can write an import, or put a link in the place of a
file or a folder. Neither may bring a file into a prompt that the agent cannot see itself. Therefore:

- In the working directory, links and imports stay inside it.
- A file above it was written by the user or by an agent that works in that folder. It may be one link, and it imports
  only files below its own folder, and follows no link to them.
- The same holds for the account's own file, which may import from the whole home, unless it is a link: then only from
  below the folder that it leads to.
- Nothing is given that the sandbox hides.

Rules judge a file by its path as text. So each path gives one file at most, though an agent may exchange what it leads
to, and a file whose name has no text is not given.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Final, Literal

from hutch_executor.runners.claude.instruction_text import imports_of, rule_of
from hutch_shared import messages as m
from hutch_shared.text import is_valid_text, valid_text
from hutch_shared.tree import LINKS, Tree, UnfitFileError

__all__ = ["INSTRUCTIONS_LIMIT", "InstructionSet", "read_instructions"]

INSTRUCTIONS_LIMIT: Final = 64 * 1024
"""Bytes of all files together. Longer text is cut and ends with a note."""
DEPTH: Final = 5
"""How deep imports are followed."""
_GIVEN: Final = 100
_LEFT_OUT: Final = 50
_RULES: Final = 200
_RULE_DEPTH: Final = 4
_NESTED: Final = 20
_NESTED_DEPTH: Final = 4
_SEARCHED: Final = 500
"""Subfolders that are searched for more instruction files."""
_NAMES: Final = 1000
_SKIPPED: Final = frozenset(
    ["node_modules", "__pycache__", "venv", "vendor", "target", "dist", "build", "site-packages"]
)
_READS: Final = 500
"""Files that are opened at most, whatever they contain."""
_FILE_NAME: Final = re.compile(r"\.[A-Za-z]\w{0,5}$")
_MISSING: Final = (FileNotFoundError, NotADirectoryError)

Which = Literal["all", "project", "none"]


@dataclass(frozen=True, slots=True)
class GivenFile:
    """A file that the agent gets."""

    entry: m.InstructionFile
    real: str
    is_imported: bool
    text: str
    """Its content with a heading."""


@dataclass(frozen=True, slots=True)
class InstructionSet:
    """All files that were found."""

    given: tuple[GivenFile, ...] = ()
    left_out: tuple[m.InstructionFile, ...] = ()

    def named(self) -> dict[str, str]:
        """Return the real paths of the files that count by their names, by path."""
        return {file.entry.path: file.real for file in self.given if not file.is_imported}

    def imported(self) -> dict[str, str]:
        """Return the real paths of the imported files, by path."""
        return {file.entry.path: file.real for file in self.given if file.is_imported}

    def without(self, withheld: Mapping[str, str]) -> InstructionSet:
        """Return the set without some files, given by path with the reason. What they import stays."""
        given = tuple(file for file in self.given if file.entry.path not in withheld)
        more = (m.InstructionFile(f.entry.path, why=withheld[f.entry.path]) for f in self.given if f not in given)
        return InstructionSet(given, (*more, *self.left_out))

    def text(self) -> str:
        """Return all files as one text; "" if there are none."""
        if not self.given:
            return ""
        beginning = "The people of this project left these instructions. Follow them."
        return "\n\n".join([beginning, *(file.text for file in self.given)])

    def record(self) -> m.Instructions:
        """Return which files are given, and which are left out."""
        return m.Instructions(tuple(file.entry for file in self.given), self.left_out)


@dataclass(frozen=True, slots=True)
class _Area:
    """A folder whose files are given: `home`, the working directory, or a folder above it."""

    tree: Tree
    is_workdir: bool = False
    """Whether it is the working directory: links stay inside it, and files import from all of it."""

    @property
    def links(self) -> int:
        """The links that a file of the folder itself may lead through."""
        return LINKS if self.is_workdir else 1

    @property
    def import_links(self) -> int:
        """The links that an imported file may lead through."""
        return LINKS if self.is_workdir else 0

    def path(self, name: str) -> str:
        return os.path.join(self.tree.root, name)


def read_instructions(cwd: str, home: str, which: Which = "all", hidden: Sequence[str] = ()) -> InstructionSet:
    """Read the instruction files for a session in `cwd`, a real path: the account's own, the outermost folder's, ….

    `project` leaves the account's own out, `none` all of them. Nothing below a path in `hidden` is given. Blocks.
    """
    reading = _Reading(os.path.realpath(home), hidden)
    with ExitStack() as opened:
        if which == "all" and (tree := _opened(opened, reading.home)) is not None:
            reading.add_folder(_Area(tree), only=".claude")
        if which != "none":
            for folder in _folders_above(cwd):
                if (tree := _opened(opened, folder)) is not None:
                    reading.add_folder(_Area(tree))
            if (tree := _opened(opened, cwd)) is not None:
                area = _Area(tree, is_workdir=True)
                reading.add_folder(area)
                reading.look_below(area)
    return reading.found()


def _opened(stack: ExitStack, folder: str) -> Tree | None:
    """Open a folder until `stack` closes; None if it cannot be opened, or if an agent has put a link in its place."""
    with suppress(OSError, UnfitFileError):
        return stack.enter_context(Tree(folder))
    return None


def _folders_above(cwd: str) -> list[str]:
    """Return the folders of the repository above `cwd`, outermost first; none if it is not in a repository."""
    above: list[str] = []
    folder = cwd
    while True:
        with suppress(OSError, UnfitFileError), Tree(folder) as tree:
            if tree.has(".git"):
                return above[::-1]
        outer = os.path.dirname(folder)
        if outer in ("/", folder):
            return []
        folder = outer
        above.append(folder)


class _Reading:
    """Collects the files, up to the limits."""

    def __init__(self, home: str, hidden: Sequence[str]) -> None:
        self.home = home
        self._hidden = tuple(os.path.realpath(one) for one in hidden)
        self._left = INSTRUCTIONS_LIMIT
        self._reads = 0
        self._seen: set[str] = set()
        """The real paths of all files that were given, or have nothing to give."""
        self._given: list[GivenFile] = []
        self._left_out: dict[str, str] = {}
        """The reasons, by path."""

    # ---------------------------------------------------------------- the result

    def found(self) -> InstructionSet:
        """Return which files are given, and which are left out."""
        left_out = [(path, why) for path, why in self._left_out.items() if path not in self._seen]
        if (more := len(left_out) - _LEFT_OUT) > 0:
            left_out[_LEFT_OUT - 1 :] = [("…", f"{more + 1} more files are left out")]
        files = (m.InstructionFile(valid_text(path), why=valid_text(why)) for path, why in left_out)
        return InstructionSet(tuple(self._given), tuple(files))

    # ---------------------------------------------------------------- what there is

    def add_folder(self, area: _Area, only: str = "") -> None:
        """Add the files of a folder; with `only` just those in that subfolder."""
        tree = area.tree
        names = [name for name in ("CLAUDE.md", ".claude/CLAUDE.md") if name.startswith(only)]
        if area.tree.root == self.home and not only:
            names.remove(".claude/CLAUDE.md")  # the account's own, which is chosen separately
        for name in names:
            self._add(area, name)
        if not only and tree.has("AGENTS.md"):
            claude = next((name for name in names if tree.has(name)), None)
            if claude is None:
                self._add(area, "AGENTS.md")
            else:
                self._leave_out(area.path("AGENTS.md"), f"this folder has a {claude}, which does not import it")
        if only or area.tree.root != self.home:
            for name in self._rules(area, ".claude/rules"):
                self._add(area, name, is_rule=True)
        if not only:
            self._add(area, "CLAUDE.local.md")

    def look_below(self, area: _Area) -> None:
        """List the instruction files in subfolders, which are left out. The search is bounded."""
        folders, searched, found = [("", 0)], 0, 0
        while folders and searched < _SEARCHED:
            folder, depth = folders.pop(0)
            searched += 1
            try:
                entries = area.tree.entries(folder, _NAMES)
            except (OSError, UnfitFileError):
                continue
            names = {entry.name for entry in entries if not entry.is_folder}
            name = next((name for name in ("CLAUDE.md", "AGENTS.md") if name in names), None)
            if folder and name and area.path(f"{folder}/{name}") not in self._seen:
                found += 1
                if found == _NESTED:
                    self._leave_out(area.path(""), "more instruction files lie in its subfolders")
                    return
                self._leave_out(area.path(f"{folder}/{name}"), "it lies in a subfolder; the agent can read it there")
            if depth < _NESTED_DEPTH:
                below = (entry.name for entry in entries if entry.is_folder)
                wanted = (name for name in below if not name.startswith(".") and name not in _SKIPPED)
                folders += [(posixpath.join(folder, name), depth + 1) for name in wanted]

    def _rules(self, area: _Area, folder: str, depth: int = 0) -> Iterator[str]:
        """Yield the rules in a folder and its subfolders."""
        try:
            entries = area.tree.entries(folder, _RULES, links=area.links)
        except _MISSING:
            return
        except (OSError, UnfitFileError) as error:
            self._leave_out(area.path(folder), _why(error))
            return
        for entry in entries:
            name = f"{folder}/{entry.name}"
            if entry.is_folder and depth < _RULE_DEPTH:
                yield from self._rules(area, name, depth + 1)
            elif not entry.is_folder and name.endswith(".md"):
                yield name

    # ---------------------------------------------------------------- a file

    def _add(self, area: _Area, name: str, *, is_rule: bool = False) -> None:
        """Give a file of the area's own, if there is one, and what it imports."""
        try:
            self._give(area, name, area.links, is_rule=is_rule)
        except _MISSING:
            if area.tree.has(name):
                self._leave_out(area.path(name), "it is a link to nothing")

    def _give(self, area: _Area, name: str, links: int, depth: int = 0, *, is_rule: bool = False) -> None:
        """Give one file, then what it imports. A missing file raises the error of `open`."""
        path = area.path(name)
        if any(path == file.entry.path for file in self._given):
            return
        self._reads += 1
        if self._reads > _READS:
            if area.tree.has(name):
                self._leave_out(path, f"more than {_READS} files are named")
            return
        try:
            content = area.tree.read(name, self._left + 1, links=links)
        except _MISSING:
            raise
        except (OSError, UnfitFileError) as error:
            self._leave_out(path, _why(error))
            return
        real = area.path(content.path)
        if real in self._seen:
            return
        self._seen.add(real)
        if any(real == one or real.startswith(f"{one}/") for one in self._hidden):
            self._seen.discard(real)
            self._leave_out(path, "the settings hide it from agents")
        elif b"\0" in content.data:
            self._seen.discard(real)
            self._leave_out(path, "it is not a text")
        elif not is_valid_text(path + real):
            self._seen.discard(real)
            self._leave_out(path, "its name is not UTF-8")
        elif content.data.strip():
            self._put(path, real, content.data, is_rule=is_rule, is_imported=depth > 0)
            self._import(area, content.path, content.data[:INSTRUCTIONS_LIMIT].decode(errors="replace"), depth)

    def _put(self, path: str, real: str, data: bytes, *, is_rule: bool, is_imported: bool) -> None:
        if self._left <= 0 or len(self._given) == _GIVEN:
            self._seen.discard(path)
            self._leave_out(path, f"the instructions have more than {_GIVEN} files or {INSTRUCTIONS_LIMIT >> 10} KiB")
            return
        kept = data[: self._left]
        self._left -= len(kept)
        patterns, text = rule_of(kept.decode(errors="replace")) if is_rule else ((), kept.decode(errors="replace"))
        where = f" (for files that match {', '.join(patterns)})" if patterns else ""
        is_cut = len(kept) < len(data)
        text = f"Contents of {path}{where}:\n\n{text}" + ("\n… (cut)" if is_cut else "")
        why = f"it is cut: the instructions are longer than {INSTRUCTIONS_LIMIT >> 10} KiB" if is_cut else ""
        entry = m.InstructionFile(path, len(kept), why)
        self._given.append(GivenFile(entry, real, is_imported, text))

    def _import(self, area: _Area, importer: str, text: str, depth: int) -> None:
        """Give what a file imports. `importer` is its real path below the area."""
        folder = posixpath.dirname(importer)
        within = "" if area.is_workdir else _project_of(folder)
        for written in imports_of(text):
            path = os.path.normpath(os.path.join(area.path(folder), _expanded(written, self.home)))
            name = os.path.relpath(path, area.tree.root)
            boundary = area.path(within).rstrip("/")
            if path in self._seen:
                continue
            if path != boundary and not path.startswith(f"{boundary}/"):
                self._leave_out(path, f"{area.path(importer)} imports it, but it lies outside of {boundary}")
            elif depth == DEPTH:
                self._leave_out(path, f"imports are followed {DEPTH} deep")
            else:
                self._give_import(area, name, area.path(importer), depth + 1)

    def _give_import(self, area: _Area, name: str, importer: str, depth: int) -> None:
        try:
            self._give(area, name, area.import_links, depth)
        except _MISSING:
            if _FILE_NAME.search(name):  # otherwise `@name` was no path
                self._leave_out(area.path(name), f"{importer} imports it, but it does not exist")

    def _leave_out(self, path: str, why: str) -> None:
        self._left_out.setdefault(path, why)


def _project_of(folder: str) -> str:
    """Return the folder to which a file in `folder` belongs: that of `.claude`, or `folder` itself."""
    names = folder.split("/")
    return "/".join(names[: names.index(".claude")]) if ".claude" in names else folder


def _expanded(path: str, home: str) -> str:
    return home + path[1:] if path.startswith("~/") else path


def _why(error: OSError | UnfitFileError) -> str:
    return f"it cannot be read: {error.strerror}" if isinstance(error, OSError) else str(error)
