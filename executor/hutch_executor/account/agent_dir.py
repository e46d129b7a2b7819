"""The directories of agents, one for each session, in the folder `agents` beside the account's spools."""

from __future__ import annotations

import os
import stat
from contextlib import suppress

from hutch_shared import messages as m
from hutch_shared.agents import SCRATCH
from hutch_shared.errors import HutchError, Reason
from hutch_shared.removal import remove_anything, remove_tree

__all__ = ["agent_dir_of", "make", "make_scratch", "remove", "remove_scratch"]

_FOLDER = "agents"


def agent_dir_of(session: m.PrepareSession) -> str:
    """Return the path of the session's directory."""
    beside = os.path.realpath(os.path.dirname(session.spool))
    return session.agent_dir or os.path.join(beside, _FOLDER, session.session)


def make(path: str) -> None:
    """Make the directory, or check the one that exists. `agent_unavailable` if it is unfit or cannot be made. Blocks.

    It and the folder of all sessions belong to this account and are closed to others. The session's agent can change
    the mode of its own directory, which is set right again.
    """
    try:
        for directory in (os.path.dirname(path), path):
            with suppress(FileExistsError):
                os.mkdir(directory, 0o700)
            found = os.lstat(directory)
            is_own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
            if not is_own or (directory != path and found.st_mode & 0o077):
                why = f"{directory} must be a directory of this account that is closed to others (mode 0700)."
                raise HutchError(Reason.AGENT_UNAVAILABLE, why)
        if stat.S_IMODE(found.st_mode) != 0o700:
            os.chmod(path, 0o700)
    except OSError as error:
        why = f"The conversation cannot be stored in {path}: {error.strerror}."
        raise HutchError(Reason.AGENT_UNAVAILABLE, why) from error


def make_scratch(path: str) -> str:
    """Make an empty folder for temporary files in the session's directory, and return its path. Blocks.

    It replaces the folder of an executor that was killed. `agent_unavailable` if that fails.
    """
    scratch = os.path.join(path, SCRATCH)
    try:
        remove_scratch(path)
        os.mkdir(scratch, 0o700)
    except OSError as error:
        why = f"Temporary files of the agent cannot be stored in {scratch}: {error.strerror}."
        raise HutchError(Reason.AGENT_UNAVAILABLE, why) from error
    return scratch


def remove_scratch(path: str) -> None:
    """Remove the folder of temporary files, or what the agent put in its place. OSError if it stays. Blocks."""
    remove_anything(os.path.join(path, SCRATCH))


def remove(path: str) -> None:
    """Remove a session's directory, or only the folder of temporary files in it. Blocks.

    `invalid_params` if it can be neither; `agent_unavailable` if it stays.
    """
    above = os.path.dirname(path)
    is_scratch = os.path.basename(path) == SCRATCH
    if os.path.normpath(path) != path or os.path.basename(os.path.dirname(above) if is_scratch else above) != _FOLDER:
        raise HutchError(Reason.INVALID_PARAMS, f"{path} is not the directory of a session's agent.")
    try:
        if is_scratch:
            remove_scratch(above)
        else:
            remove_tree(path)
    except OSError as error:
        raise HutchError(Reason.AGENT_UNAVAILABLE, f"{path} cannot be removed: {error.strerror}.") from error
