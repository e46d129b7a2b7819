"""The tokens of executors: what is stored, and when one is good. Pure; no clock is read here.

A token is 256 random bits. Only its SHA-256 is stored: a token is no password, one hash is enough. Lifetimes count
milliseconds awake: the machine's monotonic clock, which stands still while the machine sleeps and which no clock
setting moves. It starts anew with each boot, so a token's record names the boot that it counts in.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Final

from hutch_daemon.store.rows import ExecutorRow
from hutch_shared.errors import HutchError, Reason
from hutch_shared.ids import new_token
from hutch_shared.secret import Secret

__all__ = ["LIFETIME", "MAXIMUM_USES", "Issued", "admit", "hash_of", "issue", "renewed"]

LIFETIME: Final = 24 * 3600 * 1000
"""Milliseconds awake."""
MAXIMUM_USES: Final = 10_000
"""Successful hellos. An executor that dials in that often is out of order."""


@dataclass(frozen=True, slots=True)
class Issued:
    """A fresh token, and what is stored of it."""

    secret: Secret
    hash: bytes
    until: int
    maximum: int


def hash_of(token: str) -> bytes:
    """Return the SHA-256 of a token."""
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()


def issue(now: int, *, lifetime: int = LIFETIME, maximum: int = MAXIMUM_USES) -> Issued:
    """Make a token that holds from `now` for `lifetime`."""
    secret = Secret(new_token())
    return Issued(secret, hash_of(secret.reveal()), now + lifetime, maximum)


def admit(row: ExecutorRow, now: int, boot_id: str, *, proven: bool) -> None:
    """Return when the token of `row` is good for one more hello; else `token_unknown` (revoked) or `token_expired`.

    `proven` says that the peer is the very process of a leased launch record: it is admitted after an outage in which
    nobody could renew its token, also when the time is over.
    """
    if row.state in ("gone", "quarantined"):
        raise HutchError(Reason.TOKEN_UNKNOWN, "The token was revoked: its executor was given up.")
    if row.token_uses >= row.token_max_uses:
        raise HutchError(Reason.TOKEN_EXPIRED, f"The token was used {row.token_uses} times; it is good for no more.")
    if not proven and (row.boot_id != boot_id or now >= row.token_until):
        raise HutchError(Reason.TOKEN_EXPIRED)


def renewed(row: ExecutorRow, now: int, *, lifetime: int = LIFETIME) -> int | None:
    """Return the new expiry of a token that has lived half its time, None while it need not move.

    The token stays the same, so that a crash between two writes locks nobody out.
    """
    return now + lifetime if row.token_until - now < lifetime // 2 else None
