"""The project's own policy file. Executor and client read it as the account; hutchd cannot and must not."""

from __future__ import annotations

import hashlib
import os
from typing import Final, NamedTuple

from hutch_shared.tree import Tree, UnfitFileError

__all__ = ["POLICY_FILE", "TEXT_LIMIT", "UNUSABLE", "PolicyFile", "read_project_file"]

POLICY_FILE: Final = (".hutch", "policy.toml")
TEXT_LIMIT: Final = 64 * 1024
UNUSABLE: Final = "!! This project's policy file cannot be used: "
"""The start of the text that replaces an unreadable file; the reason follows. The text is not TOML."""


class PolicyFile(NamedTuple):
    """The fields of `messages.ProjectFile`, without the cost of importing that module."""

    path: str
    digest: str
    text: str


def read_project_file(workspace: str) -> PolicyFile | None:
    """Return `.hutch/policy.toml` of `workspace`, a real path; None if there is none. Blocks.

    Symbolic links are not followed. For an unusable file the text is the reason instead of TOML, so that the policy
    reports it: the file can only tighten the policy, so it must not be ignored silently.
    """
    path = os.path.join(workspace, *POLICY_FILE)
    try:
        with Tree(workspace) as tree:
            content = tree.read("/".join(POLICY_FILE), TEXT_LIMIT)
        if content.is_cut:
            raise UnfitFileError(f"it is larger than {TEXT_LIMIT} bytes")
        text = content.data.decode()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        text = f"{UNUSABLE}{why}"
    return PolicyFile(path=path, digest=hashlib.sha256(text.encode()).hexdigest(), text=text)
