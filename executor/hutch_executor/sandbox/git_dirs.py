"""The git directories outside a working directory whose `.git` is a file: of a worktree or a submodule.

Theory. The agent can write the `.git` file, so the file could name any folder of the account. Therefore the named
folder must point back to the working directory, in a file that no agent in this directory can write: `gitdir` of a
worktree, `config` of a submodule.

Always true: in a worktree's repository an agent can change only the folders in which git stores commits. Hooks,
settings and other worktrees are read-only, since other working directories use them.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hutch_shared.tree import Tree

__all__ = ["GitDirs", "git_dirs"]

_LIMIT: Final = 1 << 20
_COMMITS: Final = ("objects", "refs", "logs", "lfs")
_WORKTREE: Final = re.compile(r'^\s*worktree\s*=\s*"?(.+?)"?\s*$', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class GitDirs:
    """Directories outside the working directory that git needs: read-only ones and writable ones."""

    show: tuple[str, ...] = ()
    write: tuple[str, ...] = ()


def git_dirs(cwd: str) -> GitDirs:
    """Return the git directories of `cwd`, a real path. Empty if they lie inside it, or do not point back to it."""
    try:
        with Tree(cwd) as project:
            named = _text(project, ".git")
        if not named.startswith("gitdir: "):
            return GitDirs()
        own = Path(cwd, named[8:].rstrip("\n")).resolve(strict=True)
        if own.is_relative_to(cwd):
            return GitDirs()
        with Tree(str(own)) as tree:
            if own.parent.name == "worktrees":
                return _of_worktree(cwd, own, tree)
            found = _WORKTREE.search(_text(tree, "config"))
        if found is not None and (own / found[1]).resolve() == Path(cwd):
            return GitDirs(write=(str(own),))
    except (OSError, ValueError):
        pass
    return GitDirs()


def _of_worktree(cwd: str, own: Path, tree: Tree) -> GitDirs:
    common = own.parent.parent
    points_back = (own / _text(tree, "gitdir").rstrip("\n")).parent.resolve() == Path(cwd)
    if not points_back or (own / _text(tree, "commondir").rstrip("\n")).resolve() != common:
        return GitDirs()
    with Tree(str(common)) as repository:
        commits = [str(common / name) for name in _COMMITS if repository.is_folder(name)]
    return GitDirs((str(common),), (str(own), *commits))


def _text(tree: Tree, path: str) -> str:
    return os.fsdecode(tree.read(path, _LIMIT).data)
