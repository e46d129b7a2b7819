"""The project's own policy file, read as the account by executor and client: hutchd cannot read it and must not."""

from __future__ import annotations

import hashlib
import os
import stat
from typing import Final, NamedTuple

__all__ = ["POLICY_FILE", "TEXT_LIMIT", "UNUSABLE", "PolicyFile", "read_project_file"]

POLICY_FILE: Final = (".hutch", "policy.toml")
TEXT_LIMIT: Final = 64 * 1024
UNUSABLE: Final = "!! This project's policy file cannot be used: "
"""Begins the text of a file that could not be read, and is no TOML; the reason follows."""
_NO_LINKS: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


class PolicyFile(NamedTuple):
    """What `messages.ProjectFile` says on the wire, without the cost of importing it."""

    path: str
    digest: str
    text: str


def read_project_file(workspace: str) -> PolicyFile | None:
    """Return `.hutch/policy.toml` of `workspace`, None when there is none. Blocks.

    A symbolic link is not followed. A file that is there but cannot be used yields a text that is no TOML and says
    why, so that the policy reports it: a file that only tightens must not vanish in silence.
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
