"""The instruction files (CLAUDE.md) of an account and a project, as text for the system prompt.

Hutch reads them itself, since the CLI would read them together with settings files, whose hooks and helpers are
commands that run unasked. Their size is bounded, and only files that really lie in the project or the account's own
settings folder are read.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final, Literal

from hutch_shared.tree import Tree

__all__ = ["INSTRUCTIONS_LIMIT", "instructions"]

INSTRUCTIONS_LIMIT: Final = 64 * 1024
"""Bytes of all files together. Longer text is cut and ends with a note."""


def instructions(cwd: str, home: str, which: Literal["all", "project", "none"] = "all") -> str:
    """Read the instruction files for a session in `cwd`: the account's own, then the project's, outermost first.

    `project` leaves the account's own out, `none` all of them. A file that cannot be read is left out. Blocks.
    """
    parts: list[str] = []
    left = INSTRUCTIONS_LIMIT
    for path, root in _instruction_files(Path(cwd), Path(home), which):
        with suppress(OSError, ValueError):
            with Tree(
                str(root.resolve())
            ) as tree:  # a link out would give the model a file that the user did not choose
                content = tree.read(str(path.relative_to(root)), left + 1, follow=True).data
            if not content.strip():
                continue
            cut = "\n… (cut)" if len(content) > left else ""
            parts.append(f"Contents of {path}:\n\n{content[:left].decode(errors='replace')}{cut}")
            left -= min(left, len(content))
        if left <= 0:
            break
    if not parts:
        return ""
    return "\n\n".join(["The people of this project left these instructions. Follow them.", *parts])


def _instruction_files(cwd: Path, home: Path, which: str) -> Iterator[tuple[Path, Path]]:
    """Yield each candidate, and the folder that it must lie in."""
    if which == "none":
        return
    if which == "all":
        yield home / ".claude" / "CLAUDE.md", home
    project = [cwd]
    for folder in cwd.parents:
        with suppress(OSError, ValueError), Tree(str(project[-1])) as tree:
            if tree.has(".git"):
                break
        project.append(folder)
    else:
        project = [cwd]  # no repository: only the folder itself
    for folder in reversed(project):
        yield folder / "CLAUDE.md", project[-1]
        yield folder / ".claude" / "CLAUDE.md", project[-1]
    yield cwd / "CLAUDE.local.md", project[-1]
