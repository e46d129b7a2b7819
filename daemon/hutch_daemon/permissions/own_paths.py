"""The files in its own directory that an agent uses by its program's instructions, so that no rule is needed. Pure.

The program stores a long tool result in a file and tells the model to read it; in the mode `plan` it tells the model to
write its plan into a file. Both lie in the directory that belongs to the session alone. Everything else there is
judged like any other file.

| action | file | mode |
|---|---|---|
| read, search | `projects/*/*/tool-results/**` | any |
| read | `plans/*.md` | any |
| edit | `plans/*.md` | plan |
"""

from __future__ import annotations

from hutch_daemon.permissions.paths import PathTarget, inside, names_of
from hutch_shared.messages import PermissionMode

__all__ = ["is_own"]


def is_own(directory: str | None, action: str, target: PathTarget, mode: PermissionMode) -> bool:
    """Return whether the action needs no rule, since the target is the agent's own file below `directory`.

    The path as written and the resolved path must both be such a file, so that a link leads nowhere else. None means
    that the session has no directory.
    """
    if directory is None or target.real is None:
        return False
    return all(_is_own(directory, action, path, mode) for path in (target.written, target.real))


def _is_own(directory: str, action: str, path: str, mode: PermissionMode) -> bool:
    if not inside(path, directory):
        return False
    names = names_of(path[len(directory.rstrip("/")) :])
    match names:
        case ("projects", _, _, "tool-results", *rest):
            return action == "search" or (action == "read" and bool(rest))
        case ("plans", name) if name.endswith(".md"):
            return action == "read" or (action == "edit" and mode == "plan")
    return False
