"""The tokens of executors: what is stored of one, and whether it admits a hello. Pure; reads no clock.

A token is 256 random bits, and only its SHA-256 is stored. Unlike a password it cannot be guessed, so one hash is
enough. Lifetimes are in milliseconds awake: the machine's monotonic clock, which stands still while the machine sleeps
and does not follow the time of day. It starts over with each boot, so a token's row names the boot that it counts in.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Final

from hutch_daemon.store.rows import ExecutorRow
from hutch_shared.errors import HutchError, Reason
from hutch_shared.ids import new_token
from hutch_shared.secret import Secret

__all__ = ["LIFETIME", "MAXIMUM_USES", "IssuedToken", "admit", "hash_of", "issue", "renewal_due", "renewed"]

LIFETIME: Final = 24 * 3600 * 1000
"""Milliseconds awake."""
MAXIMUM_USES: Final = 10_000
"""Successful hellos. An executor that dials in more often than that is broken."""


@dataclass(frozen=True, slots=True)
class IssuedToken:
    """A fresh token, and what is stored of it."""

    secret: Secret
    hash: bytes
    until: int
    maximum: int


def hash_of(token: str) -> bytes:
    """Return the SHA-256 of a token."""
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()


def issue(now: int, *, lifetime: int = LIFETIME, maximum: int = MAXIMUM_USES) -> IssuedToken:
    """Make a token that is valid from `now` for `lifetime`."""
    secret = Secret(new_token())
    return IssuedToken(secret, hash_of(secret.reveal()), now + lifetime, maximum)


def admit(row: ExecutorRow, now: int, boot_id: str, *, proven: bool) -> None:
    """Return if the token of `row` admits one more hello; raise `token_unknown` (revoked) or `token_expired` if not.

    `proven`: the peer is the very process of a leased launch record. It is admitted even after the token expired,
    since during an outage hutchd could not renew it.
    """
    if row.state in ("gone", "quarantined"):
        raise HutchError(Reason.TOKEN_UNKNOWN, "The token was revoked: its executor was given up.")
    if row.token_uses >= row.token_max_uses:
        raise HutchError(Reason.TOKEN_EXPIRED, f"The token was used {row.token_uses} times; it is good for no more.")
    if not proven and (row.boot_id != boot_id or now >= row.token_until):
        raise HutchError(Reason.TOKEN_EXPIRED)


def renewed(row: ExecutorRow, now: int, *, lifetime: int = LIFETIME) -> int | None:
    """Return a token's new expiry, or None while more than half of its lifetime is left.

    The token stays the same, so that a crash between two writes locks no executor out.
    """
    return now + lifetime if row.token_until - now < lifetime // 2 else None


def renewal_due(until: int, *, lifetime: int = LIFETIME) -> int:
    """Return when a token that expires at `until` has lived half its time."""
    return until - lifetime // 2
