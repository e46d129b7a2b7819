"""The project's own policy file. Executor and client read it as the account; hutchd cannot and must not."""

from __future__ import annotations

import hashlib
import os
import stat
from typing import Final, NamedTuple

__all__ = ["POLICY_FILE", "TEXT_LIMIT", "UNUSABLE", "PolicyFile", "read_project_file"]

POLICY_FILE: Final = (".hutch", "policy.toml")
TEXT_LIMIT: Final = 64 * 1024
UNUSABLE: Final = "!! This project's policy file cannot be used: "
"""The start of the text that replaces an unreadable file; the reason follows. The text is not TOML."""
_NO_LINKS: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


class PolicyFile(NamedTuple):
    """The fields of `messages.ProjectFile`, without the cost of importing that module."""

    path: str
    digest: str
    text: str


def read_project_file(workspace: str) -> PolicyFile | None:
    """Return `.hutch/policy.toml` of `workspace`; None if there is none. Blocks.

    Symbolic links are not followed. For an unusable file the text is the reason instead of TOML, so that the policy
    reports it: the file can only tighten the policy, so it must not be ignored silently.
    """
    path = os.path.join(workspace, *POLICY_FILE)
    try:
        text = _read(workspace)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        text = f"{UNUSABLE}{why}"
    return PolicyFile(path=path, digest=hashlib.sha256(text.encode()).hexdigest(), text=text)


def _read(workspace: str) -> str:
    directory, name = POLICY_FILE
    if os.path.islink(os.path.join(workspace, directory)):
        raise ValueError(f"{directory} is a symbolic link")
    folder = os.open(os.path.join(workspace, directory), _NO_LINKS | os.O_DIRECTORY)
    try:
        file = os.open(name, _NO_LINKS, dir_fd=folder)
    finally:
        os.close(folder)
    with open(file, "rb") as opened:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise ValueError("it is not a regular file")
        data = opened.read(TEXT_LIMIT + 1)
    if len(data) > TEXT_LIMIT:
        raise ValueError(f"it is larger than {TEXT_LIMIT} bytes")
    return data.decode()
