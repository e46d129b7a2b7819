"""Finds out whether a CLI takes messages from other processes, over a Unix socket that it must not bind.

Over such a socket a process of the account could put text before the model, and start turns while the agent is idle.
`launch` names a runtime directory in which the CLI cannot bind it. Whether a CLI of another version binds it elsewhere
shows itself in what the kernel reports about its sockets, and in the line with which it introduces itself.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

from hutch_shared.events import Notice

__all__ = ["find_listening", "notice_of"]

_TOOL: Final = b"AI_AGENT="
"""A variable that the CLI gives to what it starts, commands and MCP servers, and does not have itself."""
_ACCEPTS: Final = 0x10000
"""The kernel's flag (__SO_ACCEPTCON) of a socket that accepts connections."""
_UNKNOWN: Final = "unknown"
_EGRESS: Final = re.compile(r"/srt-mux-\d+-\d+\.sock$")
"""The proxy of the CLI's own sandbox, through which its commands reach the network. It takes no messages."""


def find_listening(pids: Iterable[int], cli: int) -> str | None:
    """Return the path of a Unix socket on which a CLI among these processes accepts connections; None if there is none.

    `cli` is the process that was started. If it lives and the kernel does not show the sockets of the CLI, the answer
    is `unknown`: what cannot be examined counts as listening. Programs that the CLI started may listen.
    Blocks for a moment. Linux only; elsewhere None is returned, as for a process that ends meanwhile.
    """
    if not Path("/proc/self").exists():
        return None
    is_examined = False
    for pid in {*pids, cli}:
        process = Path("/proc") / str(pid)
        try:
            if any(one.startswith(_TOOL) for one in (process / "environ").read_bytes().split(b"\0")):
                continue
            accepting = _accepting((process / "net" / "unix").read_text(errors="replace"))
            inodes = [*_socket_inodes(process / "fd")]
        except OSError:
            if _lives(pid):
                return _UNKNOWN
            continue
        is_examined = True
        for inode in inodes:
            if inode in accepting and not _EGRESS.search(accepting[inode]):
                return accepting[inode]
    return None if is_examined or not _lives(cli) else _UNKNOWN


def notice_of(place: str) -> Notice:
    """Return the notice for an agent that takes messages at `place`, or may take them."""
    finding = f"Claude Code takes messages from other programs at the socket {place}, which it must not"
    if place == _UNKNOWN:
        finding = "Claude Code may take messages from other programs: the kernel does not show its sockets"
    message = (
        f"{finding}. So a command that an agent left behind could make the model work. It runs no command, and the turn"
        " was stopped. Report this to the administrator of Hutch, with the version of Claude Code."
    )
    return Notice("message_socket", message, {"socket": place})


def _lives(pid: int) -> bool:
    """Return whether a process is there and has not ended; True if that is not known."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except ProcessLookupError:
        return False
    except OSError:
        return True


def _accepting(table: str) -> dict[int, str]:
    """Return the sockets of /proc/PID/net/unix that accept connections: their path, by inode."""
    found = {}
    for line in table.splitlines()[1:]:
        words = line.split(maxsplit=7)
        if len(words) >= 7 and int(words[3], 16) & _ACCEPTS:
            found[int(words[6])] = words[7] if len(words) > 7 else "without a name"
    return found


def _socket_inodes(descriptors: Path) -> Iterable[int]:
    for name in os.listdir(descriptors):
        with suppress(FileNotFoundError):  # closed meanwhile
            kind, _, rest = os.readlink(descriptors / name).partition(":[")
            if kind == "socket":
                yield int(rest.removesuffix("]"))
