"""Who calls, as the kernel says it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from hutch_daemon.store.rows import SessionRow
from hutch_shared.errors import HutchError, Reason

__all__ = ["Caller", "SessionOf"]


@dataclass(frozen=True, slots=True)
class Caller:
    """The peer of a client connection. Everything but `client` comes from the kernel or the settings."""

    uid: int
    gid: int
    pid: int
    client: str = ""
    """What the client calls itself; for the record only."""
    admin: bool = False
    """uid 0, or named in the settings: sees and steers everything."""
    insider: str | None = None
    """The executor whose process this is; an insider may not change anything, and is never `admin`."""

    @property
    def scope(self) -> int | None:
        """The owner whose things the caller may see; None means everybody's."""
        return None if self.admin else self.uid

    def may_see(self, owner: int) -> bool:
        """Tell whether things of `owner` are the caller's to see and steer."""
        return self.admin or owner == self.uid

    def demand(self, owner: int) -> None:
        """Refuse what is not the caller's in the words for what does not exist."""
        if not self.may_see(owner):
            raise HutchError(Reason.NOT_FOUND)

    def __str__(self) -> str:
        return f"uid {self.uid} ({self.client or 'a client'}, pid {self.pid})"


SessionOf = Callable[[Caller, str], Awaitable[SessionRow]]
"""Finds the session that a caller means; what is not the caller's is `not_found`."""
