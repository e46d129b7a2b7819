"""The broker's directory as a sandboxed CLI sees it.

The sandbox mounts the directory that holds the broker's socket. If that directory is removed and made again (a logout
removes the runtime directory), hutchd and the broker bind their sockets again. A CLI that runs keeps the removed one
and can never reach its model: it must be started again.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Final

import anyio

from hutch_shared.errors import HutchError, Reason

__all__ = ["LOST", "BrokerDirectory"]

LOST: Final = "broker_lost"
"""The reason of a turn that failed since its agent could not reach the broker any more."""
_DEADLINE: Final = 10.0
"""Seconds to wait for a socket that is missing. Its maker notices that within a few."""
_PAUSE: Final = 0.1


@dataclass(frozen=True, slots=True)
class BrokerDirectory:
    """A directory, as it was when a sandbox mounted it."""

    path: str
    device: int
    inode: int

    @classmethod
    async def wait(cls, socket: str) -> BrokerDirectory:
        """Return the directory of the broker's socket, once both exist.

        `agent_unavailable` with the word `broker_lost` if they do not within the deadline. May be cancelled.
        """
        path = os.path.dirname(socket)
        until = anyio.current_time() + _DEADLINE
        while True:
            try:
                os.stat(socket)
                found = os.stat(path)
            except OSError as error:
                if anyio.current_time() >= until:
                    why = f"The broker's socket {socket} is gone. Submit the prompt again once `hutch doctor` finds it."
                    raise HutchError(Reason.AGENT_UNAVAILABLE, why, word=LOST) from error
            else:
                return cls(path, found.st_dev, found.st_ino)
            await anyio.sleep(_PAUSE)

    def is_replaced(self) -> bool:
        """Return whether the path does not lead to this directory any more."""
        try:
            found = os.stat(self.path)
        except OSError:
            return True
        return (found.st_dev, found.st_ino) != (self.device, self.inode)
