"""Where hutchd listens, and whether what answers there may be told anything.

A client hands out prompts, answers and keys, so it looks at the uid of whoever holds the listening end before it says
a word. That must be the person itself, root, or the account that the system's state directory belongs to.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Container
from pathlib import Path
from typing import Final

from hutch_shared.errors import HutchError, Reason
from hutch_shared.paths import find_host
from hutch_shared.unix import connect, peer_credentials

__all__ = ["dial", "is_named", "socket_path", "trusted_uids"]

_SYSTEM_STATE: Final = Path("/var/lib/hutch")
_NAMED_BY: Final = ("HUTCH_HOST", "HUTCH_RUNTIME_DIR", "HUTCH_STATE_DIR")


def is_named() -> bool:
    """Tell whether the person said which hutchd is meant."""
    return any(os.environ.get(name) for name in _NAMED_BY)


def socket_path() -> Path:
    """Return the client socket: the one that was named, else the user's own, else the host's where there is one."""
    own = find_host()
    if is_named() or own.exists():
        return own
    host = find_host({}, system=True)
    return host if host.exists() else own


def trusted_uids() -> frozenset[int]:
    """Return who may serve us: whose the state directory is that we were told of (HUTCH_STATE_DIR) is one of them."""
    found = {0, os.geteuid()}
    for state in (_SYSTEM_STATE, os.environ.get("HUTCH_STATE_DIR")):
        if state:
            with contextlib.suppress(OSError):
                found.add(os.stat(state).st_uid)
    return frozenset(found)


def dial(path: Path, timeout: float = 10.0, trusted: Container[int] | None = None) -> socket.socket:
    """Return a connected socket whose other end is one of `trusted` (default: `trusted_uids`).

    Blocks at most `timeout` seconds, which stay set on the socket.

    Raises HutchError: CONNECTION_LOST when nothing answers there, NOT_ALLOWED when a stranger does or the socket is
    not ours to open.
    """
    try:
        line = connect(path, timeout)
    except PermissionError:
        raise HutchError(Reason.NOT_ALLOWED, f"You may not open {path}: it is another account's.") from None
    except (FileNotFoundError, ConnectionRefusedError):
        raise HutchError(
            Reason.CONNECTION_LOST, f"No hutchd answers at {path}. Start one with `hutch daemon start`."
        ) from None
    except OSError as error:
        raise HutchError(Reason.CONNECTION_LOST, f"No connection to {path}: {error}.") from None
    try:
        uid = peer_credentials(line).uid
        if uid not in (trusted_uids() if trusted is None else trusted):
            raise HutchError(
                Reason.NOT_ALLOWED,
                f"{path} is served by uid {uid}, which is neither you, root nor Hutch's own account: nothing was sent.",
            )
    except BaseException:
        line.close()
        raise
    return line
