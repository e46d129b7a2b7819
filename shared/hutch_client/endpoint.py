"""The address of hutchd, and the check of the server behind it.

A client sends prompts, decisions and keys. So before it sends anything it checks the uid of the process that listens:
the caller's own, root's, or that of the account that owns the host's state directory.
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
from hutch_shared.processes import peer_credentials
from hutch_shared.unix import connect

__all__ = ["dial", "is_named", "socket_path", "trusted_uids"]

_SYSTEM_STATE: Final = Path("/var/lib/hutch")
_NAMED_BY: Final = ("HUTCH_HOST", "HUTCH_RUNTIME_DIR", "HUTCH_STATE_DIR")


def is_named() -> bool:
    """Return whether the environment names a hutchd."""
    return any(os.environ.get(name) for name in _NAMED_BY)


def socket_path() -> Path:
    """Return the client socket: the one that the environment names, else the user's own, else the host's."""
    own = find_host()
    if is_named() or own.exists():
        return own
    host = find_host({}, system=True)
    return host if host.exists() else own


def trusted_uids() -> frozenset[int]:
    """Return the uids accepted as server: root, the caller, and the owners of HUTCH_STATE_DIR and /var/lib/hutch."""
    found = {0, os.geteuid()}
    for state in (_SYSTEM_STATE, os.environ.get("HUTCH_STATE_DIR")):
        if state:
            with contextlib.suppress(OSError):
                found.add(os.stat(state).st_uid)
    return frozenset(found)


def dial(path: Path, timeout: float = 10.0, trusted: Container[int] | None = None) -> socket.socket:
    """Return a connected socket to a server with a uid of `trusted` (default: `trusted_uids()`).

    Blocks at most `timeout` seconds; the socket keeps this timeout.

    Raises HutchError: CONNECTION_LOST if nothing answers, NOT_ALLOWED if the server's uid is not trusted or the caller
    may not open the socket.
    """
    try:
        line = connect(path, timeout)
    except PermissionError:
        raise HutchError(
            Reason.NOT_ALLOWED,
            f"You may not open {path}: it belongs to another account. Unset HUTCH_HOST to use your own hutchd.",
        ) from None
    except (FileNotFoundError, ConnectionRefusedError):
        raise HutchError(
            Reason.CONNECTION_LOST, f"No hutchd answers at {path}. Start one with `hutch daemon start`."
        ) from None
    except OSError as error:
        raise HutchError(
            Reason.CONNECTION_LOST, f"Cannot connect to {path}: {error}. `hutch doctor` looks for the cause."
        ) from None
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
